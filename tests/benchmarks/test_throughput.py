"""Offline throughput: pairs of passes, acceptance, the parts of a cycle, memory."""

import json
import subprocess
import sys

import pytest

from benchmarks import throughput


@pytest.mark.exhaustive
def test_a_run_compares_speculation_with_plain_decoding(tiny, tmp_path, newest, capsys):
    out = tmp_path / "out.jsonl"
    flags = ["--tree", "2/2/4", "--batch-size", "2", "--rounds", "2", "--max-tokens", "8"]
    assert throughput.main([*tiny, *flags, "--out", str(out)]) == 0
    record = newest()
    assert record["prompts"]["count"] == 2 and len(record["prompts"]["sha256"]) == 64
    (batch,) = record["results"]["batches"]
    plain, tree = (batch["modes"][mode] for mode in ("plain", "speculation"))
    pairs = zip(tree["tokens_per_second"]["values"], plain["tokens_per_second"]["values"], strict=True)
    assert batch["speed_up"]["values"] == pytest.approx([fast / slow for fast, slow in pairs])
    assert batch["requests"] == batch["equal_to_plain"] == 8  # two parts of two for every row
    assert plain["verifications"] == 8 * 7 and tree["verifications"] <= plain["verifications"]
    counts = {int(tokens): count for tokens, count in batch["acceptance"]["verifications_by_tokens"].items()}
    assert sum(tokens * count for tokens, count in counts.items()) == 8 * 7
    assert batch["acceptance"]["accept_length"] == pytest.approx(8 * 7 / tree["verifications"])
    assert set(batch["parts_ms"]["speculation"]) == {"draft", "verify", "accept and commit", "extend"}
    assert set(batch["parts_ms"]["plain"]) == {"draft", "verify", "accept and commit"}
    assert all(len(part["values"]) == throughput.PART_SAMPLES and part["min"] > 0 for part in batch["parts_ms"]["plain"].values())
    weights = {mode: batch["memory"][mode]["weights_bytes"] for mode in ("plain", "speculation")}
    assert 0 < weights["plain"] < weights["speculation"]
    shown = capsys.readouterr().out
    assert all(table in shown for table in throughput.tables(record["results"]).values())


@pytest.mark.exhaustive
def test_virtual_devices_show_costs_only(tiny, tmp_path):
    """In a process of its own: JAX makes its devices when it starts."""
    flags = ["--tree", "2/2/4", "--rounds", "1", "--max-tokens", "6", "--tp-size", "2", "--out", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "benchmarks.throughput", *tiny, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "2 virtual devices share this CPU: these are the costs of dividing a model, not its gains" in ended.stdout
    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    (batch,) = record["results"]["batches"]
    assert record["results"]["devices"] == 2 and batch["equal_to_plain"] == batch["requests"]
    assert batch["parts_ms"] == {"plain": {}, "speculation": {}}


def test_plain_decoding_alone_is_nothing_to_compare(tiny, tmp_path):
    with pytest.raises(ValueError, match="nothing to compare"):
        throughput.main([*tiny, "--tree", "plain", "--out", str(tmp_path / "out.jsonl")])


@pytest.mark.skipif(not throughput.CLEAR.exists(), reason="reads /proc: needs Linux")
def test_the_peak_of_the_process_begins_anew():
    block = bytearray(200 << 20)
    before = throughput.memory_peaks()["process_peak_bytes"]
    del block
    throughput.restart_peak()
    after = throughput.memory_peaks()["process_peak_bytes"]
    assert after < before - (150 << 20)
    block = bytearray(200 << 20)
    assert throughput.memory_peaks()["process_peak_bytes"] > after + (150 << 20)
    del block
