"""What the command lines share: trees by name, and errors, warnings and Ctrl-C in one line."""

import argparse
import warnings

import pytest

from jaxspec import SpecConfig
from jaxspec.commands.arguments import Parser, add_tree_options, chosen_tree, run_guarded, tree, tree_name, whole


def test_trees_are_named_as_in_sglang():
    assert tree("5/4/16") == SpecConfig(5, 4, 16)
    assert tree("plain") == tree("0/1/1") == SpecConfig(num_steps=0)
    assert [tree_name(tree(name)) for name in ("3/1/4", "plain")] == ["3/1/4", "plain"]
    for wrong in ("5/4", "a/b/c", "1/2/9", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            tree(wrong)


def test_a_tree_is_given_in_one_word_or_in_three_numbers():
    parser = Parser("test", "")
    add_tree_options(parser)
    numbers = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "5"]
    assert chosen_tree(parser.parse_args([])) is None
    assert chosen_tree(parser.parse_args(numbers)) == chosen_tree(parser.parse_args(["--tree", "3/2/5"])) == SpecConfig(3, 2, 5)
    assert chosen_tree(parser.parse_args([numbers[0], "0"])) == SpecConfig(num_steps=0)
    with pytest.raises(ValueError, match="not both"):
        chosen_tree(parser.parse_args([*numbers, "--tree", "3/2/5"]))
    with pytest.raises(ValueError, match="missing"):
        chosen_tree(parser.parse_args(numbers[:2]))


def test_whole_numbers_have_a_least():
    assert whole(1)("3") == 3
    for wrong in ("0", "-1", "1.5", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number >= 1"):
            whole(1)(wrong)


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


def test_a_wrong_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        Parser("jaxspec x", "").parse_args(["--wrong"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == "jaxspec x: error: unrecognized arguments: --wrong (see --help)\n"
