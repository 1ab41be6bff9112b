"""Offline throughput: the same prompts with and without speculation, in one process, side by side, per batch size.

Measures tokens per second and the speed-up of every pair of runs, accept length (mean, by depth, histogram), verifications, time
per cycle (host, launching, waiting; draft, verify, commit, extend), and memory. Requests go through the engine as `LLM.generate`
sends them, a few at a time with both engines in alternating order, so that a machine that changes its speed slows both. Compilation
and an untimed round come first; a compilation during the timed part is an error.

Examples:
    jaxspec bench throughput --tree 3/1/4
    jaxspec bench throughput --model-path DIR --draft DIR --prompts mt-bench --batch-size 1 8 32 --max-tokens 512
    jaxspec bench throughput --model-path DIR --draft DIR --temperature 0.8
    jaxspec bench throughput --tp-size 2

On a CPU, --tp-size divides the model over virtual devices, which share its cores: the figures show what dividing costs, and never
what devices of their own would gain.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import jax
from tqdm import tqdm

from jaxspec import SamplingParams
from jaxspec.commands.options import add_tree_options, chosen_tree, whole
from jaxspec.commands.workbench import CompilationCounter, Workbench, depth_acceptance
from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Status

from . import record
from .load import Load, check_nothing_compiled, parts_of, run, side_by_side
from .options import (
    BenchmarkError,
    BenchmarkParser,
    add_common_options,
    add_sampling_options,
    exit_on_error,
    prompts_of,
    sampling_params,
)  # fmt: skip
from .record import Spread
from .stages import time_parts

PLAIN_MODE, TREE_MODE = "plain", "speculation"
PART_SAMPLES = 20
PEAKS = ("process_peak_bytes", "device_peak_bytes")
"""Peak memory of this process, which holds all engines, during the timed part; of the device since the start."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    tree: TreeShape,
    batch: int,
    options: argparse.Namespace,
    *,
    ignore_eos: bool,
) -> dict:
    """Measures one batch size: runs side by side, then the parts of a cycle. Returns results for JSON."""
    parts = parts_of(len(prompts), batch)
    repeated = [prompts[index % len(prompts)] for index in range(parts[-1].stop)]
    params = sampling_params(options, len(repeated), ignore_eos=ignore_eos)
    without_end = sampling_params(options, batch)
    engines = {
        mode: bench.engine(shape, batch, bench.context_for(prompts, options.max_tokens), prefix_cache=False)
        for mode, shape in ((PLAIN_MODE, PLAIN), (TREE_MODE, tree))
    }

    def run_part(engine: Engine, part: range) -> Load:
        return run(engine, [repeated[number] for number in part], [params[number] for number in part], batch)

    def run_round(number: int) -> list[Load]:
        return side_by_side(list(engines.values()), parts, run_part, number)

    for _ in tqdm(range(1), desc=f"batch {batch}: compiling, untimed round", unit="round"):
        run_round(0)
    counter = CompilationCounter()
    restart_peak()
    rounds = [run_round(number) for number in tqdm(range(options.rounds), desc=f"batch {batch}: timed", unit="round")]
    check_nothing_compiled(counter, before=0)
    peaks = memory_peaks()
    plain, drafted = ([loads[which] for loads in rounds] for which in (0, 1))
    return {
        "batch": batch,
        "requests": len(repeated),
        "speed_up": Spread(record.shares(speeds(drafted), speeds(plain))).describe(),
        "decode_speed_up": Spread(record.shares(decode_speeds(drafted), decode_speeds(plain))).describe(),
        "equal_to_plain": drafted[0].count_equal(plain[0]),
        "acceptance": describe_acceptance(drafted[0]),
        "modes": {PLAIN_MODE: describe_passes(plain), TREE_MODE: describe_passes(drafted)},
        "parts_ms": {mode: time_cycle_parts(engine, bench, repeated[:batch], without_end) for mode, engine in engines.items()},
        "memory": {mode: memory_of(engine) for mode, engine in engines.items()} | peaks,
    }


def speeds(loads: Sequence[Load]) -> list[float]:
    return [load.tokens_per_second for load in loads]


