"""The benchmarks run on a tiny model, find differences, and refuse what can't give honest figures."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import conversion, lossless, under_load
from benchmarks.engines import BenchmarkError, alternate, check_nothing_compiled
from benchmarks.record import table
from jaxspec.commands.workbench import CompilationCounter
from jaxspec.testing import tiny_target


@pytest.fixture(scope="module")
def flags(tiny, tmp_path_factory) -> list[str]:
    """Options for the tiny model."""
    return [*tiny, "--max-tokens", "6", "--out", str(tmp_path_factory.mktemp("benchmarks") / "out.jsonl")]


def result(flags: list[str]) -> dict:
    with open(flags[-1]) as file:
        return json.loads(file.read().splitlines()[-1])


def test_lossless_compares_token_for_token(flags, capsys):
    assert lossless.main([*flags, "--trees", "2/2/4", "--batch", "2"]) == 0
    assert len(result(flags)["results"]) == 4  # plain decoding and the tree, greedy and sampled
    assert "2/2" in capsys.readouterr().out


def test_under_load_compares_off_on_and_adaptive(flags, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": [5, 9, number]}) + "\n" for number in range(17)))
    few = ["--prompts", str(prompts), "--num-prompts", "17", "--out", str(tmp_path / "out.jsonl")]
    options = ["--tree", "2/1/3", "--batch", "1", "2", "--rounds", "2", "--requests-per-row", "2", "--only", "batches", "long"]
    assert under_load.main([*flags, *options, *few]) == 0
    written = result(few)["results"]
    assert [row["batch"] for row in written["batches"]] == [1, 2]
    for row in written["batches"]:
        ratios = row["adaptive_over_better"]["values"]
        speed = {mode: row["tokens_per_second"][mode]["values"] for mode in under_load.MODES}
        assert ratios == [mine / other for mine, other in zip(speed["adaptive"], speed[row["better"]], strict=True)]
        assert all(row["host_ms_per_cycle"][mode] > 0 for mode in under_load.MODES)
    for row in written["long"]:
        assert all(row[time]["median"] > 0 for time in ("short_alone_ms", "short_ms", "long_ms"))
    whole = written["long"][-1]  # the long prompt in one chunk: only here is the wait (7 times the short prompt's own) beyond noise
    assert whole["chunk"] == under_load.CONTEXT and whole["short_alone_ms"]["median"] < whole["short_ms"]["median"]
    assert "adaptive / better of both" in capsys.readouterr().out
    with pytest.raises(BenchmarkError, match="at least 17"):
        under_load.main(flags)


def test_a_compilation_while_time_is_taken_is_an_error():
    counter = CompilationCounter()
    check_nothing_compiled(counter, before=0)
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    with pytest.raises(BenchmarkError, match="compiled while time was taken"):
        check_nothing_compiled(counter, before=0)


def test_small_helpers():
    assert list(alternate(["a", "b"], 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert table(["a", "b"], [["x", "10"]]).splitlines()[1] == "|---|---:|"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_conversion_measures_every_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conversion, "LLAMA_8B", tiny_target(dtype="bfloat16").config)
    assert (
        conversion.main(
            ["--directory", str(tmp_path / "d"), "--layers", "2", "--repeats", "1", "--out", str(tmp_path / "out.jsonl")]
        )
        == 0
    )
    written = json.loads((tmp_path / "out.jsonl").read_text())
    (stages,) = written["results"]["rounds"]
    assert list(stages) == ["copy", "convert", "load original", "load converted"]
    assert all(stage["seconds"] > 0 and stage["peak_bytes"] >= stage["idle_bytes"] > 0 for stage in stages.values())
    assert str(tmp_path) not in json.dumps(written)
    assert "of the copy's speed" in capsys.readouterr().out
