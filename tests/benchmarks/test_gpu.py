"""The GPU benchmark, at tiny sizes on this CPU: it measures everything, or says what it left out and why."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.gpu import command, main, profile, tables, worker
from benchmarks.gpu.arrays import SAMPLING, make_batch
from benchmarks.gpu.checks import BOUND, WrongResult, check, checked_kernels, compare_with_reference, probe
from benchmarks.gpu.command import run_part, run_process
from benchmarks.gpu.cycles import EXCHANGES, known_gpu
from benchmarks.gpu.expected_text import TOKENS
from benchmarks.gpu.lab import FULL, SMALL, Lab, Skip
from benchmarks.gpu.parts import ORDER, OUT_OF_TIME, PARTS, RECORD, Task
from benchmarks.gpu.products import changes, matrices
from benchmarks.gpu.tables import ANCHORS, by_part
from benchmarks.gpu.worker import cases_of, run_cases
from benchmarks.options import RESULTS, BenchmarkError
from jaxspec.commands.options import tree
from jaxspec.decoding.settings import SamplingKind, highest_kind
from jaxspec.decoding.state import gather
from jaxspec.planner import estimate
from jaxspec.planner.compile import WITHOUT_GPU
from jaxspec.planner.gpus import GPUS
from jaxspec.planner.models import weights_of
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.dispatch import lowered_for
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.skinny_matmul import SwiGlu
from pallas_kernels.skinny_matmul.tiling import choose_tiling

BY_NAME = {part.name: part for part in PARTS}


def measured(part: str) -> list[dict]:
    """The rows of a part at tiny sizes, in this process; checks that every other case says why there is none."""
    lab = Lab(SMALL, bandwidth=1e9)
    said = [message for message in run_cases(Task(part, "tiny", "", 1e12), cases_of(BY_NAME[part], lab)) if "starts" not in message]
    assert said and not [message for message in said if "failed" in message]
    reasons = {message["skipped"] for message in said if "skipped" in message}
    assert reasons <= {"it runs on GPUs only", "one device exchanges nothing: give --tp"}
    return [{**message["case"], **message["row"]} for message in said if "row" in message]


# Parts


def test_a_run_adds_its_parts_to_the_record(tmp_path, capsys):
    """The only test of a whole run: its processes load JAX, which takes seconds."""
    out, here = tmp_path / "out.jsonl", {"devices": ["cpu"], "jax": version("jax"), "jaxlib": version("jaxlib")}
    earlier = [{"part": "tiles", "begins": "today", "size": "tiny", "environment": here}, {"part": "tiles", "seconds": 1.0}]
    out.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    assert main(["--size", "tiny", "--out", str(out), "--only", "copy"]) == 0
    found, printed = by_part(map(json.loads, out.read_text().splitlines())), capsys.readouterr().out
    assert list(found) == ["copy", "tiles"] and found["copy"]["rows"][0]["bytes_per_second"] > 0
    assert "NOT A GPU: these figures only show" in printed and "\ncopy (" in printed and "0 failed" in printed


@pytest.mark.variants
def test_cycles_read_the_bytes_of_the_estimate():
    pair, rows = estimate.pair(SMALL.target, SMALL.head, "bfloat16"), measured("cycle")
    assert [(row["tree"], row["sampling"]) for row in rows] == list(itertools.product((t.name for t in SMALL.trees), SAMPLING))
    for row in rows:
        assert row["bytes"] == sum(estimate.cycle_cost(pair, tree(row["tree"]), row["batch"], row["context"]).moved.values())
        assert len(row["milliseconds"]) == SMALL.samples and min(row["milliseconds"]) > 0
        assert row["share_of_byte_roofline"] == pytest.approx(row["bytes"] / 1e6 / sorted(row["milliseconds"])[1])
        assert ("compile_seconds" in row) == (row["sampling"] == "greedy")
    assert ANCHORS["plain"] and "| SGLang ms |" in " ".join(tables.table_of("cycle", rows).split())


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", [part for part in ORDER if part not in ("copy", "cycle", "text", "engine")])
def test_every_part_is_measured_or_says_why_not(part):
    rows = measured(part)
    if part in ("probe", "profile", "tiles", "packed", "exchanges"):
        assert not rows
    if part == "weights":
        assert [(row["weights"], row["tree"]) for row in rows] == [("int8", "plain"), ("int8", "1/2/3")]
    if part == "choices":  # Mosaic's attention is for GPUs
        assert {row["kernels"] for row in rows} == {"matmul skinny"} and len(rows) == 4
    if part == "check":
        assert {row["kernel"] for row in rows} == {each.kernel for each in checked_kernels(Lab(SMALL))}
        assert all(row["error"] <= row["bound"] for row in rows)
    if part == "attention":
        slots = 1 * (32 + 8)
        assert [row["bytes"] for row in rows] == [2 * 2 * slots * SMALL.target.num_kv_heads * SMALL.target.head_dim]


@pytest.mark.exhaustive
def test_the_text_is_the_stored_one():
    (row,) = measured("text")
    for kind in TOKENS:
        assert set(row[f"{kind}_same_as_stored"].values()) == set(row[f"{kind}_same_as_plain"].values()) == {row["prompts"]}


@pytest.mark.exhaustive
def test_both_loops_of_the_engine_are_timed():
    rows = measured("engine")
    assert [(row["tree"], row["requests"]) for row in rows] == [("1/2/3", 1), ("plain", 1)]
    assert all(min(*row["milliseconds"], *row["serial_milliseconds"], row["device_milliseconds"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_devices_share_the_models(tmp_path, monkeypatch):
    """Cycles with each way to exchange sums, the engine, and weights of 8 bits, whose parts lie elsewhere."""
    out = tmp_path / "out.jsonl"
    arguments = ["--size", "tiny", "--out", str(out), "--tp", "2", "--only", "exchanges", "engine", "weights"]
    with pytest.raises(BenchmarkError, match="--tp 2 needs 2 devices, and JAX finds 1"):
        main(arguments)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert main(arguments) == 0
    found = by_part(map(json.loads, out.read_text().splitlines()))
    assert [len(found[part]["rows"]) for part in ("engine", "exchanges", "weights")] == [2, 1 + 2 * len(EXCHANGES), 2]
    assert found["engine"]["environment"]["tp"] == 2 and not any(each["skipped"] for each in found.values())


WAYS_TO_EXCHANGE = """
import jax
from jax.sharding import PartitionSpec
from benchmarks.gpu.cycles import EXCHANGES
from jaxspec.models.sharing import MESH_AXIS
from jaxspec.planner import worker

