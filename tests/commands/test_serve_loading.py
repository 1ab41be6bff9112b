"""From a checked command line to a model: what is refused before weights are read, and what the log says."""

import logging
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxspec import serve
from jaxspec.commands import serve_loading as loading
from jaxspec.commands.common import in_flags
from jaxspec.commands.serve_loading import (
    MAX_TEMPLATE_BYTES,
    compile_programs,
    find_head,
    largest,
    load,
    load_chat_template,
    memory_table,
    programs_line,
    readable,
    sampling_defaults,
)
from jaxspec.commands.serve_options import parse_arguments, settings_in_use
from jaxspec.config import EngineConfig
from jaxspec.decoding.programs import AdmitProgram, CatchUpProgram, CycleProgram, PrefillProgram
from jaxspec.defaults import UNASKED
from jaxspec.engine.programs import Compilation, ProgramError
from jaxspec.load import LoadedModels, load_models
from jaxspec.serve import known_settings
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target, write_head, write_target
from jaxspec.text.chat_formats import CHAT_FORMATS
from jaxspec.tree_shape import TreeShape
from pallas_kernels.cpu import what_is_missing
from tests.checkpoints.real_heads import dflash, dspark

PLAIN, TREE = TreeShape(num_steps=0), TreeShape(2, 1)
CYCLE = CycleProgram(1, 16, PLAIN)
MADE = {
    AdmitProgram(): Compilation(0.5, from_cache=False),
    CYCLE: Compilation(9.25, from_cache=False),
    PrefillProgram(16, 16): Compilation(0.2, from_cache=True),
}
"""How programs were compiled."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories of tiny models and heads."""
    root = tmp_path_factory.mktemp("models")
    mimo = tiny_target(qkv_bias=True)
    return {
        "target": write_target(root / "target", tiny_target()),
        "mimo": write_target(root / "mimo", mimo, head=random_mtp(mimo.config)),
        "eagle": write_head(root / "eagle", random_eagle(tiny_config())),
        "eagle3": write_head(root / "eagle3", random_head(tiny_config())),
        "dflash": dflash().write(root / "dflash"),
        "dspark": dspark().write(root / "dspark"),
    }


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights is a failure."""
    monkeypatch.setattr("jaxspec.load.load_target", lambda *_, **__: pytest.fail("too late"))


def arguments(places, model, draft=None, more=""):
    command = f"--model-path {places[model]} --log-level error {more}".split()
    return parse_arguments(command + (["--speculative-draft-model-path", str(places[draft])] if draft else []))


def warnings_in(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("model", "algorithm", "draft", "found"),
    [
        ("target", "EAGLE", "eagle", "eagle"),
        ("target", "eagle3", "eagle3", "eagle3"),
        ("mimo", "EAGLE", None, "mimo"),
        ("mimo", "NEXTN", None, "mimo"),
        ("target", "STANDALONE", "target", "target"),
        ("target", "dflash", "dflash", "dflash"),
        ("target", "DSPARK", "dspark", "dspark"),
        ("mimo", "NONE", None, None),
    ],
)
def test_the_right_names(places, model, algorithm, draft, found):
    head = find_head(arguments(places, model, draft, f"--speculative-algorithm {algorithm}"))
    assert head == (places[found] if found else None)


@pytest.mark.parametrize(
    ("model", "algorithm", "draft", "message"),
    [
        ("target", "EAGLE", "eagle3", r"EAGLE was given, but .*eagle3 holds a draft head \(EAGLE3\)"),
        ("target", "EAGLE3", "eagle", r"EAGLE3 was given, but .*eagle holds a draft head \(EAGLE\)"),
        ("target", "NEXTN", "eagle", r"NEXTN was given, but .*eagle holds a draft head \(EAGLE\)"),
        ("mimo", "EAGLE3", None, r"mimo holds a draft head \(MTP\)"),
        ("target", "EAGLE", None, "target holds no head: give --speculative-draft-model-path"),
        ("target", "EAGLE3", "target", "target holds a whole model: give STANDALONE"),
        ("target", "STANDALONE", "eagle", r"STANDALONE was given, but .*eagle holds a draft head \(EAGLE\)"),
        ("target", "DFLASH", "dspark", r"DFLASH was given, but .*dspark holds a draft head \(DSPARK\)"),
        ("target", "STANDALONE", None, "target holds no head: give --speculative-draft-model-path"),
    ],
)
def test_a_name_that_the_head_is_not(places, model, algorithm, draft, message, no_weights):
    with pytest.raises(ValueError, match=message):
        load(arguments(places, model, draft, f"--speculative-algorithm {algorithm}"))


@pytest.mark.parametrize(
    ("model", "draft", "tree"),
    [
        ("mimo", None, "1/1/2"),
        ("target", "eagle", "5/4/8"),
        ("target", None, "plain"),
        ("target", "target", "3/1/4"),
        ("target", "dflash", "5/4/16"),
        ("target", "dspark", "7/4/16"),
    ],
)
def test_each_kind_of_head_draws_its_own_tree(places, model, draft, tree):
    """MTP layers are made for one step, blocks of 6 and 7 for five and seven."""
    assert load_models(places[model], places[draft] if draft else None, progress=False).tree == TreeShape.of(tree)


def test_the_built_in_model_has_an_eagle3_head():
    assert find_head(parse_arguments(["--speculative-algorithm", "EAGLE3"])) == find_head(parse_arguments([]))
    with pytest.raises(ValueError, match=r"holds a draft head \(EAGLE3\)"):
        find_head(parse_arguments(["--speculative-algorithm", "EAGLE"]))


@pytest.mark.parametrize(
    ("more", "draft", "trees"),
    [
        ("", "eagle3", (PLAIN,)),
        ("--speculative-request-trees none", "eagle3", ()),
        ("--speculative-request-trees 2/1/3", "eagle3", (TreeShape(2, 1, 3),)),
        ("--speculative-algorithm NONE", None, ()),
    ],
)
def test_requests_may_turn_speculation_off_unless_told_otherwise(places, more, draft, trees):
    engine = load(arguments(places, "target", draft, more)).engine
    assert engine.config.request_trees == trees and engine.trees.all == (engine.tree, *trees)


def test_without_a_head_a_cpu_uses_n_grams_where_they_pay_and_starts_with_plain_decoding(places, caplog, monkeypatch):
    """The start waits for the programs of plain decoding only. The log says it in its one line of the model."""
    with caplog.at_level(logging.INFO, "jaxspec"):
        models = load(arguments(places, "target"))
        plain = load(arguments(places, "target", None, "--speculative-algorithm NONE"))
    unasked, turned_off = (record.message for record in caplog.records if record.message.startswith("model "))
    assert "NGRAM drafts, the fastest of plain, 7/4/8, 3/1/4 (--speculative-algorithm NONE" in unasked
    assert turned_off.endswith("plain decoding")
    assert models.engine.trees.own == (PLAIN, *UNASKED[None]) and plain.engine.trees.own == (PLAIN,)
    assert models.algorithm == "NGRAM" and models.config.adaptive and not plain.config.ngram
    assert models.engine.runner.table.first() == plain.engine.runner.table.first()
    later = models.engine.runner.table.next_after_start()
    assert {program.tree for program in later if isinstance(program, CycleProgram)} == {PLAIN, *UNASKED[None]}
    assert load_models(places["target"], tree="3/1/4", ngram=True).config.adaptive is False, "who asks gets what was asked for"
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert not load_models(places["target"]).config.ngram


def test_a_head_that_measured_slower_than_plain_decoding_is_tried_beside_it_unless_it_was_asked_for(places, caplog, monkeypatch):
    """As SmolLM2's from 4-bit blocks on CPUs."""
    monkeypatch.setitem(UNASKED, places["eagle3"], (TREE, TREE.limited(0)))
    monkeypatch.setattr("jaxspec.defaults.own_head", lambda target: places["eagle3"])
    with caplog.at_level(logging.INFO, "jaxspec"):
        models = load(arguments(places, "target"))
    assert models.engine.trees.own == (PLAIN, TREE, TREE.limited(0)) and models.algorithm == "EAGLE3 + NGRAM"
    assert "EAGLE3 + NGRAM drafts, the fastest of plain, 2/1/3, 2/1/3/0 (" in caplog.text
    assert {program.tree for program in models.engine.runner.table.first() if isinstance(program, CycleProgram)} == {PLAIN}
    for more in ("--speculative-algorithm EAGLE3", "--speculative-accept-threshold-single 0.5", "--speculative-adaptive"):
        asked = load(arguments(places, "target", more=more))
        assert asked.tree == TreeShape() and not asked.config.ngram, more
    assert load_models(places["target"], places["eagle3"]).tree == TreeShape()
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert load_models(places["target"]).tree == TreeShape()


