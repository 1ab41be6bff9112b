"""Flags of SGLang and vLLM: without effect, each with one line in the log; with effect, refused; and --speculative-config."""

import json

import pytest

from jaxspec.commands.compat import IGNORED, Ignored
from jaxspec.commands.serve_options import parse_arguments
from jaxspec.config import TreeShape

EACH = [(group, *spelling.partition("=")) for group in IGNORED for spelling in group.names.split()]

LIMITED = [each for each in EACH if each[0].only]


def command(group: Ignored, name: str, takes: str, several: str) -> list[str]:
    value = group.only[0] if group.only else "7"
    return [name, *([value] if takes else []), *(["8"] if several else [])]


@pytest.mark.parametrize(("group", "name", "takes", "several"), EACH, ids=[name for _, name, *_ in EACH])
def test_each_is_accepted_with_one_sentence(group: Ignored, name: str, takes: str, several: str):
    arguments = parse_arguments([*command(group, name, takes, several), "--port", "5"])
    assert arguments.notes == (f"{name} has no effect: {group.instead}",)
    assert arguments.given == {"port": 5} and arguments.model is None


@pytest.mark.parametrize(("group", "name", "takes", "several"), LIMITED, ids=[name for _, name, *_ in LIMITED])
def test_a_value_that_would_change_something_is_refused(
    group: Ignored, name: str, takes: str, several: str, capsys: pytest.CaptureFixture
):
    assert takes and not several
    with pytest.raises(SystemExit) as end:
        parse_arguments([name, "2.5"])
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and f"{name} 2.5 is not supported: only {group.only[0]}" in line


def test_one_line_per_option_however_often_it_is_given():
    command = "--enable-metrics --cuda-graph-bs 1 2 4 --pp 1 --enable-metrics --pp-size 1"
    arguments = parse_arguments(command.split())
    assert [note.partition(" ")[0] for note in arguments.notes] == ["--enable-metrics", "--cuda-graph-bs", "--pp", "--pp-size"]


@pytest.mark.parametrize("flag", ["--lora-paths x", "--enable-lora", "--is-embedding"])
def test_what_is_missed_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture):
    """Ignoring these would change what the user gets."""
    with pytest.raises(SystemExit):
        parse_arguments(flag.split())
    assert f"there is no option {flag.split()[0]}" in capsys.readouterr().err


def test_parsers_have_the_names_of_other_servers():
    arguments = parse_arguments(
        ["--tool-call-parser", "llama3_json", "--enable-auto-tool-choice", "--reasoning-parser", "deepseek-r1"]
    )
    assert (arguments.tool_call_parser, arguments.reasoning_parser) == ("llama3_json", "deepseek-r1")


@pytest.mark.parametrize(
    ("config", "algorithm", "draft", "steps"),
    [
        ({"method": "eagle3", "model": "head", "num_speculative_tokens": 3}, "EAGLE3", "head", 3),
        ({"method": "eagle", "model": "head", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, "EAGLE", "head", 5),
        ({"method": "draft_model", "model": "small", "num_speculative_tokens": 4}, "STANDALONE", "small", 4),
        ({"method": "mtp", "num_speculative_tokens": 1}, "NEXTN", None, 1),
        ({"method": "dflash", "model": "head", "num_speculative_tokens": 15}, "DFLASH", "head", 15),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, "NGRAM", "ngram", 4),
        ({"method": "suffix", "num_speculative_tokens": 8}, "NGRAM", "ngram", 8),
        ({"num_speculative_tokens": 2}, None, None, 2),
    ],
)
def test_vllms_speculative_config_is_a_chain(config: dict, algorithm: str | None, draft: str | None, steps: int):
    arguments = parse_arguments(["--speculative-config", json.dumps(config), "--speculative-adaptive"])
    assert (arguments.algorithm, arguments.draft) == (algorithm, draft)
    assert arguments.tree == TreeShape(steps, 1, steps + 1)
    lookups = {"ngram_min_match": config.get("prompt_lookup_min"), "ngram_max_match": config.get("prompt_lookup_max")}
    assert {name: arguments.engine.get(name) for name in lookups} == lookups


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
        ('{"method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_spec_factor": 1}', "is not supported; supported"),
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
def test_what_a_speculative_config_can_not_say(text: str, said: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--speculative-config", text])
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
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
def test_sglangs_flags_beside_it_are_refused(flag: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        parse_arguments(["--speculative-config", '{"num_speculative_tokens": 3}', *flag.split()])
    assert f"--speculative-config and {flag.split()[0]} say the same" in capsys.readouterr().err
