"""The GPU benchmark, at tiny sizes on this CPU: it measures everything, or says what it left out and why."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import command, main, tables
from benchmarks.gpu.arrays import make_batch
from benchmarks.gpu.cycles import known_gpu
from benchmarks.gpu.kernels import check, times
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.parts import ANCHORS, FLAGS, ORDER, PARTS
from benchmarks.gpu.products import matrices
from benchmarks.gpu.sizes import FULL, PLAIN, SMALL
from benchmarks.gpu.supervisor import GRACE
from benchmarks.options import RESULTS, BenchmarkError
from jaxspec.commands.options import tree
from jaxspec.config import TreeShape
from jaxspec.planner import estimate
from jaxspec.planner.gpus import GPUS
from jaxspec.planner.models import weights_of
from tests.sets import exhaustive


def run_parts(folder: Path, *only: str) -> SimpleNamespace:
    """A run of these parts, or of all; its status, text and record."""
    out = folder / "out.json"
    with redirect_stdout(StringIO()) as said:
        status = main(["--size", "tiny", "--out", str(out), *(["--only", *only] if only else [])])
    return SimpleNamespace(status=status, out=said.getvalue(), record=json.loads(out.read_text()))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """One run with every part."""
    return run_parts(tmp_path_factory.mktemp("gpu"))


def rows(run: SimpleNamespace, part: str) -> list[dict]:
    return run.record["results"][part]["rows"]


def test_a_run_of_some_parts_and_another_one_share_a_record(tmp_path):
    first = run_parts(tmp_path, "tiles")
    assert first.status == 0
    assert {entry["reason"] for entry in first.record["results"]["tiles"]["skipped"]} == {"it runs on GPUs only"}
    second = run_parts(tmp_path, "copy")
    assert list(second.record["results"]) == ["copy", "tiles"]
    assert second.record["note"].startswith("NOT A GPU") and second.record["note"] in second.out
    assert "complete: copy" in second.out and rows(second, "copy")[0]["bytes_per_second"] > 0


@pytest.mark.exhaustive
def test_every_part_is_measured_or_says_why_not(run):
    assert run.status == 0, run.out
    results = run.record["results"]
    assert list(results) == list(ORDER)
    for part, found in results.items():
        assert found["rows"] or found["skipped"], part
        assert not found["failed"] and found["seconds"] >= 0
        assert all(len(skipped["reason"]) > 10 for skipped in found["skipped"]), found["skipped"]
        assert f"\n{part} (" in run.out


@pytest.mark.exhaustive
def test_bytes_are_those_of_the_estimate(run):
    pair = estimate.pair(SMALL.target, SMALL.head, "bfloat16")
    measured = rows(run, "cycle") + rows(run, "grid")
    assert {row["tree"] for row in measured} == {spec.name for spec in SMALL.trees}
    for row in measured:
        least = estimate.cycle_cost(pair, tree(row["tree"]), row["batch"], row["context"])
        assert (row["bytes"], row["operations"]) == (sum(least.moved.values()), least.operations)
        assert row["context_grew_by"] > 0 and len(row["milliseconds"]) == SMALL.samples and min(row["milliseconds"]) > 0
        assert min(row[f"{step}_seconds"] for step in ("trace", "lower", "compile", "first_run")) > 0
    bandwidth = rows(run, "copy")[0]["bytes_per_second"]
    row = rows(run, "grid")[0]  # by another process, with the bandwidth that the first one measured
    assert row["byte_roofline_ms"] == pytest.approx(1e3 * row["bytes"] / bandwidth)
    assert row["share_of_byte_roofline"] == pytest.approx(row["byte_roofline_ms"] / sorted(row["milliseconds"])[1])


@pytest.mark.exhaustive
def test_the_text_is_the_stored_one(run):
    (row,) = rows(run, "text")
    assert (row["attention"], row["dtype"]) == ("reference", "float32")
    assert set(row["same_as_stored"].values()) == set(row["same_as_plain"].values()) == {row["prompts"]}


@pytest.mark.exhaustive
def test_settings_and_both_loops_are_timed(run):
    assert [row["flags"] for row in rows(run, "flags")] == [name for name in list(FLAGS)[:2] for _ in SMALL.trees]
    timed = [row for row in rows(run, "engine") if row["measured"] == "timed"]
    assert [(row["tree"], row["requests"]) for row in timed] == [("1/2/3", 2), ("plain", 2)]
    assert all(min(*row["milliseconds"], *row["serial_milliseconds"], row["device_milliseconds"]) > 0 for row in timed)


@pytest.mark.exhaustive
def test_cycles_with_kernels_for_gpus_are_left_out_on_a_cpu(run):
    found = run.record["results"]["attention"]
    assert {row["attention"] for row in found["rows"]} == {"reference"}
    assert {row["case"]["attention"] for row in found["skipped"]} == {"pallas_triton", "mosaic"}
    assert {row["reason"] for row in found["skipped"]} == {"it runs on GPUs only"}


@pytest.mark.exhaustive
def test_attention_reads_its_context_and_window_once(run):
    for row in rows(run, "kernels"):
        config, slots = SMALL.target, row["batch"] * (row["context"] + row["rows"])
        assert row["bytes"] == 2 * 2 * slots * config.num_kv_heads * config.head_dim
    assert {row["implementation"] for row in rows(run, "kernels")} >= {"reference"}


@pytest.mark.exhaustive
def test_implementations_are_compared_with_the_reference(run):
    checked = rows(run, "check")
    assert {row["kernel"] for row in checked} >= {"tree_attention", "cache_write", "rms_norm", "rotate_qkv"}
    assert all(row["error"] <= row["bound"] for row in checked)


@pytest.mark.exhaustive
def test_what_does_not_fit_is_skipped_with_the_sizes(run):
    skipped = run.record["results"]["grid"]["skipped"]
    assert [entry["case"]["batch"] for entry in skipped] == [2, 2]
    assert all("2 x 32 tokens needs" in entry["reason"] for entry in skipped)


@pytest.mark.exhaustive
def test_the_last_compilation_comes_from_the_cache(run):
    assert [row["found_in_cache"] for row in rows(run, "compile")] == [False, False, True]


@pytest.mark.exhaustive
def test_killed_at_a_random_moment_it_leaves_valid_results_and_no_process(tmp_path):
    out = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--out", str(out), "--only", "copy", "gemm", "cycle"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not out.exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(random.uniform(0, 20))
    workers = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert set(json.loads(out.read_text())["results"]) <= {"copy", "gemm", "cycle"}
    deadline = time.time() + 30
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.time() < deadline, workers
        time.sleep(0.2)


def test_the_full_size_is_llama_3_1_8b():
    weights = weights_of(FULL.target, "bfloat16")
    assert weights.parameters == 8030261248
    assert FULL.head.captured_layers == (2, 16, 29) and FULL.head.draft_vocab_size == 32000
    assert FULL.trees[0] == PLAIN and TreeShape(5, 8, 32) in FULL.trees


@pytest.mark.parametrize("part", ["copy", exhaustive("peer")])
def test_without_a_gpu_one_sentence_and_no_record(tmp_path, part):
    with pytest.raises(BenchmarkError, match=r"JAX finds no GPU, only cpu: .* --size tiny --out FILE works anywhere"):
        main(["--out", str(tmp_path / "out.json"), "--only", part])
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


def test_xla_knows_all_settings():
    """It ends the process for a flag that it doesn't know."""
    environment = os.environ | {"XLA_FLAGS": " ".join(FLAGS.values())}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True, env=environment)


