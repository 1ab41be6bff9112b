"""The command `jaxspec`: what it lists, which module it calls, and that help loads nothing."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
TRAIN = ("run", "data", "head")
ASK_EVERYTHING = """
import sys
from jaxspec.cli import COMMANDS, main

train = [["train", name, "--help"] for name in ("run", "data", "head")]
for arguments in [[], ["--help"], ["--version"], ["bench"], *train, *([name, "--help"] for name in COMMANDS)]:
    print("ASKED", *arguments)
    try:
        status = main(arguments)
    except SystemExit as exit:  # argparse ends the process after its help
        status = exit.code
    assert status == 0, arguments
heavy = [name for name in ("jax", "flax", "transformers", "fastapi") if name in sys.modules]
assert not heavy, heavy
"""
DROPPING = """
import gc, os, signal, time
from jaxspec.cli import exit_on_signals, interruptible

def drop(*_):
    gc.callbacks.remove(drop)
    os.kill(os.getpid(), {number})

def run():
    {handlers}
    gc.callbacks.append(drop)
    gc.collect()
    time.sleep(30)
    return 1

raise SystemExit(interruptible(run))
"""


def test_help_is_every_command_s_own_and_loads_nothing():
    asked = subprocess.run([sys.executable, "-c", ASK_EVERYTHING], cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    answers = {}
    for answer in asked.stdout.split("ASKED")[1:]:
        question, _, said = answer.partition("\n")
        answers[question.strip()] = said
    assert all(f"  {name} " in answers[""] and command.summary in answers[""] for name, command in COMMANDS.items())
    assert answers[""] == answers["--help"]
    assert all(answers[f"{name} --help"].startswith(f"usage: jaxspec {name} ") for name in COMMANDS)
    assert answers["serve --help"].split("examples:\n")[1].startswith("  jaxspec serve smollm2\n")
    has = {name: ("--shards" in answers[f"train {name} --help"], "--steps" in answers[f"train {name} --help"]) for name in TRAIN}
    assert has == {"run": (True, True), "data": (True, False), "head": (False, True)}
    assert "--model-path" in answers["serve --help"] and "--inspect" in answers["convert --help"]


def test_the_rest_of_the_line_is_the_command_s(monkeypatch):
    seen = []
    module = SimpleNamespace(main=lambda arguments: seen.append(arguments) or 7)
    monkeypatch.setattr("jaxspec.cli.import_module", lambda name: seen.append(name) or module)
    assert main(["serve", "--port", "1", "--help"]) == 7
    assert seen == ["jaxspec.serve", ["--port", "1", "--help"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "unknown command 'serv': did you mean serve?"),
        (["xyz"], "unknown command 'xyz': commands are serve, chat, generate"),
        (["--port", "1"], "expected a command before the option '--port'; commands: serve, chat, generate"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec: error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("handlers", "number", "status"),
    [("exit_on_signals()", 15, 0), ("exit_on_signals()", 2, 0), ("signal.signal(2, signal.default_int_handler)", 2, 130)],
)
def test_a_signal_counts_also_where_python_drops_what_its_handler_raises(handlers, number, status):
    program = DROPPING.format(handlers=handlers, number=number)
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == status


def test_ctrl_c_while_a_command_is_imported_is_one_line(monkeypatch, capsys):
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.cli.import_module", interrupt)
    assert main(["models"]) == 130 and capsys.readouterr().err == "jaxspec: interrupted\n"


def test_every_command_is_in_the_documentation():
    rows = (ROOT / "docs/command_line.md").read_text().splitlines()
    assert [name for name in COMMANDS if not any(row.startswith(f"| `{name}` |") for row in rows)] == []


def test_the_script_and_the_module_are_this_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxspec": "jaxspec.cli:main"}
    asked = subprocess.run([sys.executable, "-m", "jaxspec", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout == f"jaxspec {version(project['name'])}\n"