def decode_speeds(loads: Sequence[Load]) -> list[float]:
    return [load.decode_tokens_per_second for load in loads]


def describe_passes(loads: Sequence[Load]) -> dict:
    """Speeds and times of one mode, for JSON."""
    return {
        "tokens_per_second": Spread(speeds(loads)).describe(),
        "decode_tokens_per_second": Spread(decode_speeds(loads)).describe(),
        "first_token_ms": Spread([1e3 * median(load.first_token.values()) for load in loads]).describe(),
        "cycles": loads[0].cycles,
        "verifications": len(loads[0].verifications),
        "per_cycle_ms": {
            name: Spread([vars(load)[f"{name}_ms"] for load in loads]).describe() for name in ("host", "launch", "wait")
        },
    }  # fmt: skip


def describe_acceptance(load: Load) -> dict:
    """Tokens per verification of one run, for JSON."""
    lengths = load.verifications
    return {
        "accept_length": load.accept_length,
        "by_depth_given_parent": depth_acceptance(lengths),
        "verifications_by_tokens": dict(sorted(Counter(lengths).items())),
    }


def time_cycle_parts(
    engine: Engine, bench: Workbench, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> dict[str, dict]:
    """Milliseconds of draft, verify, commit and extend, with these requests at the start of their texts. Consumes the engine. Empty
    with several devices: the parts exist on one only."""
    if engine.config.tp_size > 1:
        return {}
    requests = [engine.add(GenerationRequest(tuple(prompt), each)) for prompt, each in zip(prompts, params, strict=True)]
    while any(request.generated < 2 for request in requests):
        engine.step()
    if any(request.status is not Status.RUNNING for request in requests):
        raise BenchmarkError("--max-tokens is too small: some texts ended before the last prompt was computed")
    runner = engine.runner
    rows, page_table = (each.array for each in runner.cycle_of(requests, engine.tree)[1:])
    parts, runner.state = time_parts(runner.merge, runner.params, runner.state, rows, page_table, engine.tree, in_milliseconds)
    return {part: Spread(values).describe() for part, values in parts.items()}


def in_milliseconds(call: Callable[[], Any]) -> list[float]:
    """Times several calls, waiting for each, after two untimed calls."""
    times = []
    for _ in range(PART_SAMPLES + 2):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - started))
    return times[2:]


def restart_peak() -> None:
    """Resets the peak memory of this process (Linux only)."""
    with suppress(OSError):
        CLEAR.write_text("5")


