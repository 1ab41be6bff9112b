"""What a record keeps of a command line: everything but places of this machine, and keys."""

import pytest

from benchmarks import peers, speculative
from benchmarks.options import BenchmarkParser, all_shortened, exit_on_error, is_busy, shortened, without_out


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


def test_a_key_is_left_out_where_it_follows_its_option():
    given = ["--", "--admin-api-key", "secret", "--page-size", "8", "/home/me/model"]
    assert all_shortened(given) == ["--", "--admin-api-key", "***", "--page-size", "8", "model"]


def test_options_are_refused_before_anything_is_measured(capsys, tmp_path):
    for given, said in (
        (["--trees", "3/1/4", "--steps", "5", "--topk", "2"], "--trees names the trees: leave out --steps, --topk"),
        (["--out", str(tmp_path)], "--out must be a file, and "),
        (["--out", "a.yaml"], "--out and --config-out are both a.yaml: give two files"),
    ):
        with pytest.raises(SystemExit, match="2"):
            speculative.parse(given)
        assert said in capsys.readouterr().err
    assert speculative.parse(["--steps", "5"]).steps == [5]


@pytest.mark.parametrize("option", ["--dtype bfloat16", "--quantization int8", "--speculative-draft-model-quantization int8"])
def test_precisions_of_peers_are_named_once(option, capsys):
    with pytest.raises(SystemExit):
        peers.main(option.split())
    assert f"{option.split()[0]}: leave it out, --precision names" in capsys.readouterr().err


def test_a_busy_machine_is_told(monkeypatch, capsys):
    assert is_busy(0.7, 2) and not is_busy(0.6, 2)
    for load, told in ((0.1, ""), (99.0, "warning: the load average is 99.0 on")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert BenchmarkParser("start", "").parse([]).load_average == load
        assert capsys.readouterr().err.startswith(told) and (told or not capsys.readouterr().err)


def test_a_refusal_names_options_and_not_arguments_of_python(capsys):
    def refused() -> int:
        raise ValueError("it needs a head: give draft, or ngram=True")

    with pytest.raises(SystemExit):
        exit_on_error("speculative", refused)
    assert capsys.readouterr().err.endswith("it needs a head: give --speculative-draft-model-path, or --speculative-ngram\n")
