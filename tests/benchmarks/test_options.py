"""What a record keeps of a command line: everything but places of this machine, and keys."""

import pytest

from benchmarks.options import shortened, without_out


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/home/me/model", "model"),
        ("--model-path=/home/me/model", "--model-path=model"),
        ("vllm=~/venv/bin/python", "vllm=python"),
        ("../alice/prompts.jsonl", "prompts.jsonl"),
        ("--xla_dump_to=/home/me/dump", "--xla_dump_to=dump"),
        ("--api-key=secret", "--api-key=***"),
        ("3/1/4", "3/1/4"),
        ("--tree=5/4/8", "--tree=5/4/8"),
    ],
)
def test_arguments_are_kept_without_places_and_keys(given, kept):
    assert shortened(given) == kept


def test_the_file_of_results_is_no_part_of_the_command():
    assert without_out(["--a", "--out", "x", "b", "--out=y"]) == ["--a", "b"]