def test_every_part_names_a_function():
    for part in PARTS:
        module, function = part.function.split(".")
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), function))
    assert ORDER[:4] == ("probe", "copy", "gemm", "cycle")
    assert [spec.name for spec in FULL.trees[:3]] == list(ANCHORS)


def test_the_matrices_of_a_cycle():
    assert sorted(matrices(Lab(FULL)).values()) == sorted(
        [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256), (12288, 4096), (8192, 6144), (4096, 32000)]
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("cpu", None)],
)
def test_the_time_model_knows_the_chip(kind, name):
    assert known_gpu(kind) is (GPUS[name] if name else None)


def test_a_record_of_something_else_is_not_overwritten(tmp_path):
    out = tmp_path / "out.json"
    out.write_text('{"benchmark": "gpu", "flags": {"size": "full"}}')
    with pytest.raises(BenchmarkError, match="choose another --out"):
        command.earlier(out, "tiny")
    report = command.Report(SimpleNamespace(out=out), {"environment": {"devices": ["NVIDIA H100"]}})
    report.supervisor = SimpleNamespace(environment={"devices": ["NVIDIA H200"]})
    with pytest.raises(BenchmarkError, match="holds results of devices"):
        report.check_earlier()


def test_the_summary_has_the_figures_beside_those_of_sglang():
    def cycle(name: str, milliseconds: float, **others: object) -> dict:
        compiled = {"trace_seconds": 5.0, "lower_seconds": 2.0, "compile_seconds": 40.0, "share_of_byte_roofline": 0.75}
        return {"tree": name, "milliseconds": [milliseconds], "model_milliseconds": 4.85, **compiled, **others}

    def part(*rows: dict, failed: tuple = ()) -> dict:
        return {"rows": list(rows), "skipped": [], "failed": list(failed), "seconds": 1.0}

    broken = {"case": {"matrix": "down_proj", "rows": 1}, "error": "the worker hung: compile 400 s"}
    product = {"matrix": "o_proj 4096x4096", "rows": 8, "way": "XLA", "microseconds": [9.0], "share": 0.9}
    loops = {"milliseconds": [7.0], "serial_milliseconds": [9.0], "device_milliseconds": 6.5}
    results = {
        "gemm": part(product, failed=(broken,)),
        "cycle": part(
            cycle("plain", 4.9, launches=350, outside_the_graph=[]), cycle("3/1/4", 5.7, outside_the_graph=["kCustomCall"])
        ),
        "flags": part({"flags": "PDL on", **cycle("plain", 4.7)}),
        "engine": part({"measured": "timed", "tree": "3/1/4", "requests": 8, **loops}),
        "peer": part({"name": "torch", "milliseconds": [6.0]}),
    }
    shown = tables.summary(results, {"platform": "gpu"}, "full")
    lines = [" ".join(line.replace("|", " ").split()) for line in shown.splitlines()]
    assert "plain 4.90 5.26 4.85 0.75 350 yes 7.0 40.0 -" in lines
    assert "3/1/4 5.70 7.10 4.85 0.75 - no: kCustomCall 7.0 40.0 -" in lines
    assert "o_proj 4096x4096 8 9.0 (0.90)" in lines and "PDL on 4.70" in lines and "3/1/4 8 6.50 7.00 9.00" in lines
    assert "torch: 6.00 ms; our plain cycle: 4.90" in lines
    assert "failed: gemm: down_proj 1: the worker hung: compile 400 s" in lines
    assert any("with gaps: gemm" in line and "complete: cycle flags engine peer" in line for line in lines)


def test_contexts_are_put_back_and_pages_are_scattered():
    lab = Lab(SMALL, bandwidth=1.0, arithmetic=1.0)
    made = make_batch(lab, 2, 32)
    assert sorted(made.page_table.ravel().tolist()) == list(range(made.page_table.size))
    made.state = made.state._replace(sequences=made.state.sequences.but(length=made.state.sequences.length + 3))
    made.put_back()
    assert made.state.sequences.length.tolist() == [32, 32]
    assert not made.state.sequences.done.any()
    most = (made.state.sequences.length + made.state.sequences.remaining).max() + max(each.num_steps for each in SMALL.trees) + 1
    assert most <= made.page_table.shape[1] * made.state.cache[0].k.shape[1]


def test_what_may_end_the_worker_comes_last():
    kernels, checks = (list(dict.fromkeys(case["implementation"] for case, _ in cases(Lab(SMALL), ""))) for cases in (times, check))
    assert kernels == ["pallas_triton", "reference", "mosaic"] and checks[-1] == "mosaic"