def test_a_tree_without_a_head_is_refused_before_weights_are_read(places, no_weights):
    with pytest.raises(ValueError, match=r"the draft tree 3/1/4 needs a draft head, and .*target comes with none") as refused:
        load(arguments(places, "target", None, "--speculative-num-steps 3 --speculative-eagle-topk 1"))
    assert in_flags(str(refused.value)).endswith("give --speculative-draft-model-path, or --speculative-ngram")


@pytest.mark.parametrize(
    "command",
    [
        "--speculative-adaptive",
        "--speculative-accept-threshold-acc 0.5",
        "--speculative-request-trees 0",
        "--speculative-draft-window-size 32 --speculative-request-trees none",
    ],
)
def test_flags_for_a_head_without_one_are_refused_before_weights_are_read(places, command, no_weights):
    with pytest.raises(ValueError, match=f"^{command.split()[0]} needs a draft head"):
        load(arguments(places, "target", None, command))


@pytest.mark.parametrize("flag", ["--speculative-request-trees 0", "--speculative-adaptive", "--speculative-draft-window-size 32"])
@pytest.mark.parametrize("plain", ["--tree plain", "--speculative-num-steps 0"])
def test_flags_for_drafts_are_refused_beside_plain_decoding_whether_or_not_there_is_a_head(places, flag, plain, no_weights):
    for given in (arguments(places, "target", None, f"{flag} {plain}"), parse_arguments(f"{flag} {plain}".split())):
        with pytest.raises(ValueError, match=f"^{flag.split()[0]} can't be combined with --tree plain: give a tree of drafts"):
            load(given)


