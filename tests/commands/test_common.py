"""Prompts from files and built-in ones; errors, warnings and Ctrl-C in one line."""

import warnings
from collections import Counter
from pathlib import Path

import pytest

from jaxspec.commands.common import BUILT_IN, Chat, Turns, load_prompts, run_guarded


def test_prompts_come_from_lines_or_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text('one\n\n"two"\n')
    assert load_prompts(tmp_path / "a.txt", 2).prompts == ["one", '"two"']
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n"four\\n"\n[5, 6]\n{"token_ids": [7]}\n')
    assert load_prompts(tmp_path / "a.jsonl", None).prompts == ["one", Turns(["two", "three"]), "four\n", [5, 6], [7]]
    assert load_prompts(tmp_path / "a.jsonl", 1).prompts == ["one"]
    (tmp_path / "b.jsonl").write_bytes('"a\u2028b\u0085c"\r\n\r\n{"prompt": "two"}\r\n'.encode())
    assert load_prompts(tmp_path / "b.jsonl", None).prompts == ["a\u2028b\u0085c", "two"]
    (tmp_path / "b.txt").write_bytes(b"a\x0cb\r\ntwo\r\n")
    assert load_prompts(tmp_path / "b.txt", None).prompts == ["a\x0cb", "two"]


def test_conversations_have_kinds():
    chat = load_prompts(Path("chat"), None)
    assert chat.kinds is not None and set(Counter(chat.kinds).values()) == {8} and len(set(chat.kinds)) == 6
    assert all(isinstance(prompt, Chat) for prompt in chat.prompts) and chat.describe()["count"] == 48
    assert len(set(load_prompts(Path("chat"), 6).kinds or ())) == 6, "they take turns"


def test_mt_bench_comes_with_the_package():
    """Its 80 questions in two turns, ten of each kind."""
    found = load_prompts(Path("mt-bench"), None)
    assert len(found.prompts) == 80 and set(Counter(found.kinds).values()) == {10}
    assert all(isinstance(each, Turns) and len(each.questions) == 2 and all(each.questions) for each in found.prompts)


@pytest.mark.parametrize("line", ['{"turns": ["a", 1]}', '{"wrong": 1}', "3", "[]", "[true]", '{"token_ids": ["a"]}', "{", "null"])
def test_a_line_without_a_prompt_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'"one"\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, prompt 2: "):
        load_prompts(tmp_path / "a.jsonl", None)


def test_too_few_prompts_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "empty.txt").write_text("\n")
    for name, count, message in (
        ("a.txt", 3, "has 2 prompts, 3 were asked for"),
        ("b.txt", 1, "can't read"),
        ("empty.txt", None, "has 0"),
    ):
        with pytest.raises(ValueError, match=message):
            load_prompts(tmp_path / name, count)


def test_without_a_file_there_are_built_in_ones():
    few = load_prompts(None, 3)
    assert few.source == BUILT_IN and len(few.prompts) == 3
    assert load_prompts(None, None, default_count=4).prompts[:3] == few.prompts
    assert few.sha256 != load_prompts(None, 2).sha256


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("this is wrong"), 2, "jaxspec x: error: this is wrong\n"),
        (FileNotFoundError("no file"), 2, "jaxspec x: error: no file\n"),
        (KeyboardInterrupt(), 130, "jaxspec x: interrupted\n"),
    ],
)
def test_what_the_user_can_mend_is_one_line(error, status, said, capsys):
    def run() -> int:
        raise error

    assert run_guarded("jaxspec x", run) == status
    assert capsys.readouterr().err == said


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_guarded("jaxspec x", lambda: 1 // 0)


def test_warnings_are_lines_and_nothing_stays_changed(capsys):
    def run() -> int:
        warnings.warn("take care", UserWarning, stacklevel=1)
        return 3

    before = warnings.showwarning
    assert run_guarded("jaxspec x", run) == 3
    assert capsys.readouterr().err == "warning: take care\n"
    assert warnings.showwarning is before
