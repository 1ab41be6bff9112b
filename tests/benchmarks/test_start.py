"""The start of a server, with one that is not there."""

import json
from contextlib import contextmanager

import pytest

from benchmarks import start
from benchmarks.options import BenchmarkError


def test_cached_and_cold_starts_are_told_apart(tmp_path, monkeypatch, capsys):
    launched = []

    @contextmanager
    def serving(flags, environment):
        launched.append((list(flags), environment))
        yield "http://127.0.0.1:1"

    def one_token(url, model):
        assert (url, model) == ("http://127.0.0.1:1", "jaxspec-demo")

    monkeypatch.setattr(start, "serving", serving)
    monkeypatch.setattr(start, "one_token", one_token)
    out = tmp_path / "out.jsonl"
    assert start.main(["--rounds", "2", "--cold", "--out", str(out), "--", "--page-size", "8"]) == 0
    record = json.loads(out.read_text())
    assert {kind: len(times) for kind, times in record["results"].items()} == {"everything cached": 2, "nothing cached": 2}
    assert [flags for flags, _ in launched] == [["--page-size", "8"]] * 5  # the first fills the cache
    assert [environment is None for _, environment in launched] == [True, True, True, False, False]
    assert launched[3][1] != launched[4][1]  # every cold start has an empty directory of its own
    assert record["command"] == "python -m benchmarks.start --rounds 2 --cold -- --page-size 8"
    assert "| everything cached |" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error():
    with pytest.raises(BenchmarkError, match=r"was not ready:[^$]*--page-size"), start.serving(["--page-size", "-3"]):
        pass