@pytest.mark.parametrize(
    ("draft", "more", "words"),
    [
        ("eagle3", "--speculative-token-map MAP", ["map.json is not used"]),
        ("eagle3", "--speculative-accept-threshold-single 0.9", ["--speculative-accept-threshold-single", "lossy"]),
        ("eagle3", "--max-total-tokens 100", ["up to 96 tokens"]),
        ("eagle", "--dtype float16", ["--dtype float16 works on a CPU, but auto is faster there"]),
    ],
)
def test_what_a_user_may_not_expect_is_a_line_in_the_log(places, tmp_path, caplog, draft, more, words):
    (tmp_path / "map.json").write_text("[1, 2]")
    with caplog.at_level(logging.INFO, "jaxspec"):
        llm = load(arguments(places, "target", draft, more.replace("MAP", str(tmp_path / "map.json"))))
    [said] = warnings_in(caplog)
    assert all(word in said for word in words)
    assert any(f"{draft.upper()} draft tree 5/4/8" in record.message for record in caplog.records)
    assert (llm.engine.stats().total_pages == 6) == ("--max-total-tokens" in more)
    stored = {str(array.dtype) for array in (llm.target.params["embed_tokens"], *jax.tree.leaves(llm.head.params["fc"]))}
    assert stored == ({"float16"} if "float16" in more else {"float32"})


def test_the_settings_that_clients_see_are_those_in_use(places):
    chosen = arguments(places, "target", "eagle", "--max-num-seqs 3 --no-tokenizer-info")
    settings = known_settings(chosen, load(chosen))
    assert settings == replace(chosen.settings, shown=settings.shown) and not settings.tokenizer_info
    seen = {"speculative_algorithm": "EAGLE", "dtype": "float32", "max_running_requests": 3, "chunked_prefill_size": 256}
    assert {name: settings.shown[name] for name in seen} == seen and settings.shown["max_total_tokens"] is None
    switches = ("speculative_ngram", "speculative_adaptive", "disable_radix_cache")
    assert not any(settings.shown[name] for name in switches)
    in_use = settings_in_use(EngineConfig(ngram=True, adaptive=True, prefix_cache=False))  # as on a CPU where nothing was asked for
    assert all(in_use[name] for name in switches)
    assert settings.shown.keys() - chosen.settings.shown.keys() == set()


def test_target_and_head_are_quantised_as_the_command_says(places):
    models = load(arguments(places, "target", "eagle", "--quantization int8"))
    for loaded in (models.target.params["layers"][0]["self_attn"]["o_proj"], models.head.params["fc"]):
        assert loaded["packed_rows"].dtype == "int8"
    with pytest.raises(ValueError, match=r"quantization must be one of int8, fp8, int4 or none .*, got 'int5'"):
        load_models(quantization="int5")


@pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
def test_smollm2s_head_has_8_bits_unless_others_were_asked_for(places, monkeypatch):
    monkeypatch.setattr("jaxspec.load.SMOLLM2_HEAD", places["eagle"])
    for more, names in [
        ("", {"packed_rows"}),
        ("--speculative-draft-model-quantization none", {"rows"}),
        ("--quantization none", {"rows"}),
    ]:
        models = load(arguments(places, "target", "eagle", more))
        assert names <= models.head.params["fc"].keys() and "rows" in models.target.params["layers"][0]["self_attn"]["o_proj"]


