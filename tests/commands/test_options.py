"""What the command lines share: trees, numbers, and wrong options in one line."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec import TreeShape
from jaxspec.commands import options
from jaxspec.commands.options import TABLE, Option, Parser, add_tree_options, chosen_tree, tree, whole


def test_trees_are_named_as_in_sglang():
    assert tree("5/4/16") == TreeShape(5, 4, 16)
    assert tree("plain") == tree("0/1/1") == TreeShape(num_steps=0)
    assert [tree(name).name for name in ("3/1/4", "plain")] == ["3/1/4", "plain"]
    for wrong in ("5/4", "a/b/c", "1/2/9", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            tree(wrong)


def test_help_may_have_a_per_cent_sign(monkeypatch):
    monkeypatch.setattr(options, "docstrings", lambda _: {"num_pages": "At 50% of the memory."})
    parser = Parser("test", "")
    for option in (Option("--one", sets="engine.num_pages"), Option("--two", "Of 100%.")):
        option.add_to(parser)
    shown = parser.format_help()
    assert "at 50% of the memory" in shown and "Of 100%." in shown


def test_a_tree_is_given_in_one_word_or_in_three_numbers():
    parser = Parser("test", "")
    add_tree_options(parser)
    numbers = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "5"]
    assert chosen_tree(parser.parse_args([])) is None
    assert chosen_tree(parser.parse_args(numbers)) == chosen_tree(parser.parse_args(["--tree", "3/2/5"])) == TreeShape(3, 2, 5)
    assert chosen_tree(parser.parse_args([numbers[0], "0"])) == TreeShape(num_steps=0)
    with pytest.raises(ValueError, match="not both"):
        chosen_tree(parser.parse_args([*numbers, "--tree", "3/2/5"]))
    with pytest.raises(ValueError, match="missing"):
        chosen_tree(parser.parse_args(numbers[:2]))


@pytest.mark.parametrize(
    ("number", "fine", "wrong", "expected"),
    [(whole(1), "3", ("0", "-1", "1.5", "x"), ">= 1"), (whole(0, 5), "5", ("6", "-1", "1e0", "9" * 5000), "from 0 to 5")],
)
def test_whole_numbers_have_a_least_and_may_have_a_most(number, fine, wrong, expected):
    assert number(fine) == int(fine)
    for each in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=f"whole number {expected}"):
            number(each)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--wrong", "there is no option --wrong"),
        ("--tre=secret", "there is no option --tre: did you mean --tree?"),
        ("--wrong -- --a_b", "there is no option --wrong"),
        ("-- --a_b --tree plain", "unexpected argument behind --: '--tree'"),
        ("a b", "unexpected argument: 'b'"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_one_that_was_perhaps_meant(capsys, given, said):
    parser = Parser("jaxspec x")
    parser.add_argument("prompt", nargs="?")
    add_tree_options(parser)
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(given.split())
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"jaxspec x: error: {said} (see --help)\n"
    assert parser.parse_args(["--speculative_num_steps", "3", "--", "--a_b"]).prompt == "--a_b"
    assert parser.parse_args(["--speculative_num_steps=3", "--a_b is a flag"]).prompt == "--a_b is a flag"


def as_markdown() -> Iterator[str]:
    """The table of docs/command_line.md; `python -m tests.commands.test_options` prints it."""
    yield "| option | also | meaning |"
    yield "|---|---|---|"
    for section, listed in TABLE.items():
        yield f"| **{section}** | | |"
        for option in listed:
            flag, *others = option.spellings if option.flag.startswith("-") else [option.metavar]
            yield f"| `{flag}` | {', '.join(f'`{other}`' for other in others)} | {option.text} |".replace("|  |", "| |")


def test_the_table_of_the_documentation_is_this_one():
    assert "\n".join(as_markdown()) in (Path(__file__).parents[2] / "docs/command_line.md").read_text()


if __name__ == "__main__":
    print("\n".join(as_markdown()))
