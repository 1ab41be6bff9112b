"""The start of a server, with one that is not there."""

import io
import json
import os
from contextlib import contextmanager

import pytest

from benchmarks import start
from benchmarks.options import BenchmarkError


def test_cached_and_cold_starts_are_told_apart(tmp_path, monkeypatch, capsys):
    launched, asked = [], []

    @contextmanager
    def launch(flags, environment):
        launched.append((list(flags), environment))
        missing.extend([28, 13, 0])
        yield "http://127.0.0.1:1", os.getpid()

    def events(url: str, model: str, tokens: int) -> list[float]:
        asked.append((url, model, tokens))
        return [0.0, 0.5, 0.5 + len(asked)]

    missing: list[int] = []
    monkeypatch.setattr(start, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(start, "serving", launch)
    monkeypatch.setattr(start, "events", events)
    monkeypatch.setattr(start, "missing_programs", lambda _: missing.pop(0))
    out = tmp_path / "out.jsonl"
    assert start.main(["--rounds", "2", "--cold", "--out", str(out), "--", "--page-size", "8"]) == 0
    record = json.loads(out.read_text())
    assert {kind: len(times) for kind, times in record["results"].items()} == {"everything cached": 2, "nothing cached": 2}
    assert asked == [("http://127.0.0.1:1", "jaxspec-demo", tokens) for tokens in (1, start.TOKENS, start.TOKENS)] * 5
    measured = record["results"]["everything cached"]
    assert [each["pause"] for each in measured] == [6, 9], "the longer of two streams, as the first ends before all is compiled"
    for each in measured:
        assert 0 < each["ready"] <= each["completion"] <= each["compiled"]
        assert each["cpu"] > 0 and each["megabytes"] > 10
    assert [flags for flags, _ in launched] == [["--page-size", "8"]] * 5  # the first fills the cache
    assert [environment is None for _, environment in launched] == [True, True, True, False, False]
    assert launched[3][1] != launched[4][1]  # every cold start has an empty directory of its own
    assert record["command"] == "python -m benchmarks.start --rounds 2 --cold -- --page-size 8"
    assert "| everything cached |" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error():
    with pytest.raises(BenchmarkError, match=r"was not ready:[^$]*--page-size"), start.serving(["--page-size", "-3"]):
        pass


def test_events_are_those_of_the_stream(monkeypatch):
    now = iter([0.1, 0.9, 1.0, 1.5])
    monkeypatch.setattr(start.time, "perf_counter", lambda: next(now))
    stream = io.BytesIO(b"data: 1\n\ndata: 2\n\n: nothing\n\ndata: 3\n\ndata: [DONE]\n\n")
    monkeypatch.setattr(start.urllib.request, "urlopen", lambda request, timeout: stream)
    assert start.events("http://127.0.0.1:1", "model", 9) == [0.1, 0.9, 1.0, 1.5]


def test_a_server_that_does_not_answer_is_an_error():
    with pytest.raises(BenchmarkError, match="the server gave no answer"):
        start.events("http://127.0.0.1:9", "model", 1)
    with pytest.raises(BenchmarkError, match="does not say how many programs"):
        start.missing_programs("http://127.0.0.1:9")