@pytest.mark.parametrize(("driver", "told"), [("12.2", True), ("12.8", False), (None, False)])
def test_a_driver_without_graphs_is_told(places, caplog, monkeypatch, driver, told):
    models = load(arguments(places, "target", "eagle"))
    monkeypatch.setattr(loading, "driver_version", lambda: driver)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    caplog.clear()
    loading.log_model(models, arguments(places, "target", "eagle"))
    assert [("CUDA 12.2" in said and "12.3 or newer" in said) for said in warnings_in(caplog)] == [True] * told


def test_a_template_is_read_and_bounded(places, tmp_path):
    llm = load(arguments(places, "target"))
    assert load_chat_template(arguments(places, "target"), llm) is None
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"--chat-template .*template\.jinja can't be used: the model has no tokenizer"):
        load_chat_template(arguments(places, "target", None, f"--chat-template {path}"), llm)
    with pytest.raises(ValueError, match=r"--chat-template chatml can't be used: the model has no tokenizer"):
        load_chat_template(arguments(places, "target", None, "--chat-template chatml"), llm)
    path.write_text("x" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ValueError, match=r"template\.jinja is larger than 1048576 bytes"):
        load_chat_template(arguments(places, "target", None, f"--chat-template {path}"), llm)


@pytest.fixture(scope="module")
def built_in() -> LoadedModels:
    return load(parse_arguments(["--speculative-algorithm", "NONE", "--log-level", "error"]))


def test_a_given_template_wins(built_in, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    for argv, text in ([], "a"), (["--chat-template", str(path)], "a!"):
        template = load_chat_template(parse_arguments(argv), built_in)
        assert template is not None
        with template:
            assert template.render([{"role": "user", "content": "a"}]) == text


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "It's 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
]


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt's 1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama-2",
            "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nIt's 1+1? [/INST] 2 </s><s>[INST] And 2+2? [/INST]",
            "[INST] Hi [/INST]",
        ),
        (
            "mistral",
            "[SYSTEM_PROMPT]\nBe brief.\n[/SYSTEM_PROMPT]\n\nIt's 1+1? [/INST] 2 </s><s>[INST] And 2+2? [/INST]",
            "[INST] Hi [/INST]",
        ),
        (
            "vicuna_v1.1",
            "Be brief. USER: It's 1+1? ASSISTANT: 2</s>USER: And 2+2? ASSISTANT:",
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
            "polite answers to the user's questions. USER: Hi ASSISTANT:",
        ),
    ],
)
def test_templates_have_sglangs_names_and_texts(built_in, name, text, first):
    """The texts follow from get_prompt of SGLang's Conversation, by hand."""
    template = load_chat_template(parse_arguments(["--chat-template", name]), built_in)
    assert template is not None
    with template:
        assert template.render(CHAT) == text
        assert template.render([{"role": "user", "content": "Hi"}]) == first
        assert template.stop == CHAT_FORMATS[name].stop


