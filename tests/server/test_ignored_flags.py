"""Options without effect: accepted, told in one line each, and refused where ignoring would be a lie."""

import pytest

from jaxspec.server.arguments import parse_arguments
from jaxspec.server.ignored_flags import IGNORED, Ignored

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
    command = "--enable-metrics --cuda-graph-bs 1 2 4 --tp 1 --enable-metrics --tp-size 1"
    arguments = parse_arguments(command.split())
    assert [note.partition(" ")[0] for note in arguments.notes] == ["--enable-metrics", "--cuda-graph-bs", "--tp", "--tp-size"]


@pytest.mark.parametrize(
    "flag", ["--lora-paths x", "--enable-lora", "--is-embedding", "--tool-call-parser x", "--reasoning-parser x"]
)
def test_what_is_missed_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture):
    """Whoever asks for these would not get what they think."""
    with pytest.raises(SystemExit):
        parse_arguments(flag.split())
    assert f"there is no option {flag.split()[0]}" in capsys.readouterr().err
