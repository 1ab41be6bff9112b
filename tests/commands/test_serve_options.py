"""The command line of the server, its config file and its help: what is taken, what is refused and what is shown."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from jaxspec.commands.common import in_flags
from jaxspec.commands.compat import IGNORED
from jaxspec.commands.config_file import MAX_BYTES
from jaxspec.commands.options import FLAG_OF, OPTIONS
from jaxspec.commands.serve_options import ServerArguments, help_text, make_parser, parse_arguments
from jaxspec.config import EngineConfig
from jaxspec.engine.hosts import Hosts
from jaxspec.server.kv_events import KvEventsConfig
from jaxspec.server.settings import ServerSettings
from jaxspec.tree_shape import TreeShape

PLAIN = TreeShape(num_steps=0)
SECRET = "correct-horse-battery"


def test_without_flags_the_built_in_model_is_served():
    arguments = parse_arguments([])
    assert (arguments.model, arguments.draft, arguments.tree) == (None, None, None)
    assert arguments.engine == {"max_waiting_requests": 1024, "random_seed": None}
    assert (arguments.host, arguments.port, arguments.dtype) == ("127.0.0.1", 30000, "auto")
    assert arguments.given == {} and arguments.notes == arguments.warnings == ()
    assert (arguments.chat_template, arguments.request_trees) == (None, None)
    assert replace(arguments.settings, shown={}) == ServerSettings()


def test_options_may_be_written_with_underscores():
    arguments = parse_arguments(["--speculative_algorithm=EAGLE3", "--speculative_draft_model_path", "a_b", "--model_path", "m_n"])
    assert (arguments.algorithm, arguments.draft, arguments.model) == ("EAGLE3", "a_b", "m_n")
    assert parse_arguments(["--h11_max_header_count", "256"]).notes


def test_one_of_several_hosts_needs_the_key_of_their_group(refused):
    """The key is never on the command line, and never shown."""
    flags = ["--tp-size", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"]
    arguments = parse_arguments(flags, {"JAXSPEC_GROUP_KEY": SECRET})
    assert arguments.hosts == Hosts(2, 1, "10.0.0.1:5000") and arguments.group_key == SECRET.encode()
    assert SECRET not in repr(arguments) and parse_arguments([]).group_key is None and parse_arguments([]).hosts == Hosts()
    for wrong, message in (
        (flags, "JAXSPEC_GROUP_KEY must hold"),
        (["--nnodes", "2"], "--nnodes 2 needs --dist-init-addr"),
        (flags[2:], "1 can't be divided by --nnodes 2"),
    ):
        assert message in refused(wrong, {})


def test_target_and_head_are_quantised_apart():
    arguments = parse_arguments(["-q", "int8", "--speculative-draft-model-quantization", "unquant"])
    assert (arguments.quantization, arguments.draft_quantization) == ("int8", "unquant")
    assert parse_arguments([]).quantization is None and parse_arguments(["--quantization", "none"]).quantization == "none"


def test_every_flag_arrives(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.touch()
    command = f"""--model-path m --speculative-algorithm eagle3 --speculative-draft-model-path d --speculative-num-steps 3
        --speculative-eagle-topk 2 --speculative-num-draft-tokens 6 --host 0.0.0.0 --port 8000 --dtype bfloat16
        --context-length 512 --page-size 8 --chunked-prefill-size 64 --max-running-requests 3 --mem-fraction-static 0.5
        --random-seed 9 --log-level WARNING --served-model-name name --speculative-token-map freq.pt --disable-radix-cache
        --max-queued-requests 7 --speculative-adaptive --speculative-draft-window-size 100 --speculative-draft-sink-size 4
        --speculative-accept-threshold-single 0.5 --speculative-accept-threshold-acc 0.25 --max-total-tokens 1003
        --chat-template {template} --api-key {SECRET} --admin-api-key other --no-tokenizer-info --shutdown-timeout 2.5
        --strict-model-name --request-timeout 60 --speculative-request-trees 0,3/1/4 --speculative-adaptive-trees 2/1/3,3/2/6
        --tokenizer-path m --allowed-origins https://a.example --kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype auto
        --disable-overlap-schedule --compile-ahead all"""
    arguments = parse_arguments(command.split())
    assert (arguments.model, arguments.draft, arguments.tree) == ("m", "d", TreeShape(3, 2, 6))
    assert (arguments.algorithm, arguments.token_map) == ("EAGLE3", "freq.pt")
    assert (arguments.host, arguments.port, arguments.dtype, arguments.log_level) == ("0.0.0.0", 8000, "bfloat16", "warning")
    assert (arguments.served_model_names, arguments.chat_template) == (("name",), str(template))
    assert replace(arguments.settings, shown={}) == ServerSettings(SECRET, "other", 2.5, 60, ("https://a.example",), True, False)
    assert arguments.request_trees == (PLAIN, TreeShape(3, 1, 4))
    assert arguments.engine == {
        "context_length": 512, "page_size": 8, "prefill_chunk": 64, "max_running_requests": 3, "mem_fraction": 0.5,
        "adaptive_trees": (TreeShape(2, 1, 3), TreeShape(3, 2, 6)), "adaptive": True, "prefix_cache": False, "overlap": False,
        "random_seed": 9, "max_waiting_requests": 7, "draft_window_size": 100, "draft_sink_size": 4, "accept_threshold_single": 0.5,
        "accept_threshold_acc": 0.25, "num_pages": 125, "kv_cache_dtype": "fp8_e4m3", "draft_kv_cache_dtype": "auto",
    }  # fmt: skip
    assert len(arguments.given) == 41 and arguments.compile_ahead == "all"
    assert EngineConfig(**arguments.engine).is_lossy


def test_the_cache_is_counted_in_tokens():
    assert parse_arguments(["--max-total-tokens", "1000"]).engine["num_pages"] == 1000 // EngineConfig().page_size


VLLM = {
    "m": "--model-path m",
    "--model m": "--model-path m",
    "--tokenizer m m": "--tokenizer-path m m",
    "--max-model-len 64": "--context-length 64",
    "--gpu-memory-utilization 0.5": "--mem-fraction-static 0.5",
    "--mem-fraction 0.5": "--mem-fraction-static 0.5",
    "--max-num-seqs 3": "--max-running-requests 3",
    "--max-num-queued-reqs 3": "--max-queued-requests 3",
    "--max-num-batched-tokens 99": "--chunked-prefill-size 99",
    "--block-size 8": "--page-size 8",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--seed 7": "--random-seed 7",
    "--kv-cache-dtype fp8": "--kv-cache-dtype fp8_e4m3",
    "--dtype half": "--dtype float16",
    "--no-async-scheduling": "--disable-overlap-schedule",
    "--speculative-draft-model d": "--speculative-draft-model-path d",
    "--draft d": "--speculative-draft-model-path d",
}


@pytest.mark.parametrize(("command", "same"), VLLM.items())
def test_other_spellings(command: str, same: str):
    other = parse_arguments(command.split())
    assert other == parse_arguments(same.split()) and other.given


def test_where_sampling_defaults_come_from():
    for flags in ("", "--sampling-defaults model", "--generation-config auto"):
        assert parse_arguments(flags.split()).model_sampling
    for flags in ("--sampling-defaults openai", "--generation-config vllm"):
        assert not parse_arguments(flags.split()).model_sampling


@pytest.mark.parametrize(
    ("text", "trees"),
    [("0", (PLAIN,)), ("0 3/1/4", (PLAIN, TreeShape(3, 1, 4))), ("5/4/8, 0 5/4/8", (TreeShape(5, 4, 8), PLAIN)), ("none", ())],
)
def test_trees_for_requests(text: str, trees: tuple[TreeShape, ...]):
    arguments = parse_arguments(["--speculative-request-trees", text])
    assert arguments.request_trees == trees
    assert arguments.head_flags == (("--speculative-request-trees",) if trees else ())


@pytest.mark.parametrize(
    ("command", "draft", "tree", "engine", "head_flags"),
    [
        ("--speculative-algorithm NGRAM", "ngram", None, {"ngram": True}, ()),
        ("--draft ngram", "ngram", None, {"ngram": True}, ()),
        ("--draft [ngram] --speculative-algorithm NGRAM --tree 3/1/4", "ngram", TreeShape(3, 1, 4), {"ngram": True}, ()),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 12", "ngram", TreeShape(11, 4, 12), {"ngram": True}, ()),
        (
            "--speculative-algorithm ngram --tree 3/1/4 --speculative-adaptive",
            "ngram", TreeShape(3, 1), {"adaptive": True, "ngram": True}, (),
        ),
        ("--speculative-algorithm EAGLE3 --draft d --speculative-ngram", "d", None, {"ngram": True}, ()),
        ("--speculative-algorithm DFLASH --draft d --speculative-num-draft-tokens 16", "d", TreeShape(15, 1), {}, ()),
        ("--speculative-algorithm dspark --draft d --tree 7/4/32", "d", TreeShape(7, 4, 32), {}, ()),
        ("--speculative-ngram --speculative-ngram-min-match-window-size 2", None, None, {"ngram": True, "ngram_min_match": 2}, ()),
        (
            "--speculative-ngram --speculative-draft-window-size 64 --speculative-accept-threshold-acc 0.9",
            None, None, {"ngram": True, "draft_window_size": 64, "accept_threshold_acc": 0.9}, ("--speculative-draft-window-size",),
        ),
    ],
)  # fmt: skip
def test_drafts_from_the_text(command: str, draft: str | None, tree: TreeShape | None, engine: dict, head_flags: tuple):
    """Alone or merged with a head; what is about any drafts needs no head then."""
    arguments = parse_arguments(command.split())
    assert (arguments.draft, arguments.tree, arguments.head_flags) == (draft, tree, head_flags)
    assert {
        name: value for name, value in arguments.engine.items() if name not in ("random_seed", "max_waiting_requests")
    } == engine


def test_trees_to_choose_from_need_an_engine_that_chooses(refused):
    for argv in (["--speculative-adaptive-trees", "2/1/3"], ["--speculative-adaptive", "--speculative-adaptive-trees", "2/1"]):
        assert "--speculative-adaptive-trees" in refused(argv)


def test_a_second_key_is_not_taken_for_a_model_and_not_shown(tmp_path, refused):
    for second in (SECRET, f"{SECRET}/{SECRET}", SECRET * 40):
        for command in (
            "--api-key first KEY",
            "m --api-key=first KEY",
            "--api_key first KEY --model-path m",
            "m --admin-api-key k KEY x",
        ):
            said = refused([word.replace("KEY", second) for word in command.split()])
            assert "takes one key" in said and SECRET not in said
    for model in (str(tmp_path), "smollm2"):
        assert parse_arguments(["--api-key", "first", model]).model == model
    assert parse_arguments(["org/name", "--api-key", SECRET * 40, "--port", "1"]).settings.api_key == SECRET * 40


def test_keys_from_the_environment_are_used_and_never_shown():
    environment = {"JAXSPEC_API_KEY": SECRET, "JAXSPEC_ADMIN_API_KEY": SECRET + "!"}
    arguments = parse_arguments([], environment)
    assert (arguments.settings.api_key, arguments.settings.admin_api_key) == (SECRET, SECRET + "!")
    assert parse_arguments(["--api-key", "mine"], environment).settings.api_key == "mine"  # the command line wins
    given = parse_arguments(["--api-key", SECRET])
    assert given.given == {"api_key": "***"}
    for shown in (arguments, given):
        assert SECRET not in f"{shown}{shown.given}{shown.settings.shown}"
        assert not {"api_key", "admin_api_key", "config"} & set(shown.settings.shown)


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "x" * 1001])
def test_a_key_that_no_client_could_send_is_refused_without_showing_it(key: str, refused):
    """An empty variable above all: it must not mean an open server."""
    for argv, environment, name in ([["--api-key", key], {}, "--api-key"], [[], {"JAXSPEC_API_KEY": key}, "JAXSPEC_API_KEY"]):
        said = refused(argv, environment)
        assert f"{name} must be 1 to 1000" in said and (not key or key not in said)


def test_the_value_of_an_unknown_option_is_not_repeated(refused):
    said = refused([f"--api-kay={SECRET}"])
    assert "--api-kay: did you mean --api-key?" in said and SECRET not in said


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("prefill_chunk must be at least 1, got 0", "--chunked-prefill-size must be at least 1, got 0"),
        ("lower max_tokens or raise num_pages", "lower max_tokens or raise --max-total-tokens"),
        ("3 wait and max_waiting_requests is 3", "3 wait and --max-queued-requests is 3"),
        (
            "draft_sink_size (5) needs a draft_window_size",
            "--speculative-draft-sink-size (5) needs a --speculative-draft-window-size",
        ),
        ("accept_threshold_acc must be in (0, 1]", "--speculative-accept-threshold-acc must be in (0, 1]"),
        ("lower context_length, or raise mem_fraction", "lower --context-length, or raise --mem-fraction-static"),
        ("my_page_size stays, pages too", "my_page_size stays, pages too"),
        ("/data/token_map.pt, num_pages/x, page_size-2", "/data/token_map.pt, num_pages/x, page_size-2"),
        ("token_map: raise num_pages.", "--speculative-token-map: raise --max-total-tokens."),
        (
            "the draft comes with none: give draft, or ngram=True",
            "the draft comes with none: give --speculative-draft-model-path, or --speculative-ngram",
        ),
        ("give one, ngram=True, or TreeShape(num_steps=0)", "give one, --speculative-ngram, or --tree plain"),
        ("adaptive_trees is for adaptive engines", "--speculative-adaptive-trees is for adaptive engines"),
        ("speculative_draft_model_quantization needs a head", "--speculative-draft-model-quantization needs a head"),
    ],
)
def test_messages_of_the_engine_in_flags(message: str, flags: str):
    assert in_flags(message) == flags


def test_every_setting_has_a_flag():
    """A new field of EngineConfig must not be forgotten."""
    assert {field.name for field in fields(EngineConfig)} == set(FLAG_OF)


@pytest.mark.parametrize(
    ("command", "spec"),
    [
        ("--model m", None),  # what the model comes with decides
        ("--model m --speculative-algorithm none", TreeShape(num_steps=0)),
        ("--speculative-algorithm NONE", TreeShape(num_steps=0)),
        ("--speculative-algorithm EAGLE3", None),
        ("--model m --speculative-draft-model-path d", None),
        ("--speculative-num-steps 0", TreeShape(num_steps=0)),
        ("--speculative-num-steps 4 --speculative-eagle-topk 1", TreeShape(4, 1, 5)),
        ("--tree 5/4/8", TreeShape(5, 4, 8)),
        ("--tree plain", TreeShape(num_steps=0)),
    ],
)
def test_the_draft_tree(command: str, spec: TreeShape | None):
    assert parse_arguments(command.split()).tree == spec


def test_a_changed_tree_is_told():
    command = "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9"
    arguments = parse_arguments(command.split())
    assert arguments.tree == TreeShape(4, 1)
    [warning] = arguments.warnings
    assert "num_draft_tokens=9 becomes" in warning


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        ("*", ("*",)),
        ('["*"]', ("*",)),
        ("https://a.example,http://localhost:3000", ("https://a.example", "http://localhost:3000")),
        ('["https://a.example", "http://[::1]:80"]', ("https://a.example", "http://[::1]:80")),
        ("app://obsidian.md,chrome-extension://abc,null", ("app://obsidian.md", "chrome-extension://abc", "null")),
    ],
)
def test_origins_by_commas_or_as_vllm_writes_them(given: str, origins: tuple[str, ...]):
    assert parse_arguments(["--allowed-origins", given]).settings.allowed_origins == origins


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--nope", "there is no option --nope (see"),
        ("--speculative-num-step 3", "--speculative-num-step: did you mean --speculative-num-steps?"),
        ("--spec-method ngram", "there is no option --spec-method (see --help)"),
        ("--quantization awq", "a quantised checkpoint says itself how: leave the option out), got 'awq'"),
        ("--cuda-graph-max-batch-size 8", "--cuda-graph-max-bs?"),
        ("one two", "unexpected argument: 'two'"),
        ("one --model-path two", "the model was given twice"),
        ("m --tokenizer-path other", "--tokenizer-path must be the model's own directory"),
        ("--tokenizer-path other", "--tokenizer-path must be the model's own directory"),
        (
            "--chat-template /no/such/file",
            "--chat-template must be a file or one of chatml, llama-2, mistral, vicuna_v1.1, and '/no/such/file' is neither",
        ),
        ("--allowed-origins example.org", "must be origins without a path, such as https://chat.example"),
        ("--allowed-origins https://a/page", "got 'https://a/page'"),
        ("--allowed-origins [1]", "got 1"),
        ("--chat-template alpaca", "'alpaca' is neither"),
        ("--shutdown-timeout -1", "--shutdown-timeout"),
        ("--shutdown-timeout nan", "--shutdown-timeout"),
        ("--request-timeout soon", "--request-timeout"),
        ("--request-timeout 0", "--request-timeout: must be above 0"),
        ("--speculative-request-trees all", "got 'all'"),
        ("--speculative-request-trees 3/1", "got '3/1'"),
        ("--speculative-request-trees 2/2/99", "num_draft_tokens=99 must be"),
        ("--speculative-algorithm NONE --speculative-request-trees 0", "--speculative-request-trees can't be combined with"),
        ("--model-pat x", "--model-pat"),  # no abbreviations: they would change meaning when flags are added
        ("--speculative-algorithm uno", "UNO is not supported yet; supported: EAGLE,"),
        ("--speculative-algorithm ngram --draft d", "--speculative-draft-model-path is about a head, and NGRAM has none"),
        (
            "--speculative-algorithm ngram --speculative-draft-model-revision v2",
            "--speculative-draft-model-revision is about a head",
        ),
        (
            "--speculative-algorithm none --speculative-ngram",
            "--speculative-ngram can't be combined with --speculative-algorithm NONE",
        ),
        (
            "--speculative-ngram-max-match-window-size 5",
            "--speculative-ngram-max-match-window-size has no effect without n-gram drafts: give --speculative-ngram",
        ),
        ("--speculative-ngram --speculative-ngram-max-match-window-size 99", "--speculative-ngram-max-match-window-size"),
        ("--speculative-algorithm banana", "'banana'"),
        ("--speculative-algorithm NONE --speculative-draft-model-path d", "--speculative-draft-model-path"),
        ("--speculative-algorithm NONE --speculative-num-steps 3", "--speculative-num-steps"),
        ("--speculative-algorithm NONE --speculative-token-map f.pt", "--speculative-token-map"),
        ("--speculative-algorithm NONE --tree 5/4/8", "--tree can't be combined with"),
        ("--tree 3/1/4 --speculative-num-steps 3", "give --tree or SGLang's three numbers, not both"),
        ("--tree 5/4", "argument --tree: a draft tree is num_steps/topk/num_draft_tokens"),
        ("--speculative-num-steps -1", "argument --speculative-num-steps: must be a whole number >= 0, got -1"),
        ("--speculative-num-steps 3", "missing: topk, num_draft_tokens"),
        ("--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 99", "num_draft_tokens=99"),
        ("--speculative-algorithm NONE --speculative-adaptive", "--speculative-adaptive can't be combined with"),
        (
            "--speculative-algorithm NONE --speculative-draft-window-size 9",
            "--speculative-draft-window-size can't be combined with",
        ),
        (
            "--speculative-algorithm NONE --speculative-accept-threshold-acc 0.5",
            "--speculative-accept-threshold-acc can't be combined with",
        ),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":8} '
            "--speculative-ngram-max-match-window-size 9",
            "--speculative-config and --speculative-ngram-max-match-window-size say the same",
        ),
        ("--speculative-accept-threshold-single 0", "--speculative-accept-threshold-single must be in (0, 1]"),
        ("--speculative-accept-threshold-acc 1.5", "--speculative-accept-threshold-acc must be in (0, 1]"),
        ("--speculative-draft-window-size 0", "--speculative-draft-window-size must be at least 1"),
        ("--speculative-draft-sink-size 4", "(4) needs a --speculative-draft-window-size"),
        ("--max-queued-requests 0", "--max-queued-requests must be at least 1"),
        ("--max-total-tokens 15", "--max-total-tokens must be at least one page, 16 tokens, got 15"),
        ("--max-total-tokens 100000000000000", "--max-total-tokens: a cache has less than 2147483648 tokens, got 100000000000000"),
        ("--max-total-tokens -5 --page-size 1", "--max-total-tokens must be"),
        ("--page-size 0 --max-total-tokens 5", "--page-size must be at least 1"),
        ("--page-size 0", "--page-size must be at least 1"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size must be at least 1"),
        ("--max-running-requests 0", "--max-running-requests"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static"),
        ("--context-length 1", "--context-length"),
        ("--context-length long", "--context-length"),
        ("--dtype int8", "--dtype"),
        ("--kv-cache-dtype bfloat16", "must be auto, which is the dtype of the weights (--dtype), or fp8_e4m3, got 'bfloat16'"),
        ("--port 65536", "--port"),
        ("--port http", "--port"),
        ("--log-level loud", "--log-level"),
        ("--compile-ahead some", "--compile-ahead"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(command: str, said: str, refused):
    assert said in refused(command.split())


# --config: YAML on a par with the command line, which wins.

EVERYTHING = """
# names may be written either way
model: some/model
max_running_requests: 4
mem-fraction-static: 0.5
speculative_num_steps: 3
speculative_eagle_topk: 1
disable-radix-cache: true
speculative-adaptive: false
async-scheduling: false
allowed-origins: [https://a.example, app://b]
speculative-request-trees: [0, 2/1/3]
cuda-graph-bs: [1, 2]
served-model-name: "yes"
api_key: 0123
"""


def config_file(tmp_path: Path, content: str | bytes) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["--config", str(path)]


def from_file(tmp_path: Path, content: str, *argv: str) -> ServerArguments:
    return parse_arguments([*argv, *config_file(tmp_path, content)])


def test_a_list_at_the_end_of_a_config_file_is_not_the_models(tmp_path: Path):
    arguments = from_file(tmp_path, "served-model-name: [a, b]", "some/model")
    assert (arguments.model, arguments.served_model_names) == ("some/model", ("a", "b"))


def test_a_config_file_may_hold_every_kind_of_value(tmp_path: Path):
    arguments = from_file(tmp_path, EVERYTHING)
    assert (arguments.model, arguments.served_model_names) == ("some/model", ("yes",))
    assert arguments.engine == {
        "max_running_requests": 4, "mem_fraction": 0.5, "prefix_cache": False, "max_waiting_requests": 1024, "random_seed": None,
        "overlap": False,
    }  # fmt: skip
    assert arguments.settings.allowed_origins == ("https://a.example", "app://b")
    assert arguments.tree == TreeShape(3, 1)
    assert arguments.request_trees == (TreeShape(num_steps=0), TreeShape(2, 1, 3))
    assert arguments.settings.api_key == "0123"  # not the number 83 that YAML takes it for
    assert len(arguments.notes) == 1 and arguments.notes[0].startswith("--cuda-graph-bs has no effect")


def test_the_command_line_wins_over_the_file(tmp_path: Path):
    arguments = from_file(tmp_path, EVERYTHING, "other/model", "--max-num-seqs", "9", "--speculative-num-steps=2")
    assert (arguments.model, arguments.tree, arguments.engine["max_running_requests"]) == ("other/model", TreeShape(2, 1), 9)
    assert arguments.engine["mem_fraction"] == 0.5
    assert from_file(tmp_path, EVERYTHING, "--model-path", "other/model").model == "other/model"


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("tree: 5/1/6", "--speculative-num-steps 3 --speculative-eagle-topk 1"),
        ("speculative_num_steps: 5", "--tree 3/1/4"),
        ("tree: 5/1/6\ndraft: x", '--speculative-config {"method":"eagle3","model":"x","num_speculative_tokens":3}'),
        ("speculative-config: {method: eagle3, model: y}", "--speculative-algorithm EAGLE --draft x --tree 3/1/4"),
        ("tree: 5/1/6\ndraft: x", "--speculative-algorithm ngram --tree 3/1/4"),
        ("draft: x\nspeculative-draft-window-size: 32", "--speculative-algorithm NGRAM --tree 3/1/4"),
        ("speculative-config: {method: eagle3, model: y}", "--draft x --tree 3/1/4"),
        ("speculative-algorithm: NONE", "--draft x --tree 3/1/4"),
        ("speculative-algorithm: NGRAM", "--draft x --tree 3/1/4"),
        ("speculative-algorithm: NONE", "--tree 3/1/4"),
        ("speculative-algorithm: NONE", "--speculative-ngram --speculative-num-steps 3 --speculative-eagle-topk 1"),
        (
            "speculative-draft-model-revision: a\nspeculative-ngram-max-match-window-size: 9",
            '--speculative-config {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":8}',
        ),
    ],
)
def test_the_command_line_wins_also_in_other_words(tmp_path: Path, content: str, command: str):
    assert from_file(tmp_path, content, *command.split()).tree == TreeShape(3, 1)


def test_a_command_line_without_speculation_wins_over_a_files_head(tmp_path: Path):
    content = "speculative-adaptive-trees: 3/1/4\nspeculative-ngram: true\nspeculative-ngram-share: 9\n"
    content += "speculative-ngram-min-match-window-size: 2\nspeculative-draft-model-quantization: int8\n"
    heads = ("tree: 5/1/6\ndraft: x", "speculative-config: {method: eagle3, model: y}", "speculative-algorithm: NGRAM")
    for head in (*heads, "speculative-algorithm: NONE", "speculative-num-steps: 5\nspeculative-eagle-topk: 4"):
        for plain in ("--speculative-algorithm=NONE", "--tree=plain", "--speculative-num-steps=0"):
            arguments = from_file(tmp_path, content + head, plain)
            assert (arguments.tree, arguments.draft, arguments.draft_quantization) == (TreeShape(num_steps=0), None, None)
            assert arguments.engine == {"random_seed": None, "max_waiting_requests": 1024}


def test_mappings_hold_what_yaml_says(tmp_path: Path):
    events = '{enable_kv_cache_events: True, publisher: "null", replay_endpoint: null, topic: "5", hwm: 7}'
    speculation = "{method: ngram, num_speculative_tokens: 4, model: ~}"
    ignored = "compilation-config: {level: 3}\nlimit-mm-per-prompt: {}"
    arguments = from_file(tmp_path, f"kv-events-config: {events}\nspeculative-config: {speculation}\n{ignored}")
    assert arguments.kv_events == KvEventsConfig(True, publisher="null", topic="5", hwm=7)
    assert arguments.algorithm == "NGRAM" and len(arguments.notes) == 2
    of_suffix = "{method: suffix, suffix_decoding_min_token_prob: 0.25, suffix_decoding_max_spec_factor: 1e3}"
    assert len(from_file(tmp_path, f"speculative-config: {of_suffix}").notes) == 2


@pytest.mark.parametrize("null", ["null", "Null", "~"])
def test_null_is_not_given_and_in_quotes_it_is_a_text(tmp_path: Path, null: str):
    """As a key it would win over the one in the environment."""
    content = f"api_key: {null}\nport: {null}\ndisable-radix-cache: {null}\nserved-model-name: '{null}'\nadmin-api-key: \"{null}\""
    arguments = parse_arguments(config_file(tmp_path, content), {"JAXSPEC_API_KEY": "mine"})
    assert (arguments.settings.api_key, arguments.settings.admin_api_key, arguments.port) == ("mine", null, 30000)
    assert arguments.served_model_names == (null,) and "prefix_cache" not in arguments.engine


def test_vllms_nested_speculation(tmp_path: Path):
    content = "speculative_config:\n  method: eagle3\n  model: head\n  num_speculative_tokens: 3\n"
    arguments = from_file(tmp_path, content)
    assert (arguments.algorithm, arguments.draft, arguments.tree) == ("EAGLE3", "head", TreeShape(3, 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max_runing_requests: 4", "max_runing_requests is not an option of a config file: did you mean --max-running-requests?"),
        ("zebra: 4", "zebra is not an option of a config file (see"),
        ("config: other.yaml", "config is not an option of a config file"),
        ("help: cache", "help is not an option of a config file"),
        ("disable-radix-cache: 1", "disable-radix-cache must be true or false, got '1'"),
        ("port: []", "port must be a value, got []"),
        ("port: {a: 1}", "port must be a value, got {'a': '1'}"),
        ("port:", "port must be a value, got ''"),
        ("port: 99999", "argument --port: must be a whole number from 0 to 65535"),
        ("page_size: 0", "--page-size must be at least 1, got 0"),
        ("[port, 1]", "must hold options, one per line"),
        ("", "must hold options, one per line"),
        ("port: 1\n  host: x", "is not valid YAML"),
        ("served-model-name: !!python/object/apply:os.system [exit]\nzebra: 1", "zebra is not an option"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "line 2 has an alias, which is not supported"),
        (b"port: \xff", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("# " + "x" * MAX_BYTES, f"is larger than {MAX_BYTES} bytes"),
    ],
    ids=range(18),
)
def test_what_a_config_file_can_not_say(tmp_path: Path, content: str | bytes, said: str, refused):
    line = refused(config_file(tmp_path, content))
    assert said in line and len(line) < 1000
    assert "config.yaml" in line or said.startswith(("argument", "--page-size"))


@pytest.mark.parametrize("key", ["@KEY", "sk: KEY", "*KEY", '"KEY', "{a: KEY}", "[[KEY]]", "!KEY!x y", "a\n  KEY: b"])
def test_a_key_that_yaml_reads_otherwise_is_not_shown(tmp_path: Path, key: str, refused):
    assert SECRET not in refused(config_file(tmp_path, f"api-key: {key.replace('KEY', SECRET)}"))


def test_a_config_file_that_is_not_there(tmp_path: Path, refused):
    for path in (tmp_path / "none.yaml", tmp_path):
        assert f"--config {path}: " in refused(["--config", str(path)])


# --help: instant, in sections, and searchable.


def test_help_is_instant_and_loads_no_jax():
    """Also with a config file and a search: nothing on the way to the model needs JAX."""
    code = (
        "import sys; import jaxspec.serve; from jaxspec.commands.serve_options import parse_arguments\n"
        "try: parse_arguments(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print({'jax', 'transformers', 'fastapi', 'flax'} & set(sys.modules))"
    )
    for argv in (["--help"], ["--help=cache"], ["--port", "1"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "set()"


def test_help_is_in_groups():
    shown = help_text("")
    places = [shown.index(f"\n{title}:\n") for title in ("model", "speculative decoding", "engine", "server")]
    assert places == sorted(places)
    assert shown.count("LOSSY") == 2  # no one shall set a threshold and not know
    assert "--cuda-graph-max-bs" not in shown and "--help=ignored" in shown


def test_help_comes_from_the_field_that_an_option_sets():
    assert "tokens per page of the cache (default: 16)" in help_text("page-size")
    assert OPTIONS["context_length"].text.endswith("in tokens (default: the model's own)")
    assert OPTIONS["request_timeout"].text.endswith("(default: never)")


def test_every_option_is_explained():
    parser = make_parser()
    for action in {id(action): action for action in parser.by_name.values()}.values():
        assert action.help and all(name.startswith("-") for name in action.option_strings)


def test_a_search_shows_what_contains_the_word_and_nothing_else():
    shown = help_text("PAGE")
    assert "--page-size" in shown and "engine:" in shown and "--speculative-draft-sink-size" in shown
    assert "--port" not in shown and "server:" not in shown and "usage" not in shown
    assert "--tokenizer-path" in help_text("tokenizer-path") and "--tokenizer-mode" in help_text("tokenizer")
    assert help_text("max-model-len").count("--") == 2  # an option and its other spelling
    assert help_text("zebra") == "no option contains 'zebra'"


def test_ignored_options_are_listed_when_asked_for():
    shown = help_text("ignored")
    names = [name.partition("=")[0] for group in IGNORED for name in group.names.split()]
    assert all(name in shown for name in names) and all(group.instead in shown for group in IGNORED)
    assert "--cuda-graph-max-bs" in help_text("cuda-graph") and "engine:" not in help_text("cuda-graph")


def test_the_command_prints_it_and_may_be_read_in_part():
    command = f"{sys.executable} -m jaxspec.serve --help"
    for asked, said in ((command, "--speculative-num-draft-tokens"), (f"{command} | head -n 1", "usage: ")):
        ended = subprocess.run(asked, shell=True, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "") and said in ended.stdout
