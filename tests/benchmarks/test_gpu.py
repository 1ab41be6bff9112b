"""The GPU benchmark, at tiny sizes on this CPU: it measures everything, or says what it left out and why."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.gpu import command, main, profile, tables
from benchmarks.gpu.arrays import SAMPLING, make_batch
from benchmarks.gpu.attention import times
from benchmarks.gpu.checks import BOUND, WrongResult, check, checked_kernels, compare_with_reference, probe
from benchmarks.gpu.cycles import known_gpu
from benchmarks.gpu.expected_text import TOKENS
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.parts import ANCHORS, FLAGS, ORDER, PARTS, RECORD
from benchmarks.gpu.products import matrices
from benchmarks.gpu.sizes import FULL, PLAIN, SMALL
from benchmarks.gpu.tables import by_part
from benchmarks.options import RESULTS, BenchmarkError
from jaxspec.commands.options import tree
from jaxspec.config import TreeShape
from jaxspec.decoding.settings import SamplingKind, highest_kind
from jaxspec.decoding.state import gather
from jaxspec.planner import estimate
from jaxspec.planner.gpus import GPUS
from jaxspec.planner.models import weights_of
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.skinny_matmul import SwiGlu
from pallas_kernels.skinny_matmul.tiling import choose_tiling


def run_parts(folder: Path, *only: str) -> SimpleNamespace:
    """A run of these parts, or of all; its status, text and record."""
    out = folder / "out.jsonl"
    with redirect_stdout(StringIO()) as said:
        status = main(["--size", "tiny", "--out", str(out), *(["--only", *only] if only else [])])
    return SimpleNamespace(status=status, out=said.getvalue(), results=by_part(map(json.loads, out.read_text().splitlines())))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """One run with every part."""
    return run_parts(tmp_path_factory.mktemp("gpu"))


def rows(run: SimpleNamespace, part: str) -> list[dict]:
    return run.results[part]["rows"]


@pytest.mark.variants
def test_a_later_run_adds_its_parts_to_the_record(tmp_path):
    here = {"devices": ["cpu"], "jax": version("jax"), "jaxlib": version("jaxlib")}
    earlier = [{"part": "tiles", "begins": "today", "size": "tiny", "environment": here}, {"part": "tiles", "seconds": 1.0}]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in earlier))
    run = run_parts(tmp_path, "copy")
    assert run.status == 0 and list(run.results) == ["copy", "tiles"]
    assert "NOT A GPU: these figures only show" in run.out
    assert "nothing: tiles" in run.out and "complete: copy" in run.out and rows(run, "copy")[0]["bytes_per_second"] > 0


@pytest.mark.exhaustive
def test_every_part_is_measured_or_says_why_not(run):
    assert run.status == 0, run.out
    assert list(run.results) == list(ORDER)
    for part, found in run.results.items():
        assert found["rows"] or found["skipped"], part
        assert not found["failed"] and found["seconds"] >= 0
        assert all(len(reason) > 10 for _, reason in found["skipped"]), found["skipped"]
        assert f"\n{part} (" in run.out


@pytest.mark.exhaustive
def test_bytes_are_those_of_the_estimate(run):
    pair = estimate.pair(SMALL.target, SMALL.head, "bfloat16")
    measured = rows(run, "cycle") + rows(run, "grid")
    assert {row["tree"] for row in measured} == {spec.name for spec in SMALL.trees}
    kinds = [(row["tree"], row["sampling"]) for row in rows(run, "cycle")]
    assert kinds == [(spec.name, kind) for spec in SMALL.trees for kind in SAMPLING]
    for row in measured:
        least = estimate.cycle_cost(pair, tree(row["tree"]), row["batch"], row["context"])
        assert (row["bytes"], row["operations"]) == (sum(least.moved.values()), least.operations)
        assert row["context_grew_by"] > 0 and len(row["milliseconds"]) == SMALL.samples and min(row["milliseconds"]) > 0
        if row["sampling"] == "greedy":
            assert min(row[f"{step}_seconds"] for step in ("trace", "lower", "compile", "first_run")) > 0
    bandwidth = rows(run, "copy")[0]["bytes_per_second"]
    row = rows(run, "grid")[0]  # by another process, with the bandwidth that the first one measured
    assert row["byte_roofline_ms"] == pytest.approx(1e3 * row["bytes"] / bandwidth)
    assert row["share_of_byte_roofline"] == pytest.approx(row["byte_roofline_ms"] / sorted(row["milliseconds"])[1])


@pytest.mark.exhaustive
def test_the_text_is_the_stored_one(run):
    (row,) = rows(run, "text")
    assert (row["attention"], row["dtype"]) == ("reference", "float32")
    for kind in TOKENS:
        assert set(row[f"{kind}_same_as_stored"].values()) == set(row[f"{kind}_same_as_plain"].values()) == {row["prompts"]}


@pytest.mark.exhaustive
def test_settings_and_both_loops_are_timed(run):
    assert [row["flags"] for row in rows(run, "flags")] == list(FLAGS)[:1]
    assert [(row["weights"], row["tree"]) for row in rows(run, "weights")] == [("int8", "plain"), ("int8", "1/2/3")]
    timed = rows(run, "engine")
    assert [(row["tree"], row["requests"]) for row in timed] == [("1/2/3", 2), ("plain", 2)]
    assert all(min(*row["milliseconds"], *row["serial_milliseconds"], row["device_milliseconds"]) > 0 for row in timed)


@pytest.mark.exhaustive
def test_cycles_with_kernels_for_gpus_are_left_out_on_a_cpu(run):
    found = run.results["choices"]
    assert [(row["kernels"], row["tree"], row["sampling"]) for row in found["rows"]] == [
        ("matmul skinny", tree.name, kind) for tree in SMALL.trees for kind in ("greedy", "top_p")
    ]
    assert {case.split(" 1")[0] for case, _ in found["skipped"]} >= {"attention mosaic plain greedy"}
    assert {reason for _, reason in found["skipped"]} == {"it runs on GPUs only"}


@pytest.mark.exhaustive
def test_attention_reads_its_context_and_window_once(run):
    for row in rows(run, "attention"):
        config, slots = SMALL.target, row["batch"] * (row["context"] + row["rows"])
        assert row["bytes"] == 2 * 2 * slots * config.num_kv_heads * config.head_dim
    assert {row["implementation"] for row in rows(run, "attention")} >= {"reference"}


@pytest.mark.exhaustive
def test_implementations_are_compared_with_the_reference(run):
    checked = rows(run, "check")
    assert {row["kernel"] for row in checked} == {each.kernel for each in checked_kernels(Lab(SMALL))}
    assert all(row["error"] <= row["bound"] for row in checked)


@pytest.mark.exhaustive
def test_what_does_not_fit_is_skipped_with_the_sizes(run):
    skipped = run.results["grid"]["skipped"]
    assert [case for case, _ in skipped] == ["plain greedy 2 32", "1/2/3 greedy 2 32"]
    assert all("2 x 32 tokens needs" in reason for _, reason in skipped)


@pytest.mark.exhaustive
def test_killed_at_a_random_moment_it_leaves_valid_results_and_no_process(tmp_path):
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--out", str(out), "--only", "copy", "gemm", "cycle"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (out.exists() and out.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(random.uniform(0, 20))
    workers = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert set(by_part(map(json.loads, out.read_text().splitlines()))) <= {"copy", "gemm", "cycle"}
    deadline = time.time() + 30
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.time() < deadline, workers
        time.sleep(0.2)


def test_the_full_size_is_llama_3_1_8b():
    weights = weights_of(FULL.target, "bfloat16")
    assert weights.parameters == 8030261248
    assert FULL.head.captured_layers == (2, 16, 29) and FULL.head.draft_vocab_size == 32000
    assert FULL.trees[0] == PLAIN and TreeShape(5, 8, 32) in FULL.trees


def test_without_a_gpu_one_sentence_and_no_record(tmp_path):
    with pytest.raises(BenchmarkError, match=r"JAX finds no GPU, only cpu: .* --size tiny --out FILE works anywhere"):
        main(["--out", str(tmp_path / "out.jsonl"), "--only", "peer"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--out", str(RESULTS / "tiny.json")]], ids=["no file", "among the results"])
def test_tiny_figures_are_not_kept_with_the_others(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["--size", "tiny", *arguments])
    assert "figures" in capsys.readouterr().err


@pytest.mark.parametrize("name", FLAGS)
def test_xla_knows_all_settings(name):
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dict(FLAGS[name]))


def test_every_part_names_a_function():
    for part in PARTS:
        module, function = part.function.split(".")
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), function))
    assert ORDER[:6] == ("probe", "copy", "cycle", "flags", "text", "engine")
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


def test_a_record_of_something_else_is_not_added_to(tmp_path):
    out, here = tmp_path / "out.jsonl", {"devices": ["NVIDIA H200"]}
    out.write_text(json.dumps({"part": "copy", "begins": "today", "size": "full", "environment": {"devices": ["NVIDIA H100"]}}))
    with pytest.raises(BenchmarkError, match=r"H100.*choose another --out"):
        command.read(out, "full", here)
    with pytest.raises(BenchmarkError, match=r"with --size tiny: choose another --out"):
        command.read(out, "tiny", here)
    out.write_text("[]")
    with pytest.raises(BenchmarkError, match="not written by this benchmark"):
        command.read(out, "full", here)


def test_the_summary_has_the_figures_beside_those_of_sglang():
    compiled = {"trace_seconds": 5.0, "lower_seconds": 2.0, "compile_seconds": 40.0, "share_of_byte_roofline": 0.75}

    def cycle(name: str, milliseconds: float, model: float | None, sampling: str = "greedy", **others: object) -> dict:
        figures = {"milliseconds": [milliseconds], "model_milliseconds": model, **(compiled if sampling == "greedy" else {})}
        return {"tree": name, "sampling": sampling, **figures, **others}

    def part(*rows: dict, failed: tuple = ()) -> dict:
        return {"rows": list(rows), "skipped": [], "failed": list(failed), "seconds": 1.0}

    product = {"matrix": "o_proj 4096x4096", "rows": 8, "way": "XLA", "microseconds": [9.0], "share": 0.9}
    loops = {"milliseconds": [7.0], "serial_milliseconds": [9.0], "device_milliseconds": 6.5}
    results = {
        "gemm": part(product, failed=(("down_proj 1", "Timeout (0:02:00)!"),)),
        "cycle": part(
            cycle("plain", 4.9, 4.62, launches=350, outside_the_graph=[]), cycle("plain", 5.1, None, "top_p"),
            cycle("3/1/4", 5.7, 5.35, outside_the_graph=["kCustomCall"]),
        ),
        "flags": part(cycle("3/1/4", 5.4, 5.35, flags="PDL on")),
        "engine": part({"tree": "3/1/4", "requests": 8, **loops}),
        "peer": part({"name": "torch", "milliseconds": [6.0]}, {**product, "way": "torch", "microseconds": [11.0]}),
    }  # fmt: skip
    shown = tables.summary(results, {"platform": "gpu"}, "full")
    lines = [" ".join(line.replace("|", " ").split()) for line in shown.splitlines()]
    assert "plain 4.90 5.10 4.62 / - 5.26 0.75" in lines and "3/1/4 5.70 - 5.35 / - 7.10 0.75" in lines
    assert "plain 350 yes 7.0 40.0 -" in lines and "3/1/4 - no: kCustomCall 7.0 40.0 -" in lines
    assert "o_proj 4096x4096 8 9.0 (0.90) 11.0 (0.90)" in lines and "3/1/4 8 6.5 7.00 9.00" in lines
    assert "as it is 5.70" in lines and "PDL on 5.40" in lines
    assert "torch: 6.00 ms; our plain cycle: 4.90" in lines
    assert "failed: gemm: down_proj 1: Timeout (0:02:00)!" in lines
    assert any("with gaps: gemm" in line and "complete: cycle flags engine peer" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "expected"), [("greedy", 0), ("temperature", SamplingKind.TEMPERATURE), ("top_p", SamplingKind.FILTERED)]
)
def test_cycles_run_the_kind_of_sampling_that_they_are_named_after(kind, expected):
    made = make_batch(Lab(SMALL, bandwidth=1.0, arithmetic=1.0), 2, 32, kind)
    settings = gather(made.state, made.rows, made.page_table).settings
    assert highest_kind(settings, jnp.ones(2, bool)) == expected
    assert settings.seed.tolist() == [[0, 0], [0, 1]] and settings.stop_tokens.shape == (2, 16)


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


def test_what_may_end_the_process_comes_last():
    for cases in (times, check):
        found = list(dict.fromkeys(case["implementation"] for case, _ in cases(Lab(SMALL))))
        assert found == ["pallas_triton", "reference", "mosaic"]


def test_check_and_probe_run_every_kernel_of_a_cycle():
    """The folders of pallas_kernels that have a kernel for GPUs; each with all that a model's weights and cache may be."""
    folders = {path.parent.name for path in Path(pallas_kernels.__path__[0]).glob("*/pallas_triton.py")}
    names = [each.kernel for each in checked_kernels(Lab(SMALL))]
    assert {name for folder in folders for name in names if name.startswith(folder)} | {"norm_pair", *names[2:5]} == set(names)
    assert all(any(name.startswith(folder) for name in names) for folder in folders)
    assert [sum(name.startswith(part) for name in names) for part in ("skinny_matmul", "tree_attention", "cutoff")] == [5, 2, 2]
    assert {case["kernel"] for case, _ in probe(Lab(SMALL))} == {*names, "machine", "cycle of one layer"}


