"""vLLM's --speculative-config."""

import json

import pytest

from jaxspec.config import SpecConfig
from jaxspec.server.arguments import parse_arguments


@pytest.mark.parametrize(
    ("config", "algorithm", "draft", "steps"),
    [
        ({"method": "eagle3", "model": "head", "num_speculative_tokens": 3}, "EAGLE3", "head", 3),
        ({"method": "eagle", "model": "head", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, "EAGLE", "head", 5),
        ({"method": "mtp", "num_speculative_tokens": 1}, "NEXTN", None, 1),
        ({"num_speculative_tokens": 2}, None, None, 2),
    ],
)
def test_it_is_a_chain(config: dict, algorithm: str | None, draft: str | None, steps: int):
    arguments = parse_arguments(["--speculative-config", json.dumps(config), "--speculative-adaptive"])
    assert (arguments.algorithm, arguments.draft) == (algorithm, draft)
    assert arguments.spec == SpecConfig(steps, 1, steps + 1)


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
        ('{"method": "ngram", "num_speculative_tokens": 3}', "method must be one of eagle, eagle3, mtp, got 'ngram'"),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 3}', "got 'deepseek_mtp'"),
        ('{"method": 3, "num_speculative_tokens": 3}', "method must be a string, got 3"),
        ('{"model": ["a"], "num_speculative_tokens": 3}', "model must be a string"),
        ('{"num_speculative_tokens": 3, "prompt_lookup_max": 4}', "has 'prompt_lookup_max', which is not supported"),
        ('{"num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size must be 1, got 2"),
    ],
)
def test_what_is_refused(text: str, said: str, capsys: pytest.CaptureFixture):
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
    ],
)
def test_sglangs_flags_beside_it_are_refused(flag: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        parse_arguments(["--speculative-config", '{"num_speculative_tokens": 3}', *flag.split()])
    assert f"--speculative-config and {flag.split()[0]} say the same" in capsys.readouterr().err
