"""The GPU benchmark, at tiny sizes on this CPU: it measures everything, or says what it left out and why."""

import json
import time
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest

from benchmarks.gpu import command, main
from benchmarks.gpu.arrays import make_batch
from benchmarks.gpu.kernels import check, times
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.peer import take_answer
from benchmarks.gpu.sizes import FULL, PLAIN, SMALL
from benchmarks.gpu.supervisor import GRACE, Supervisor
from benchmarks.options import RESULTS, BenchmarkError
from jaxspec.commands.options import tree
from jaxspec.config import SpecConfig
from jaxspec.planner import estimate
from jaxspec.planner.models import weights_of


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """One run with every section, by a Python that has no torch; its status, text and record."""
    out = tmp_path_factory.mktemp("gpu") / "out.json"
    fake = out.with_name("python")
    fake.write_text('#!/bin/sh\necho \'{"missing": "No module named torch"}\'\n')
    fake.chmod(0o755)
    with redirect_stdout(StringIO()) as said:
        status = main(["--size", "tiny", "--out", str(out), "--torch-python", str(fake)])
    return SimpleNamespace(status=status, out=said.getvalue(), record=json.loads(out.read_text()))


def rows(run: SimpleNamespace, section: str) -> list[dict]:
    return run.record["results"][section]["rows"]


def test_every_section_is_measured_or_says_why_not(run):
    assert run.status == 0, run.out
    results = run.record["results"]
    assert list(results) == list(command.ORDER)
    for section, found in results.items():
        assert found["rows"] or found["skipped"], section
        assert not found["failed"] and found["seconds"] >= 0
        assert all(len(skipped["reason"]) > 10 for skipped in found["skipped"]), found["skipped"]
        assert f"\n{section} (" in run.out
    (skipped,) = results["peer"]["skipped"]
    assert skipped["reason"].startswith("No module named torch: install torch")


def test_figures_of_a_cpu_say_so(run):
    assert run.record["note"].startswith("NOT A GPU") and run.record["note"] in run.out


def test_bytes_are_those_of_the_estimate(run):
    pair = estimate.pair(SMALL.target, SMALL.head, "bfloat16")
    measured = rows(run, "cycle") + rows(run, "grid")
    assert {row["tree"] for row in measured} == {spec.name for spec in SMALL.trees}
    for row in measured:
        least = estimate.cycle_cost(pair, tree(row["tree"]), row["batch"], row["context"])
        assert (row["bytes"], row["operations"]) == (sum(least.moved.values()), least.operations)
        assert row["context_grew_by"] > 0 and len(row["milliseconds"]) == SMALL.samples and min(row["milliseconds"]) > 0
    bandwidth = rows(run, "copy")[0]["bytes_per_second"]
    row = rows(run, "grid")[0]  # by another process, with the bandwidth that the first one measured
    assert row["byte_roofline_ms"] == pytest.approx(1e3 * row["bytes"] / bandwidth)
    assert row["share_of_byte_roofline"] == pytest.approx(row["byte_roofline_ms"] / sorted(row["milliseconds"])[1])


def test_cycles_with_kernels_for_gpus_are_left_out_on_a_cpu(run):
    found = run.record["results"]["attention"]
    assert {row["attention"] for row in found["rows"]} == {"reference"}
    assert {row["case"]["attention"] for row in found["skipped"]} == {"pallas_triton", "mosaic"}
    assert {row["reason"] for row in found["skipped"]} == {"it runs on GPUs only"}


def test_attention_reads_its_context_and_window_once(run):
    for row in rows(run, "kernels"):
        config, slots = SMALL.target, row["batch"] * (row["context"] + row["rows"])
        assert row["bytes"] == 2 * 2 * slots * config.num_kv_heads * config.head_dim
    assert {row["implementation"] for row in rows(run, "kernels")} >= {"reference"}


