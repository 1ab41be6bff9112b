"""The tables that are printed, and those of the README and docs/."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.gpu.parts import RECORD as GPU_RECORD
from benchmarks.options import RESULTS
from benchmarks.record import measured_on, read
from benchmarks.report import MARKDOWN, Results, brief, printed, replaced, tables_of

WHERE = {"date": "2026-11-22T10:00:00+00:00", "jax": "0.12", "cpu": "<AMD> & co", "cores": 2, "devices": ["cpu"]}


def tree(name: str, length: float) -> dict:
    return {
        "tree": name, "nodes": int(name.split("/")[2]), "accept_length": length, "accepted_at_depth": [0.5, 0.25],
        "accept_rate": 0.3, "accept_length_of_prompts": [length],
    }  # fmt: skip


def record(command: str = "python -m benchmarks.acceptance", length: float = 2.0) -> dict:
    results = {"temperatures": {"0": [tree("3/1/4", length), tree("2/2/4", 2.5)]}, "distributions": {}}
    return {"benchmark": "acceptance", "command": command, "environment": WHERE, "results": results}


@pytest.fixture
def directory(tmp_path) -> Path:
    """Results of one benchmark, run twice."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "acceptance.jsonl").write_text(json.dumps(record(length=1.5)) + "\n" + json.dumps(record()) + "\n")
    return folder


def test_marked_tables_are_replaced_and_nothing_else(directory):
    text = "before\n<!-- results: acceptance nodes -->\nold\n<!-- end of results -->\nafter\n"
    new = replaced(text, Results(directory).block)
    table = tables_of(record())["nodes"]
    head = "`python -m benchmarks.acceptance` (22 November 2026, jax 0.12, <AMD> & co, 2 cores)"
    filled = f"<!-- results: acceptance nodes -->\n{head}\n\n{table}\n<!-- end of results -->"
    assert new == f"before\n{filled}\nafter\n"
    assert replaced(new, Results(directory).block) == new


@pytest.mark.parametrize(
    "text", ["<!-- results: a b -->\n", "<!-- results: a b -->\n<!-- results: a b -->\n<!-- end of results -->"]
)
def test_a_marker_without_an_end_is_an_error(text):
    with pytest.raises(ValueError, match="has no `<!-- end of results -->`"):
        replaced(text, " ".join)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("acceptance", "a marker names"), ("peers contenders", "no record of peers"), ("acceptance cost", "no table 'cost'"),
        ("acceptance nodes after", "a marker names"),
    ],
)  # fmt: skip
def test_a_marker_that_means_nothing_is_an_error(directory, words, message):
    with pytest.raises(ValueError, match=message):
        Results(directory).block(words.split())


def test_the_command_writes_and_checks(directory, tmp_path, capsys):
    markdown = tmp_path / "page.md"
    markdown.write_text("<!-- results: acceptance depth -->\n<!-- end of results -->")
    flags = ["--results", str(directory), "--markdown", str(markdown)]
    assert report.main([*flags, "--check"]) == 1 and "accepted at depth" not in markdown.read_text()
    assert "out of date" in capsys.readouterr().err
    assert report.main(flags) == 0
    assert "accepted at depth" in markdown.read_text() and "**2.50**" in capsys.readouterr().out
    assert report.main([*flags, "--check"]) == 0


def test_files_of_others_are_left_out_with_a_note(directory, capsys):
    (directory / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    (directory / "broken.jsonl").write_text("{")
    (directory / "empty.jsonl").write_text("")
    assert report.main(["--results", str(directory), "--markdown"]) == 0
    out, notes = capsys.readouterr()
    assert "accepted at depth" in out and notes.count("left out: ") == 2 and "prompts.jsonl holds no results" in notes
    (directory / "acceptance.jsonl").unlink()
    with pytest.raises(ValueError, match="no results in results/: run a benchmark first"):
        report.main(["--results", str(directory), "--markdown"])


def test_commands_are_shown_without_the_pythons_of_peers():
    assert brief("python -m benchmarks.peers --torch-python python --tree 3/1/4 --peer-python vllm=python") == (
        "python -m benchmarks.peers --tree 3/1/4"
    )


def test_every_file_and_part_of_the_committed_results_is_printed():
    told = list(printed(Results(RESULTS)))
    files = [f"{path.stem}: " for path in sorted(RESULTS.glob("*.jsonl")) if path.name != GPU_RECORD]
    assert all(text.startswith(name) for text, name in zip(told, files, strict=False))
    assert any(text.startswith("gpu, cycle (") for text in told[len(files) :])


def test_the_load_of_a_busy_machine_stands_beside_its_figures():
    quiet, busy = ({**record(), "environment": {**WHERE, "load_average": load}} for load in (0.5, 1.4))
    assert measured_on(quiet) == measured_on(record()) == "22 November 2026, jax 0.12, <AMD> & co, 2 cores"
    assert measured_on(busy) == measured_on(quiet) + ", busy machine: load average 1.4"


def test_what_is_no_result_is_an_error(tmp_path):
    file = tmp_path / "x.jsonl"
    for content, message in (
        ("{", "holds no results: expected one JSON object per line"),
        ('{"a": 1}', "no results of these benchmarks"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            read(file)
    with pytest.raises(ValueError, match="can't read results"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="no results in empty"):
        report.main(["--results", str(tmp_path / "empty")])


def test_committed_tables_are_what_the_committed_results_say():
    results = Results(RESULTS)
    for path in MARKDOWN:
        text = path.read_text()
        assert "<!-- results: " in text and replaced(text, results.block) == text, f"{path.name}: run python -m benchmarks.report"


def test_every_committed_record_can_be_shown_and_tells_no_place_of_a_machine():
    places = re.compile(r"""["'= ](/(home|root|work|tmp|usr|opt|mnt|data)/|~/|\.\./)""")
    for each in (each for path in RESULTS.glob("*.jsonl") if path.name != GPU_RECORD for each in read(path)):
        assert tables_of(each) and each["command"].startswith("python -m benchmarks."), each["command"]
        text = json.dumps({key: each[key] for key in each if key != "command"}) + each["command"].replace("/big/disk", "")
        assert not places.search(text), each["command"]
    of_gpus, found = (RESULTS / GPU_RECORD).read_text(), Results(RESULTS).gpu
    assert not places.search(of_gpus) and {str(part["environment"]["devices"]) for part in found.values()} == {"['NVIDIA H200']"}