placement = worker.gpus("h100", 2)
shape = jax.ShapeDtypeStruct((8,), "float32", sharding=placement.whole)
program = placement.program(lambda weights, x: jax.lax.psum(x * weights, MESH_AXIS), shape)
for options in EXCHANGES.values():
    compiled = jax.jit(program).lower(shape, shape).compile(placement.compiler_options(platform="cuda") | dict(options))
    assert "all-reduce" in compiled.as_text(), options
"""


def test_xla_for_gpus_knows_the_ways_to_exchange(gpu_compiler):
    subprocess.run([sys.executable, "-c", WAYS_TO_EXCHANGE], check=True, env=os.environ | WITHOUT_GPU, timeout=600)


# Sizes, arguments, options


def test_the_full_size_is_llama_3_1_8b():
    assert weights_of(FULL.target, "bfloat16").parameters == 8030261248
    assert FULL.head.captured_layers == (2, 16, 29) and FULL.head.draft_vocab_size == 32000
    assert FULL.trees[0] == PLAIN and TreeShape(5, 8, 32) in FULL.trees and [spec.name for spec in FULL.trees[:3]] == list(ANCHORS)


def test_every_part_has_cases_at_full_size_and_the_most_important_come_first():
    for part in PARTS:
        assert next(cases_of(part, Lab(FULL, 1.0)))
    assert ORDER[:5] == ("probe", "copy", "cycle", "text", "engine")
    cycles = [(case["tree"], case["sampling"]) for case, _ in cases_of(BY_NAME["cycle"], Lab(FULL))]
    assert cycles[:9] == list(itertools.product(["plain", "3/1/4", "7/1/8"], ["greedy", "temperature", "top_p"]))


def test_without_a_gpu_one_sentence_and_no_record(tmp_path):
    with pytest.raises(BenchmarkError, match=r"JAX finds no GPU, only cpu: .* --size tiny --out FILE works anywhere"):
        main(["--out", str(tmp_path / "out.jsonl"), "--only", "copy"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--out", str(RESULTS / "tiny.json")]], ids=["no file", "among the results"])
def test_tiny_figures_are_not_kept_with_the_others(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["--size", "tiny", *arguments])
    assert "figures" in capsys.readouterr().err


def test_a_record_of_something_else_is_not_added_to(tmp_path):
    out, here = tmp_path / "out.jsonl", {"devices": ["NVIDIA H200"]}
    out.write_text(json.dumps({"part": "copy", "begins": "today", "size": "full", "environment": {"devices": ["NVIDIA H100"]}}))
    with pytest.raises(BenchmarkError, match=r"full.*H100.*choose another --out"):
        command.check_record(out, "full", here)
    with pytest.raises(BenchmarkError, match=r"full.*H100.*choose another --out"):
        command.check_record(out, "full", {"devices": ["NVIDIA H100"], "tp": 2})
    out.write_text("[]")
    with pytest.raises(BenchmarkError, match="not written by this benchmark"):
        command.check_record(out, "full", here)


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


@pytest.mark.parametrize(
    ("kind", "expected"), [("greedy", 0), ("temperature", SamplingKind.TEMPERATURE), ("top_p", SamplingKind.FILTERED)]
)
def test_cycles_run_the_kind_of_sampling_that_they_are_named_after(kind, expected):
    made = make_batch(Lab(SMALL), 2, 32, kind)
    settings = gather(made.state, made.rows, made.page_table).settings
    assert highest_kind(settings, jnp.ones(2, bool)) == expected
    assert settings.seed.tolist() == [[0, 0], [0, 1]] and settings.stop_tokens.shape == (2, 16)


def test_contexts_are_put_back_and_pages_are_scattered():
    made = make_batch(Lab(SMALL), 2, 32)
    assert sorted(made.page_table.ravel().tolist()) == list(range(made.page_table.size))
    made.state = made.state._replace(sequences=made.state.sequences.replaced(length=made.state.sequences.length + 3))
    made.put_back()
    assert made.state.sequences.length.tolist() == [32, 32]
    assert not made.state.sequences.done.any()
    most = (made.state.sequences.length + made.state.sequences.remaining).max() + max(each.num_steps for each in SMALL.trees) + 1
    assert most <= made.page_table.shape[1] * made.state.cache[0].k.shape[1]


def test_check_and_probe_run_every_kernel_of_a_cycle():
    """The folders of pallas_kernels with a kernel for GPUs, each with all kinds of weights and caches. What may crash is last."""
    folders = {path.parent.name for path in Path(pallas_kernels.__path__[0]).glob("*/pallas_triton.py")}
    names = [each.kernel for each in checked_kernels(Lab(SMALL))]
    assert {name for folder in folders for name in names if name.startswith(folder)} | {"norm_pair", *names[2:5]} == set(names)
    assert all(any(name.startswith(folder) for name in names) for folder in folders)
    assert [sum(name.startswith(part) for name in names) for part in ("skinny_matmul", "tree_attention", "cutoff")] == [5, 2, 2]
    assert {case["kernel"] for case, _ in probe(Lab(SMALL))} == set(names)
    order = list(dict.fromkeys(case["implementation"] for case, _ in check(Lab(SMALL))))
    assert order == ["pallas_triton", "reference", "mosaic"]


@pytest.mark.variants
def test_what_runs_on_gpus_only_can_be_traced_for_one():
    """At full size: each kernel of the probe, and the products of `packed` as they are."""
    lab = Lab(FULL, 1.0)
    with lowered_for("cuda"):
        for each in checked_kernels(lab):
            function, arguments = partial(each.function, implementation="pallas_triton"), each.calls[each.smallest]
            assert jax.tree.leaves(jax.eval_shape(function, *jax.eval_shape(arguments)))
        for case, measure in cases_of(BY_NAME["packed"], lab):
            if case["changed"] == "as it is":
                _, multiply, weight = measure.args
                assert jax.tree.leaves(jax.eval_shape(multiply, jax.ShapeDtypeStruct((4, weight.shape[0]), lab.dtype), weight))


@pytest.mark.variants
@pytest.mark.parametrize("bits", [16, 8])
def test_a_wrong_kernel_is_found(bits):
    (attention,) = (each for each in checked_kernels(Lab(SMALL)) if each.kernel == f"tree_attention, {bits} bits")

    def wrong(*arguments, implementation):
        return attention.function(*arguments, implementation=implementation) * (1.0 if implementation == "reference" else 1.1)

    shape, lab = attention.smallest, SimpleNamespace(need_gpu=lambda: None, dtype=Lab(SMALL).dtype)
    programs = SimpleNamespace(take=lambda _: partial(wrong, implementation=None))
    with pytest.raises(WrongResult):
        compare_with_reference(lab, replace(attention, function=wrong), "pallas_triton", shape, programs)  # type: ignore
    programs = SimpleNamespace(take=lambda _: partial(attention.function, implementation=None))
    assert compare_with_reference(lab, attention, "pallas_triton", shape, programs)["error"] <= BOUND  # type: ignore


def test_a_profile_is_by_what_kernels_do():
    scopes = {"gemm_fusion_dot.12": "jit(cycle_program)/verify/layer_3/jit(either)/cond/branch_0_fun/add_norm/dot_general"}
    layers = [profile.Kernel("gemm_fusion_dot.12", "gemm_fusion_dot_12", 8000.0)] * 2 * profile.CYCLES
    kinds = profile.by_kind([*layers, profile.Kernel("", "MemcpyD2D", 800.0)], scopes)
    assert kinds == {"verify/layer/add_norm/dot_general gemm_fusion_dot": (16.0, 2.0), "MemcpyD2D": (0.1, 1 / profile.CYCLES)}
    row = {"tree": "plain", "sampling": "greedy", "busy_milliseconds": 0.0161, "kernels": 2.0, "microseconds_and_launches": kinds}
    lines = [" ".join(line.replace("|", " ").split()) for line in tables.table_of("profile", [row]).splitlines()]
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


def test_settings_are_changed_one_at_a_time():
    own = choose_tiling(jax.eval_shape(QuantizedAs("int8"), jax.ShapeDtypeStruct((512, 512), "bfloat16")).packed, 2, None, 4, True)
    made = dict(changes(own, {"warps": (own.warps, own.warps + 1)}))
    assert made == {"as it is": own, f"warps {own.warps + 1}": replace(own, warps=own.warps + 1)}


# Processes: what fails, hangs or is out of time costs no more than it must


def breaks(message: str) -> dict:
    raise RuntimeError(message)


def refuses() -> dict:
    raise Skip("too large")


def test_a_failing_case_does_not_stop_the_others():
    found = [partial(breaks, "no such kernel"), refuses, partial(breaks, "RESOURCE_EXHAUSTED: 9 bytes"), lambda: {"found": 5}]
    said = list(run_cases(Task("a", "tiny", "", 9.0), (({"n": n}, measure) for n, measure in enumerate(found)), lambda: 5.0))
    assert said[::2] == [{"part": "a", "case": {"n": n}, "starts": 5.0} for n in range(4)]
    assert said[1] == {"part": "a", "case": {"n": 0}, "failed": "RuntimeError: no such kernel"}
    assert said[3]["skipped"] == "too large" and "RESOURCE" in said[5]["skipped"] and said[7]["row"] == {"found": 5}
    again = run_cases(Task("a", "tiny", "", 9.0, first=3), (({"n": n}, measure) for n, measure in enumerate(found)), lambda: 5.0)
    assert list(again) == said[6:]


def test_a_device_that_no_longer_works_ends_the_process(monkeypatch):
    monkeypatch.setattr(worker.jnp, "arange", lambda _: breaks("illegal address"))
    with pytest.raises(RuntimeError, match="illegal address"):
        worker.check_device()


def test_no_case_starts_behind_the_deadline():
    clock = iter([5.0, 5.0, 15.0, 15.0])
    said = list(run_cases(Task("a", "tiny", "", 10.0), (({"n": n}, dict) for n in range(3)), lambda: next(clock)))
    assert [message["case"]["n"] for message in said if "row" in message] == [0]
    assert [message["case"]["n"] for message in said if "skipped" in message] == [1, 2]


PROCESS_OF_CASES = """
import faulthandler, json, sys, time
task, kind = json.loads(sys.argv[1]), KIND
def say(**line):
    with open(task["out"], "a") as out: print(json.dumps({"part": "copy", **line}), file=out)
