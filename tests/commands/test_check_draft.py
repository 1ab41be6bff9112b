"""jaxspec check-draft: a trained head passes, a random one fails, and the figures are counted right."""

import json
from dataclasses import replace

import pytest

from jaxspec.commands.check_draft import Report, judge, main, show
from jaxspec.commands.workbench import Workbench
from jaxspec.defaults import BUILT_IN_HEAD, UNASKED
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.reference import FIXTURES, HEAD, TARGET, trace

GOOD = Report(
    model="m", head="EAGLE3", tree="3/1/4", temperature=0.0, prompts={"source": "file"}, tokens=30, verifications=10,
    accept_length=3.0, accepted_at_depth=[0.9, 0.7, 0.4], accepted_given_parent=[0.9, 0.778, 0.571],
    histogram={1: 1, 2: 2, 3: 3, 4: 4}, accept_length_of_prompts=[2.5, 3.5], worst_prompt="'x'",
    sharpness=None, tokens_per_second=300.0,
    plain_tokens_per_second=100.0, prompts_equal_to_plain=2,
)  # fmt: skip


@pytest.mark.variants
def test_a_trained_head_passes_and_its_report_adds_up(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(run["prompt"]) + "\n" for run in trace()["runs"][:2]))
    flags = ["--model-path", str(TARGET), "--draft", str(HEAD), "--tree", "2/1/3", "--prompts", str(prompts), "--max-tokens", "20"]
    assert main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["passed"] and report["prompts_equal_to_plain"] == 2
    histogram = {int(length): count for length, count in report["histogram"].items()}
    assert sum(histogram.values()) == report["verifications"] > 0
    emitted = sum(length * count for length, count in histogram.items())
    assert emitted == report["tokens"] - 2 == 38  # the prefills emit the first token of each
    assert report["accept_length"] == pytest.approx(emitted / report["verifications"]) and report["accept_length"] > 1.1
    assert report["accepted_at_depth"][1] == pytest.approx(histogram[3] / report["verifications"], abs=1e-4)
    assert report["tokens_per_second"] > 0 and report["head"] == "EAGLE3"


@pytest.mark.exhaustive
def test_a_block_head_is_checked_as_others_are(tmp_path, capsys):
    """With a tree that is as deep as a block. Its drafts are accepted, though random: target and head have the same noise."""
    (tmp_path / "prompts.jsonl").write_text("[1, 5, 2, 8]\n[9, 9, 3]\n")
    flags = ["--model-path", str(FIXTURES / "targets/qwen3"), "--draft", str(FIXTURES / "block_heads/dflash"), "--max-tokens", "12"]
    assert main([*flags, "--prompts", str(tmp_path / "prompts.jsonl"), "--temperature", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["head"] == "DFLASH" and report["tree"] == "5/4/16" and len(report["accepted_at_depth"]) == 5
    assert report["prompts_equal_to_plain"] == 2 and report["sharpness"] > 0
    assert report["verdict"]["passed"] and sum(report["histogram"].values()) == report["verifications"]


def test_drafts_are_checked_where_a_cpu_would_choose_plain_decoding(monkeypatch, tmp_path):
    monkeypatch.setitem(UNASKED, BUILT_IN_HEAD, UNASKED[None])
    monkeypatch.setattr("jaxspec.commands.workbench.run", lambda *_: None)
    asked = []

    def engine(_bench: Workbench, tree: TreeShape, *_: object, **_more: object) -> None:
        asked.append(tree)
        if len(asked) == 2:
            raise ValueError("that was all")

    monkeypatch.setattr(Workbench, "engine", engine)
    (tmp_path / "prompts.txt").write_text("one\n")
    assert main(["--prompts", str(tmp_path / "prompts.txt")]) == 2 and asked == [PLAIN, TreeShape()]


def test_the_exit_status_is_the_verdict(monkeypatch, capsys):
    report = replace(GOOD, accept_length=1.02)
    monkeypatch.setattr("jaxspec.commands.check_draft.check", lambda options: report)
    assert main([]) == 1
    assert "FAILED: accept length 1.02: the head is useless" in capsys.readouterr().out
    assert main(["--min-accept-length", "1.0"]) == 0
    assert "passed: accept length 1.02" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--min-accept-length", "nan"])
    assert "--min-accept-length must be a number, got nan" in capsys.readouterr().err


def test_the_least_accept_length_decides():
    assert judge(GOOD, 1.1).passed and judge(GOOD, 3.0).passed
    verdict = judge(GOOD, 3.1)
    assert not verdict.passed and verdict.reason == "accept length 3.00 is below 3.1"
    assert judge(GOOD, 1.1).reason == "accept length 3.00, 3.00 times the speed of plain decoding"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accept_length": 1.02}, "the head is useless"),
        ({"prompts_equal_to_plain": 1}, "1 texts differ from plain decoding"),
        ({"tokens_per_second": 50.0}, "slower than plain decoding here, 0.50 times"),
        ({"accepted_at_depth": [0.9, 0.5, 0.02]}, "below depth 2, less than 5%"),
    ],
)
def test_what_is_amiss_is_said(changes, said):
    changed = replace(GOOD, **changes)
    assert said in show(changed, judge(changed, 1.0))
    assert said not in show(GOOD, judge(GOOD, 1.0)) and judge(GOOD, 1.0).notes == []


def test_the_report_is_readable():
    said = show(GOOD, judge(GOOD, 1.1))
    assert "| 2     |      70% |          78% |" in said
    assert f"4   40% {'#' * 16}\n" in said and "2.50 to 3.50, median 3.00" in said
    assert said.endswith("passed: accept length 3.00, 3.00 times the speed of plain decoding")


@pytest.mark.parametrize(("flags", "said"), [([], "comes without a draft head"), (["--tree", "plain"], "drafts nothing")])
def test_without_a_head_or_a_tree_there_is_nothing_to_check(model, flags, said, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\n")
    assert main(["--model-path", str(model.target), "--prompts", str(tmp_path / "prompts.txt"), *flags]) == 2
    assert said in capsys.readouterr().err
