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
        counts.extend([{"ready": 5, "total": 33}, {"ready": 20, "total": 33}, {"ready": 33, "total": 33}])
        yield "http://127.0.0.1:1", os.getpid()

    counts: list[dict[str, int]] = []
    pauses = iter(range(100))
    monkeypatch.setattr(start, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(start, "serving", launch)
    monkeypatch.setattr(start, "complete", lambda *asking: asked.append(asking))
    monkeypatch.setattr(start, "programs_of", lambda _: counts.pop(0))
    monkeypatch.setattr(start, "longest_pause", lambda *_: float(next(pauses)))
    out = tmp_path / "out.jsonl"
    assert start.main(["--rounds", "2", "--cold", "--out", str(out), "--", "--page-size", "8"]) == 0
    record = json.loads(out.read_text())
    assert {kind: len(times) for kind, times in record["results"].items()} == {"everything cached": 2, "nothing cached": 2}
    assert asked == [("http://127.0.0.1:1", "jaxspec-demo")] * 5
    measured = record["results"]["everything cached"]
    assert [each["pause"] for each in measured] == [3, 5], "the longer of two streams, as the first ends before all is compiled"
    for each in measured:
        assert each["programs"] == 5 and 0 < each["ready"] <= each["completion"] <= each["compiled"]
        assert each["cpu"] > 0 and each["megabytes"] > 10
    assert [flags for flags, _ in launched] == [["--page-size", "8"]] * 5  # the first fills the cache
    assert [environment is None for _, environment in launched] == [True, True, True, False, False]
    assert launched[3][1] != launched[4][1]  # every cold start has an empty directory of its own
    assert record["command"] == "python -m benchmarks.start --rounds 2 --cold -- --page-size 8"
    assert "| everything cached |" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error():
    with pytest.raises(BenchmarkError, match=r"was not ready:[^$]*--page-size"), start.serving(["--page-size", "-3"]):
        pass


def test_the_longest_pause_is_between_two_events(monkeypatch):
    now = iter([0.0, 0.1, 0.9, 1.0])
    monkeypatch.setattr(start.time, "perf_counter", lambda: next(now))
    stream = io.BytesIO(b"data: 1\n\ndata: 2\n\n: nothing\n\ndata: 3\n\ndata: [DONE]\n\n")
    monkeypatch.setattr(start, "post", lambda url, body: stream)
    assert start.longest_pause("http://127.0.0.1:1", "model") == pytest.approx(0.8)


def test_a_server_that_does_not_answer_is_an_error():
    with pytest.raises(BenchmarkError, match="the server gave no answer"):
        start.complete("http://127.0.0.1:9", "model")
    with pytest.raises(BenchmarkError, match="does not say how many programs"):
        start.programs_of("http://127.0.0.1:9")
