"""Flags of SGLang and vLLM: without effect, each with one line in the log; with effect, refused; and --speculative-config."""

import json

import pytest

from jaxspec.commands.compat import IGNORED, accepted_values
from jaxspec.commands.serve_options import make_parser, parse_arguments
from jaxspec.config import EngineConfig
from jaxspec.tree_shape import TreeShape

EACH = [(group.instead, *spelling.partition("=")) for group in IGNORED for spelling in group.names.split()]
"""The reason, and the flag's name, = if it takes a value, and which."""
LIMITED = [each for each in EACH if accepted_values(each[-1])]


def test_each_is_accepted_with_one_sentence():
    """Those that take only certain values, with each of these."""
    words = []
    for _, name, takes, values in EACH:
        for value in accepted_values(values) or ["7"]:
            words += [name, *([value] if takes else []), *(["8"] if values == "..." else [])]
    arguments = parse_arguments([*words, "--port", "5"])
    assert arguments.notes == tuple(f"{name} has no effect: {instead}" for instead, name, *_ in EACH)
    assert arguments.given == {"port": 5} and arguments.model is None


def test_a_value_that_would_change_something_is_refused(capsys: pytest.CaptureFixture):
    assert len(LIMITED) > 100
    parser = make_parser()
    for instead, name, _, values in LIMITED:
        with pytest.raises(SystemExit) as end:
            parser.parse_args([name, "2.5"])
        [line] = capsys.readouterr().err.splitlines()
        only = accepted_values(values)[0] or "the empty text"
        assert end.value.code == 2 and f"{name} 2.5 is not supported: only {only}" in line and instead in line


SGLANG = """--disaggregation-mode null --model-impl auto --load-balance-method round_robin --gpu-id-step 1 --ep 1 --hicache-ratio 2
    --json-model-override-args {} --model-loader-extra-config {} --max-loras-per-batch 8 --moe-a2a-backend none --dtype auto
    --kv-cache-dtype auto --schedule-policy fcfs --schedule-conservativeness 1.0 --page-size 1 --sampling-defaults model
    --watchdog-timeout 300 --log-level info --decode-log-interval 40 --host 127.0.0.1 --port 30000 --dp-size 1 --tp-size 1
    --nnodes 1 --node-rank 0 --speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1.0 --stream-interval 1
    --speculative-attention-mode prefill --speculative-ngram-match-type BFS --torch-compile-max-bs 32 --max-prefill-tokens 16384"""
VLLM = """--max-logprobs 20 --tokenizer-mode auto --load-format auto --seed 0 --gpu-memory-utilization 0.92 --kv-cache-dtype auto
    --generation-config auto --tensor-parallel-size 1 -tp 1 --pipeline-parallel-size 1 --data-parallel-size 1 --port 8000
    --max-num-batched-tokens 2048 --max-num-seqs 128 --block-size 16 --enable-chunked-prefill --enable-prefix-caching
    --mm-processor-cache-gb 4.0 --allowed-origins ["*"] --allowed-methods ["*"] --uvicorn-log-level info --scheduling-policy fcfs
    --no-enable-lora --no-trust-remote-code --no-enforce-eager --no-enable-expert-parallel --stream-interval 1"""


@pytest.mark.parametrize("flags", [SGLANG, VLLM], ids=["SGLang", "vLLM"])
def test_their_own_defaults_are_no_reason_to_refuse(flags: str):
    """What their start logs show, all at once."""
    arguments = parse_arguments(flags.split())
    assert EngineConfig(**arguments.engine) and not arguments.warnings


def test_one_line_per_option_however_often_it_is_given():
    command = "--enable-metrics --cuda-graph-bs 1 2 4 --pp 1 --enable-metrics --pp-size 1"
    arguments = parse_arguments(command.split())
    assert [note.partition(" ")[0] for note in arguments.notes] == ["--enable-metrics", "--cuda-graph-bs", "--pp", "--pp-size"]


@pytest.mark.parametrize("flag", ["--lora-paths x", "--enable-lora", "--is-embedding"])
def test_what_is_missed_is_refused_by_name(flag: str, refused):
    """Ignoring these would change what the user gets."""
    assert f"there is no option {flag.split()[0]}" in refused(flag.split())


def test_parsers_have_the_names_of_other_servers():
    line = "--tool-call-parser llama3_json --enable-auto-tool-choice --reasoning-parser deepseek-r1"
    arguments = parse_arguments(line.split())
    assert (arguments.tool_call_parser, arguments.reasoning_parser) == ("llama3_json", "deepseek-r1")