if kind == "never begins": sys.exit("no driver")
for n in range(task["first"], 4):
    say(case={"n": n}, starts=1)
    if kind == "dies" and n == 1: sys.exit("kernel died")
    if kind == "hangs" and n == 2: faulthandler.dump_traceback_later(0.3, exit=True); time.sleep(60)
    if kind == "always dies": sys.exit(9)
    broken = kind == "breaks the device" and n == 2
    say(case={"n": n}, **({"failed": "wrong"} if broken else {"row": {}}))
    if broken: sys.exit("illegal address")
"""


@pytest.mark.parametrize(
    ("part", "measured", "failed"),
    [
        ("fine", [0, 1, 2, 3], []),
        ("dies", [0, 2, 3], [("1", "the process ended with status 1: kernel died")]),
        ("hangs", [0, 1, 3], [("2", "the process ended with status 1: Timeout (")]),
        ("breaks the device", [0, 1, 3], [("2", "wrong")]),
        ("always dies", [], [(n, "the process ended with status 9: it said nothing") for n in "012"]),
        ("never begins", [], [("all", "the process ended with status 1: no driver")]),
    ],
)
def test_a_process_that_ends_early_costs_only_its_case(tmp_path, part, measured, failed):
    found = kept(tmp_path, PROCESS_OF_CASES.replace("KIND", repr(part)))
    assert [row["n"] for row in found["rows"]] == measured
    assert [
        (case, reason[: len(expected)]) for (case, reason), (_, expected) in zip(found["failed"], failed, strict=True)
    ] == failed
    left_out = [("all", "3 processes ended early: the rest is left out")] if part == "always dies" else []
    assert found["skipped"] == left_out


def kept(folder: Path, script: str, deadline: float = 1e12) -> Mapping[str, Any]:
    """What a run of one part has kept."""
    out, file = folder / "out.jsonl", folder / "process.py"
    file.write_text(script)
    out.write_text('{"part": "copy", "begins": "today"}\n')

    def keep(line: dict) -> None:
        with out.open("a") as record:
            print(json.dumps({"part": "copy", **line}), file=record)

    run_part(Task("copy", "tiny", str(out), deadline), keep, [sys.executable, "-S", str(file)])
    return by_part(map(json.loads, out.read_text().splitlines()))["copy"]


def test_the_end_of_the_budget_is_no_failure(tmp_path):
    script = PROCESS_OF_CASES.replace("KIND", "'hangs'")
    found = kept(tmp_path, script.replace("later(0.3", "later(1.5"), deadline=time.time() + 1)
    assert [row["n"] for row in found["rows"]] == [0, 1] and found["skipped"] and not found["failed"]
    assert kept(tmp_path, "no Python", deadline=0.0)["skipped"] == [("all", OUT_OF_TIME)]


@pytest.mark.variants
def test_a_process_that_hangs_says_where_and_the_starting_one_leaves_the_device_alone():
    """The starting process would hold memory that its workers need."""
    code = (
        "import time, benchmarks.gpu\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "from benchmarks.gpu import worker\n"
        "def stuck(): time.sleep(60)\n"
        "worker.watch(0.0, 1e12); stuck()"
    )
    said = run_process(None, [sys.executable, "-c", code])
    assert re.search(r'status 1: Timeout \(0:00:01\)! \(most recent call first\): File "<string>", line \d+ in stuck', said)


@pytest.mark.exhaustive
def test_killed_at_any_moment_it_leaves_valid_results_and_no_process(tmp_path):
    """The process that uses the device ends with its case."""
    out = tmp_path / "out.jsonl"
    arguments = ["--size", "tiny", "--out", str(out), "--only", "copy", "gemm", "cycle"]
    run = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", *arguments], stderr=subprocess.DEVNULL)
    while not (out.exists() and "gemm" in out.read_text()):
        assert run.poll() is None
        time.sleep(0.1)
    workers = [int(each) for each in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert by_part(map(json.loads, out.read_text().splitlines()))["copy"]["rows"]
    deadline = time.time() + 60
    while any(os.path.exists(f"/proc/{each}") for each in workers):
        assert time.time() < deadline, workers
        time.sleep(0.2)