def test_the_makers_of_a_model_recommend_how_to_sample(tmp_path, caplog):
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == sampling_defaults(tmp_path, "other") == {}
    assert sampling_defaults(tmp_path, "smollm2") == {"temperature": 0.0}
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "min_p": null, "eos_token_id": [1, 2], "max_length": 99}')
    with caplog.at_level("INFO", "jaxspec"):
        assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert "temperature=0.6, top_k=20" in caplog.text
    file.write_text('{"temperature": 1e-6}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}
    file.write_text('{"top_p": "high"}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must be .*; --sampling-defaults openai ignores it"):
        sampling_defaults(tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LoadedModels:
    target = write_target(tmp_path_factory.mktemp("models") / "tiny", tiny_target())
    return load_models(target, num_pages=50, max_running_requests=3)


def megabytes(line: str) -> float:
    name, size, unit = line[:17].strip(), *line[17:].split()[:2]
    assert name and unit == "MB"
    return float(size)


@pytest.fixture
def made(llm: LoadedModels, monkeypatch: pytest.MonkeyPatch):
    """Those of MADE, of which the last but one takes the most memory."""
    programs = llm.engine.runner.programs
    monkeypatch.setattr(programs, "compilations", MADE)
    monkeypatch.setattr(programs, "temporary_bytes", {program: 1_000_000 * (1 + (program == CYCLE)) for program in MADE}.get)


@pytest.mark.usefixtures("made")
def test_the_parts_are_what_the_arrays_take_and_add_up(llm: LoadedModels):
    target, cache, requests, temporaries, total = memory_table(llm).splitlines()  # no head, no line
    nbytes = sum(array.nbytes for array in jax.tree.leaves((llm.engine.runner.params, llm.engine.runner.state)))
    assert megabytes(total) == pytest.approx(nbytes / 1e6 + 2.0, abs=0.051)
    assert megabytes(total) == pytest.approx(sum(map(megabytes, (target, cache, requests, temporaries))), abs=0.21)
    assert target.startswith("  target weights") and requests.endswith("3 at a time")
    assert cache.endswith("800 tokens in 50 pages, taken as they are used")
    assert temporaries.endswith(f"of the largest program: {CYCLE}")


@pytest.mark.usefixtures("made")
def test_the_share_of_the_device_if_it_tells(llm: LoadedModels, monkeypatch: pytest.MonkeyPatch):
    class Device:
        process_index = 0

        def memory_stats(self):
            return {"bytes_limit": 2 * 10**9}

    assert " of " not in memory_table(llm).splitlines()[-1]
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert memory_table(llm).splitlines()[-1].endswith("of 2.0 GB, 0%")


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("ahead", "backend", "wait_for_all"), [(None, "cpu", False), (None, "gpu", True), ("first", "gpu", False), ("all", "cpu", True)]
)
def test_what_the_server_waits_for(llm: LoadedModels, ahead, backend, wait_for_all, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(llm.engine, "warm_up", lambda **options: asked.append(options) or 1.5)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with caplog.at_level(logging.INFO, "jaxspec"):
        compile_programs(llm, ahead, progress=False)
    assert asked == [{"progress": False, "wait_for_all": wait_for_all}]
    assert any(record.message.startswith("compiled 3 programs in 1.5 s (1 from the cache") for record in caplog.records)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("progress", [True, False])
def test_without_progress_one_warning_says_that_programs_compile(llm: LoadedModels, progress, monkeypatch, caplog):
    monkeypatch.setattr(llm.engine, "warm_up", lambda **_: 1.5)
    with caplog.at_level(logging.WARNING, "jaxspec"):
        compile_programs(llm, None, progress=progress)
    assert [record.message.split(",")[0] for record in caplog.records] == ["compiling programs"] * (not progress)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            ProgramError.of(CYCLE, "failed on its first run", RuntimeError("a\nb")),
            1,
            f"the program ({CYCLE}) failed on its first run",
        ),
        (ValueError("lower num_pages"), 2, "lower --max-total-tokens"),
    ],
)
@pytest.mark.parametrize("failing", ["load", "compile_programs"])
def test_a_failed_start_ends_with_one_line(failing, error, status, line, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    models = SimpleNamespace(name="x", directory=None, engine=SimpleNamespace(prefix_cache=SimpleNamespace()))
    found = {"load": models, "load_chat_template": None, "sampling_defaults": {}, "compile_programs": None}
    for name, loaded in found.items():
        monkeypatch.setattr(loading, name, fail if name == failing else lambda *_, loaded=loaded: loaded)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(serve, "configure_logging", lambda _level: None)
    try:
        assert serve.main(["--port", "0"]) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err.splitlines()
    assert [each for each in said if "error:" in each] == [said[-1]] and line in said[-1]
    assert not any("Traceback" in each for each in said)


def test_programs_are_counted_and_the_slowest_named():
    expected = "compiled 3 programs in 9.8 s (1 from the cache; slowest: cycle 0/1/1, batch 1: 9.2 s; admit: 0.5 s)"
    assert programs_line(MADE, 9.84) == expected
    found = {PrefillProgram(16, 16): MADE[PrefillProgram(16, 16)]}
    assert programs_line(found, 1) == "compiled 1 programs in 1.0 s (1 from the cache)"


def test_only_the_largest_of_a_kind_are_looked_at():
    cycles = [CycleProgram(batch, 64, tree) for tree in (TREE, PLAIN) for batch in (1, 8, 4)]
    prefills = [PrefillProgram(chunk, 64) for chunk in (16, 256, 64)]
    others = [CatchUpProgram(2, 64), CatchUpProgram(8, 64), AdmitProgram()]
    expected = {CycleProgram(8, 64, TREE), CycleProgram(8, 64, PLAIN), PrefillProgram(256, 64), *others[1:]}
    assert set(largest([*cycles, *prefills, *others])) == expected


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MB"), (24_140_000, "24.1 MB"), (1_000_000_000, "1.0 GB")])
def test_bytes_for_people(size: int, text: str):
    assert readable(size) == text