def test_implementations_are_compared_with_the_reference(run):
    checked = rows(run, "check")
    assert {row["kernel"] for row in checked} == {"tree_attention", "cache_write", "rms_norm", "rotate_qkv"}
    assert all(row["error"] <= row["bound"] for row in checked)
    inexact = [row for row in checked if row["kernel"] != "cache_write"]
    assert all(row["error"] > 0 for row in inexact)  # bfloat16 against float32
    assert len({(row["kernel"], row["shape"]) for row in inexact}) == len(SMALL.shapes) + 3 * len(SMALL.row_shapes)


def test_what_does_not_fit_is_skipped_with_the_sizes(run):
    skipped = run.record["results"]["grid"]["skipped"]
    assert [entry["case"]["batch"] for entry in skipped] == [2, 2]
    assert all("2 x 32 tokens needs" in entry["reason"] for entry in skipped)


def test_the_second_compilation_comes_from_the_cache(run):
    assert [row["found_in_cache"] for row in rows(run, "compile")][::2] == [False, True]


def test_the_full_size_is_llama_3_1_8b():
    weights = weights_of(FULL.target, "bfloat16")
    assert weights.parameters == 8030261248
    assert FULL.head.captured_layers == (2, 16, 29) and FULL.head.draft_vocab_size == 32000
    assert FULL.trees[0] == PLAIN and SpecConfig(5, 8, 32) in FULL.trees


@pytest.mark.parametrize("section", ["copy", "peer"])
def test_without_a_gpu_one_sentence_and_no_record(tmp_path, section):
    with pytest.raises(BenchmarkError, match=r"JAX finds no GPU, only cpu: .* --size tiny --out FILE works anywhere"):
        main(["--out", str(tmp_path / "out.json"), "--only", section])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--out", str(RESULTS / "tiny.json")]], ids=["no file", "among the results"])
def test_tiny_figures_are_not_kept_with_the_others(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["--size", "tiny", *arguments])
    assert "figures" in capsys.readouterr().err


def test_the_budget_includes_the_end_of_a_worker(tmp_path, monkeypatch):
    seen = []

    def measure(options, deadline):
        seen.append(deadline)
        return SimpleNamespace(failures=1)

    monkeypatch.setattr(command, "measure", measure)
    started = time.time()
    assert main(["--size", "tiny", "--out", str(tmp_path / "out.json"), "--budget", "100"]) == 1
    assert seen[0] == pytest.approx(started + 100 - GRACE, abs=1)


def test_the_peer_stands_beside_our_plain_cycle():
    supervisor = Supervisor("tiny", time.time(), "", lambda _: None)
    supervisor.take({"kind": "row", "section": "cycle", "row": {"tree": "plain", "milliseconds": [4.0, 5.0, 6.0]}})
    answer = {"versions": {"torch": "2"}, "not compiled": {"milliseconds": [20.0]}, "compiled": {"error": "no CUDA graphs"}}
    take_answer(supervisor, answer)
    (row,), (failed,) = supervisor.results["peer"]["rows"], supervisor.results["peer"]["failed"]
    assert row["over_plain_cycle"] == 4.0 and row["versions"] == {"torch": "2"}
    assert failed == {"case": {"name": "transformers, compiled"}, "error": "no CUDA graphs"}


def test_contexts_are_put_back_and_pages_are_scattered():
    lab = Lab(SMALL, bandwidth=1.0, arithmetic=1.0)
    made = make_batch(lab, 2, 32)
    assert sorted(made.page_table.ravel().tolist()) == list(range(made.page_table.size))
    made.state = made.state._replace(sequences=made.state.sequences._replace(length=made.state.sequences.length + 3))
    made.put_back()
    assert made.state.sequences.length.tolist() == [32, 32]
    assert not made.state.sequences.done.any()
    most = (made.state.sequences.length + made.state.sequences.remaining).max() + max(each.num_steps for each in SMALL.trees) + 1
    assert most <= made.page_table.shape[1] * made.state.caches.target[0].k.shape[1]


def test_what_may_end_the_worker_comes_last():
    kernels, checks = (list(dict.fromkeys(case["implementation"] for case, _ in section(Lab(SMALL)))) for section in (times, check))
    assert kernels == ["pallas_triton", "reference", "mosaic"] and checks[-1] == "mosaic"