@pytest.mark.variants
@pytest.mark.parametrize("bits", [16, 8])
def test_a_wrong_kernel_is_found(bits):
    (attention,) = (each for each in checked_kernels(Lab(SMALL)) if each.kernel == f"tree_attention, {bits} bits")

    def wrong(*arguments, implementation):
        return attention.function(*arguments, implementation=implementation) * (1.0 if implementation == "reference" else 1.1)

    shape = attention.smallest
    lab = SimpleNamespace(on_gpu=True, dtype=Lab(SMALL).dtype)
    broken = replace(attention, function=wrong)
    programs = {shape: partial(wrong, implementation=None)}
    with pytest.raises(WrongResult):
        compare_with_reference(lab, broken, "pallas_triton", shape, programs)  # type: ignore
    programs = {shape: partial(attention.function, implementation=None)}
    assert compare_with_reference(lab, attention, "pallas_triton", shape, programs)["error"] <= BOUND  # type: ignore


def test_a_profile_is_by_what_kernels_do():
    scopes = {"gemm_fusion_dot.12": "jit(cycle_program)/verify/layer_3/jit(either)/cond/branch_0_fun/add_norm/dot_general"}
    layers = [profile.Kernel("gemm_fusion_dot.12", "gemm_fusion_dot_12", 8000.0)] * 2 * profile.CYCLES
    kinds = profile.by_kind([*layers, profile.Kernel("", "MemcpyD2D", 800.0)], scopes)
    assert kinds == {"verify/layer/add_norm/dot_general gemm_fusion_dot": (16.0, 2.0), "MemcpyD2D": (0.1, 1 / profile.CYCLES)}
    row = {"tree": "plain", "sampling": "greedy", "busy_milliseconds": 0.0161, "kernels": 2.0, "microseconds_and_launches": kinds}
    lines = [" ".join(line.replace("|", " ").split()) for line in tables.profiles([row]).splitlines()]
    assert "plain greedy verify/layer/add_norm/dot_general gemm_fusion_dot 2 0.016" in lines and "plain greedy all 2 0.016" in lines


def test_tiles_of_packed_weights_are_the_fastest_that_were_measured():
    """On an H200, or as fast but for noise: FP8, measured for one matrix, has int8's."""
    found = by_part(map(json.loads, (RESULTS / RECORD).read_text().splitlines()))["packed"]["rows"]
    shapes, times = matrices(Lab(FULL)), {}
    for row in found:
        times.setdefault((row["weights"], row["matrix"]), {})[row["changed"]] = row["microseconds"][0]
    assert len(times) == 11
    for (kind, matrix), measured in times.items():
        k, n = shapes[matrix.split()[0]]
        weight = jax.eval_shape(QuantizedAs.default(kind, k, for_cpu=False), jax.ShapeDtypeStruct((k, n), "bfloat16")).packed
        epilogue, parts = SwiGlu() if "gate_up" in matrix else None, "gate_up" not in matrix and "lm_head" not in matrix
        own = choose_tiling(weight, 2, epilogue, 4, parts)
        name = f"columns {own.columns} depth {own.depth} stages {own.stages} warps {own.warps} splits {own.splits}"
        assert measured[name] <= 1.15 * min(measured.values()), (kind, matrix, name)