def memory_peaks() -> dict[str, int]:
    """Bytes, as far as known: the peak of this process since `restart_peak`, and the peak of the device."""
    found = dict[str, int]()
    if STATUS.exists():
        line = next((line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line:
            found["process_peak_bytes"] = int(line.split()[1]) * 1024
    if stats := jax.devices()[0].memory_stats():
        found["device_peak_bytes"] = stats["peak_bytes_in_use"]
    return found


def memory_of(engine: Engine) -> dict[str, int]:
    """Bytes of the weights, of caches and other state, and of the largest program's temporaries."""
    runner = engine.runner
    programs = runner.programs
    return {
        "weights_bytes": sum(array.nbytes for array in jax.tree.leaves(runner.params)),
        "state_bytes": sum(array.nbytes for array in jax.tree.leaves(runner.state)),
        "temporary_bytes": max((programs.temporary_bytes(program) for program in programs.compilations), default=0),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """`speed`, `acceptance`, `time`, `memory`."""
    rows: dict[str, list[list[str]]] = {"speed": [], "acceptance": [], "time": [], "memory": []}
    depth = max(len(each["acceptance"]["by_depth_given_parent"]) for each in results["batches"])
    parts = list(results["batches"][0]["parts_ms"][TREE_MODE])
    for each in results["batches"]:
        for mode, name in ((PLAIN_MODE, "plain"), (TREE_MODE, results["tree"])):
            rows["speed"].append(speed_row(each, mode, name))
            rows["time"].append(time_row(each, mode, name, parts))
            used = each["memory"][mode]
            peaks = [megabytes(each["memory"][kind]) if kind in each["memory"] else "" for kind in PEAKS]
            rows["memory"].append([str(each["batch"]), name, *(megabytes(used[kind]) for kind in used), *peaks])
        rows["acceptance"].append(acceptance_row(each, depth))
    headers: dict[str, list[str]] = {
        "speed": [
            "batch",
            "",
            "tokens/s",
            "of one request while decoding",
            "first token, ms",
            "speed-up (min..max)",
            "decoding alone",
        ],
        "acceptance": [
            "batch",
            "verifications",
            "accept length",
            *(f"depth {number + 1}" for number in range(depth)),
            "tokens: count",
        ],
        "time": ["batch", "", "host, ms per cycle (with prefill)", "launching", "waiting", *(f"{part}, ms" for part in parts)],
        "memory": [
            "batch",
            "",
            "weights, MB",
            "caches and state, MB",
            "temporaries, MB",
            "peak of the process (both)",
            "of the device (both)",
        ],
    }
    return {name: record.table(headers[name], rows[name]) for name in headers}


def speed_row(each: dict, mode: str, name: str) -> list[str]:
    figures = [
        f"{each['modes'][mode][kind]['median']:.1f}" for kind in ("tokens_per_second", "decode_tokens_per_second", "first_token_ms")
    ]
    ratios = [str(Spread(each[kind]["values"])) if mode == TREE_MODE else "1.00" for kind in ("speed_up", "decode_speed_up")]
    return [str(each["batch"]), name, *figures, *ratios]


def time_row(each: dict, mode: str, name: str, parts: Sequence[str]) -> list[str]:
    cycle = [f"{each['modes'][mode]['per_cycle_ms'][kind]['median']:.2f}" for kind in ("host", "launch", "wait")]
    times = each["parts_ms"][mode]
    return [str(each["batch"]), name, *cycle, *(f"{times[part]['median']:.2f}" if part in times else "" for part in parts)]


def acceptance_row(each: dict, depth: int) -> list[str]:
    accepted = each["acceptance"]
    rates = [f"{rate:.0%}" for rate in accepted["by_depth_given_parent"]]
    counts = ", ".join(f"{tokens}: {count}" for tokens, count in accepted["verifications_by_tokens"].items())
    verifications = each["modes"][TREE_MODE]["verifications"]
    return [
        str(each["batch"]),
        str(verifications),
        f"{accepted['accept_length']:.2f}",
        *rates,
        *[""] * (depth - len(rates)),
        counts,
    ]


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("throughput", __doc__)
    add_common_options(parser, num_prompts=10, rounds=5)
    add_tree_options(parser)
    parser.add_argument("--batch-size", type=whole(1), nargs="+", default=[1], help="requests in flight (default: 1)")
    add_sampling_options(parser)
    parser.add_options("as for a server", "tp_size")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a text differs from plain decoding."""
    options = parse(arguments)
    prompts = prompts_of(options)
    devices = {} if options.tp_size is None else {"tp_size": options.tp_size}
    if devices:
        jax.config.update("jax_num_cpu_devices", options.tp_size)  # of no effect on GPUs
    bench = Workbench.of(options, **devices)
    tree = chosen_tree(options) or bench.models.tree
    if not tree.num_steps:
        raise ValueError("nothing to compare with plain decoding: give a tree and a draft head")
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    batches = [measure(bench, encoded, tree, batch, options, ignore_eos=not prompts.ends) for batch in options.batch_size]
    count = bench.models.config.tp_size
    results = {"tree": str(tree), "devices": count, "batches": batches}
    record.write("throughput", options, prompts, results)
    print("\n" + "\n\n".join(tables(results).values()) + "\n", flush=True)
    if count > 1 and jax.default_backend() == "cpu":
        print(f"{count} virtual devices share this CPU: these are the costs of dividing a model, not its gains", flush=True)
    different = [each for each in batches if each["equal_to_plain"] < each["requests"]]
    for each in different:
        total = each["requests"]
        print(f"batch {each['batch']}: {each['equal_to_plain']} of {total} texts equal plain decoding: run jaxspec check-lossless")
    return 1 if different else 0


if __name__ == "__main__":
    exit_on_error("throughput", main)
