"""--help: instant, in groups, and searchable."""

import subprocess
import sys

import pytest

from jaxspec.server.argument_groups import help_text, make_parser
from jaxspec.server.ignored_flags import IGNORED


def test_help_is_instant_and_loads_no_jax():
    """Also with a config file and a search: nothing on the way to the model needs JAX."""
    code = (
        "import sys; import jaxspec.serve; from jaxspec.server.arguments import parse_arguments\n"
        "try: parse_arguments(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print({'jax', 'transformers', 'fastapi', 'flax'} & set(sys.modules))"
    )
    for argv in (["--help"], ["--help=cache"], ["--port", "1"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "set()"


def test_help_is_in_groups():
    shown = help_text("")
    places = [shown.index(f"\n{title}:\n") for title in ("model", "speculative decoding", "engine", "server")]
    assert places == sorted(places)
    assert shown.count("LOSSY") == 2  # no one shall set a threshold and not know
    assert "--cuda-graph-max-bs" not in shown and "--help=ignored" in shown


def test_every_option_is_explained():
    parser = make_parser()
    for action in {id(action): action for action in parser.by_name.values()}.values():
        assert action.help and all(name.startswith("-") for name in action.option_strings)


def test_a_search_shows_what_contains_the_word_and_nothing_else():
    shown = help_text("PAGE")
    assert "--page-size" in shown and "engine:" in shown and "--speculative-draft-sink-size" in shown
    assert "--port" not in shown and "server:" not in shown and "usage" not in shown
    assert "--tokenizer-path" in help_text("tokenizer-path") and "--tokenizer-mode" in help_text("tokenizer")
    assert help_text("max-model-len").count("--") == 2  # an option and its other spelling
    assert help_text("zebra") == "no option contains 'zebra'"


def test_ignored_options_are_listed_when_asked_for():
    shown = help_text("ignored")
    names = [name.partition("=")[0] for group in IGNORED for name in group.names.split()]
    assert all(name in shown for name in names) and all(group.instead in shown for group in IGNORED)
    assert "--cuda-graph-max-bs" in help_text("cuda-graph") and "engine:" not in help_text("cuda-graph")


def test_the_command_prints_it():
    done = subprocess.run([sys.executable, "-m", "jaxspec.serve", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--speculative-num-draft-tokens" in done.stdout and not done.stderr


def test_one_spelling_has_one_meaning():
    parser = make_parser()
    with pytest.raises(Exception, match="conflicting option"):
        parser.add_argument("--model-path")