@pytest.mark.parametrize(
    ("config", "algorithm", "draft", "steps"),
    [
        ({"method": "eagle3", "model": "head", "num_speculative_tokens": 3}, "EAGLE3", "head", 3),
        ({"method": "eagle", "model": "head", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, "EAGLE", "head", 5),
        ({"method": "draft_model", "model": "small", "num_speculative_tokens": 4}, "STANDALONE", "small", 4),
        ({"method": "mtp", "num_speculative_tokens": 1}, "NEXTN", None, 1),
        ({"method": "mimo_mtp", "num_speculative_tokens": 1}, "NEXTN", None, 1),
        ({"method": "dflash", "model": "head", "num_speculative_tokens": 15}, "DFLASH", "head", 15),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, "NGRAM", "ngram", 4),
        ({"method": "suffix", "num_speculative_tokens": 8}, "NGRAM", "ngram", 8),
        *(({"model": model, "num_speculative_tokens": 4}, "NGRAM", "ngram", 4) for model in ("ngram", "[ngram]")),
        ({"method": "ngram", "model": "[ngram]", "num_speculative_tokens": 4}, "NGRAM", "ngram", 4),
        ({"num_speculative_tokens": 2}, None, None, 2),
    ],
)
def test_vllms_speculative_config_is_a_chain(config: dict, algorithm: str | None, draft: str | None, steps: int):
    arguments = parse_arguments(["--speculative-config", json.dumps(config), "--speculative-adaptive"])
    assert (arguments.algorithm, arguments.draft) == (algorithm, draft)
    assert ("ngram" in arguments.engine) == (algorithm == "NGRAM")
    assert arguments.tree == TreeShape(steps, 1, steps + 1)
    lookups = {"ngram_min_match": config.get("prompt_lookup_min"), "ngram_max_match": config.get("prompt_lookup_max")}
    assert {name: arguments.engine.get(name) for name in lookups} == lookups


def test_suffix_needs_no_number_of_tokens():
    keys = {"max_tree_depth": 24, "max_cached_requests": 10000, "max_spec_factor": 1.0, "min_token_prob": 0.1}
    config = {"method": "suffix", **{f"suffix_decoding_{name}": value for name, value in keys.items()}}
    arguments = parse_arguments(["--speculative-config", json.dumps(config)])
    assert (arguments.algorithm, arguments.tree, arguments.engine["ngram"]) == ("NGRAM", None, True)
    assert [note.split()[1] for note in arguments.notes] == [f"suffix_decoding_{name}" for name in keys]
    assert parse_arguments(["--speculative-config", '{"method": "suffix"}']).notes == ()
    eager = '{"model": "head", "num_speculative_tokens": 3, "enforce_eager": true}'
    assert "enforce_eager has no effect: XLA compiles" in parse_arguments(["-sc", eager]).notes[0]


def test_its_revision_is_that_of_the_draft(refused):
    config = ["--speculative-config", '{"method": "eagle3", "model": "head", "revision": "v2", "num_speculative_tokens": 3}']
    same = ["--speculative-draft-model-revision", "v2"]
    assert parse_arguments(config).hub == parse_arguments(same).hub
    assert "--speculative-draft-model-revision say the same" in refused([*config, *same])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON, got '{'"),
        ("[" * 100_000, "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "num_speculative_tokens must be a whole number >= 1, got None"),
        ('{"num_speculative_tokens": 0}', "got 0"),
        ('{"num_speculative_tokens": true}', "got True"),
        ('{"num_speculative_tokens": "3"}', "got '3'"),
        ('{"method": "ngram", "model": "head", "num_speculative_tokens": 3}', "ngram drafts from the text: leave out model"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0}',
            "prompt_lookup_max must be a whole number >= 1",
        ),
        ('{"method": "ngram", "revision": "v2", "num_speculative_tokens": 3}', "ngram drafts from the text: leave out revision"),
        ('{"model": "head", "revision": 2, "num_speculative_tokens": 3}', "revision must be a string"),
        ('{"method": "eagle3", "num_speculative_tokens": 3, "disable_padded_drafter_batch": true}', "is not supported; supported"),
        (
            '{"method": "suffix", "suffix_decoding_min_token_prob": 2}',
            "suffix_decoding_min_token_prob must be a number between 0 and 1",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "suffix_decoding_max_tree_depth": 24}',
            "suffix_decoding_max_tree_depth is for the method suffix: leave it out",
        ),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 3}', "got 'deepseek_mtp'"),
        ('{"method": 3, "num_speculative_tokens": 3}', "method must be a string of at most 1000 characters, got 3"),
        ('{"model": ["a"], "num_speculative_tokens": 3}', "model must be a string"),
        ('{"num_speculative_tokens": 3, "prompt_lookup_max": 4}', "prompt_lookup_max is for the method ngram"),
        (
            '{"num_speculative_tokens": 3, "draft_tensor_parallel_size": 0}',
            "draft_tensor_parallel_size must be a whole number >= 1, got 0",
        ),
    ],
)
def test_what_a_speculative_config_can_not_say(text: str, said: str, refused):
    line = refused(["--speculative-config", text])
    assert said in line and "--speculative-config" in line and len(line) < 400


@pytest.mark.parametrize(
    "flag",
    [
        "--speculative-algorithm EAGLE3",
        "--speculative-draft-model-path head",
        "--speculative-num-steps 3",
        "--speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 4",
        "--tree 3/1/4",
    ],
)
def test_sglangs_flags_beside_it_are_refused(flag: str, refused):
    line = refused(["--speculative-config", '{"num_speculative_tokens": 3}', *flag.split()])
    assert f"--speculative-config and {flag.split()[0]} say the same" in line
