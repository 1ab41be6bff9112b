"""The engine under load, in one run: speculation off, on and adaptive at growing batch sizes; the prefix cache on and off;
and what a long prompt does to short ones and to running streams at several chunk sizes.

Everything compared runs in turn, in turned order every other round; ratios are taken within a round. Everything is compiled
before, and a compilation while time is taken is an error.

Example:
    python -m benchmarks.under_load --batch 1 4 16 --rounds 3
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import BenchmarkError, Spread, alternate, check_nothing_compiled, exit_on_error
from benchmarks.load import Load, interrupt, run
from benchmarks.options import BenchmarkParser, add_common_options, prompts_of
from benchmarks.replay import replay
from jaxspec import SamplingParams
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import CompilationCounter, Workbench
from jaxspec.config import PLAIN, EngineConfig
from jaxspec.engine.engine import Engine

MODES = ("off", "on", "adaptive")
CONTEXT = 1024
SHARED_CONCURRENCY = 4
"""Requests at once in the shared-prefix workload."""
CHUNKS = (64, 256, CONTEXT)
"""Prefill chunks that are compared; the last is no chunking at all."""


def make_engine(bench: Workbench, mode: str, spec, **options) -> Engine:
    """An engine with speculation off, on, or chosen before every cycle."""
    config = EngineConfig(adaptive=mode == "adaptive", **options)
    off = mode == "off"
    return Engine(bench.llm.target, None if off else bench.llm.head, bench.llm.tokenizer, PLAIN if off else spec, config)


# Batch sizes


def batch_sizes(bench: Workbench, prompts: Sequence[Sequence[int]], options: argparse.Namespace, counter: CompilationCounter):
    """Every mode at every batch size, in turn."""
    greedy = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)
    sizes = dict(max_running_requests=max(options.batch), context_length=256, prefix_cache=False)
    engines = {mode: make_engine(bench, mode, options.tree, **sizes) for mode in MODES}
    for mode, engine in engines.items():
        print(f"speculation {mode}: every program compiled and tried in {engine.warm_up(progress=True):.0f} s", flush=True)
    results = []
    for batch in options.batch:
        wanted = [prompts[index % len(prompts)] for index in range(options.requests_per_row * batch)]
        loads: dict[str, list[Load]] = {mode: [] for mode in MODES}
        for engine in engines.values():
            run(engine, wanted, [greedy] * len(wanted), batch)
        before = counter.count
        for _, mode in tqdm(list(alternate(MODES, options.rounds)), desc=f"batch {batch}", unit="run"):
            loads[mode].append(run(engines[mode], wanted, [greedy] * len(wanted), batch))
        check_nothing_compiled(counter, before)
        different = [mode for mode in MODES if loads[mode][0].tokens != loads["off"][0].tokens]
        if different:
            raise BenchmarkError(f"text differs from plain decoding's with speculation {different} at batch {batch}")
        results.append(describe_batch(batch, loads))
    return results


def describe_batch(batch: int, loads: dict[str, list[Load]]) -> dict:
    """One batch size, for JSON; ratios round by round. The better of both is the one with the higher median."""
    speed = {mode: [load.tokens_per_second for load in loads[mode]] for mode in MODES}
    better = max(("off", "on"), key=lambda mode: median(speed[mode]))

    def ratio(mode: str, other: str) -> dict:
        return Spread([mine / its for mine, its in zip(speed[mode], speed[other], strict=True)]).describe()

    return {
        "batch": batch,
        "tokens_per_second": {mode: Spread(speed[mode]).describe() for mode in MODES},
        "on_over_off": ratio("on", "off"),
        "better": better,
        "adaptive_over_better": ratio("adaptive", better),
        "accept_length_on": loads["on"][0].accept_length,
        "host_ms_per_cycle": {mode: median(load.host_ms for load in loads[mode]) for mode in MODES},
        "launch_ms_per_cycle": {mode: median(load.launch_ms for load in loads[mode]) for mode in MODES},
    }


def show_batches(results: Sequence[dict]) -> str:
    header = ["batch", "off, tokens/s", "on", "adaptive", "on / off", "adaptive / better of both", "host ms per cycle: off", "on"]
    rows = []
    for each in results:
        speed, host = each["tokens_per_second"], each["host_ms_per_cycle"]
        ratios = [str(Spread(each[name]["values"])) for name in ("on_over_off", "adaptive_over_better")]
        speeds = [f"{speed[mode]['median']:.0f}" for mode in MODES]
        rows.append([str(each["batch"]), *speeds, *ratios, f"{host['off']:.2f}", f"{host['on']:.2f}"])
    return record.table(header, rows)


# The host's share


def host_share(bench: Workbench, prompts: Sequence[Sequence[int]], options: argparse.Namespace, _counter: CompilationCounter):
    """The smallest and the largest batch size, beside the device and with a device that answers at once."""
    greedy = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)
    results = []
    for mode in ("off", "on"):
        engine = make_engine(
            bench, mode, options.tree, max_running_requests=max(options.batch), context_length=256, prefix_cache=False
        )
        for batch in (min(options.batch), max(options.batch)):
            wanted = [prompts[index % len(prompts)] for index in range(options.requests_per_row * batch)]
            params = [greedy] * len(wanted)
            run(engine, wanted, params, batch)
            recorded, played = replay(engine, wanted, params, batch, options.rounds)
            alone = Spread([load.host_ms for load in played]).describe()
            results.append({"speculation": mode, "batch": batch, "beside_device_ms": recorded.host_ms, "alone_ms": alone})
    return results


def show_host(results: Sequence[dict]) -> str:
    header = ["speculation", "batch", "host per cycle, ms (min..max)", "beside a CPU's XLA threads, ms"]
    rows = [
        [each["speculation"], str(each["batch"]), str(Spread(each["alone_ms"]["values"])), f"{each['beside_device_ms']:.2f}"]
        for each in results
    ]
    return record.table(header, rows)


# Shared prefix


def shared_prefix(bench: Workbench, prompts: Sequence[Sequence[int]], options: argparse.Namespace, counter: CompilationCounter):
    """Sixteen prompts that begin with the same 600 tokens, with the cache on and off."""
    prefix = repeat_to(prompts[0], 600)
    wanted = [[*prefix, *prompt[-24:]] for prompt in prompts[1:17]]
    params = [SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)] * len(wanted)
    sizes = dict(max_running_requests=SHARED_CONCURRENCY, context_length=CONTEXT)
    engines = {cache: make_engine(bench, "on", options.tree, prefix_cache=cache == "cache", **sizes) for cache in ("cache", "none")}
    for engine in engines.values():
        engine.warm_up(progress=True)
    loads: dict[str, list[Load]] = {name: [] for name in engines}
    before = counter.count
    for _, name in tqdm(list(alternate(list(engines), options.rounds)), desc="shared prefix", unit="run"):
        engines[name].flush_cache()  # the first request of every run computes the prefix
        loads[name].append(run(engines[name], wanted, params, SHARED_CONCURRENCY))
    check_nothing_compiled(counter, before)
    if loads["cache"][0].tokens != loads["none"][0].tokens or loads["cache"][0].accept_lengths != loads["none"][0].accept_lengths:
        raise BenchmarkError("the prefix cache changed a text or an accept length")
    first = {name: [median(load.first_token.values()) for load in loads[name]] for name in engines}
    speed = {name: [load.tokens_per_second for load in loads[name]] for name in engines}
    hits = engines["cache"].stats()
    return {
        "prompt_tokens": len(wanted[0]),
        "first_token_ms": {name: Spread([1e3 * value for value in first[name]]).describe() for name in engines},
        "first_token_ratio": Spread([none / cache for none, cache in zip(first["none"], first["cache"], strict=True)]).describe(),
        "tokens_per_second": {name: Spread(speed[name]).describe() for name in engines},
        "throughput_ratio": Spread([cache / none for none, cache in zip(speed["none"], speed["cache"], strict=True)]).describe(),
        "hit_share": hits.prefix_hit_tokens / hits.prefix_queried_tokens,
    }


def show_shared(result: dict) -> str:
    rows = [
        [label, f"{result['first_token_ms'][name]['median']:.0f}", f"{result['tokens_per_second'][name]['median']:.0f}"]
        for name, label in (("none", "no cache"), ("cache", "prefix cache"))
    ]
    ratios = [str(Spread(result[name]["values"])) for name in ("first_token_ratio", "throughput_ratio")]
    rows.append(["gain", *ratios])
    return record.table(["shared prefix of 600 tokens", "time to first token, ms", "tokens/s"], rows)


# A long prompt


def long_prompt(bench: Workbench, prompts: Sequence[Sequence[int]], options: argparse.Namespace, counter: CompilationCounter):
    """A stream runs, then a prompt of 900 tokens comes, and right behind it one of 24."""
    long, short, stream = repeat_to(prompts[0], 900), prompts[1][-24:], prompts[2][-24:]
    engines = {
        chunk: make_engine(
            bench, "on", options.tree, max_running_requests=3, context_length=CONTEXT, prefill_chunk=chunk, prefix_cache=False
        )
        for chunk in CHUNKS
    }
    for engine in engines.values():
        engine.warm_up(progress=True)
    times: dict[int, list[dict[str, float]]] = {chunk: [] for chunk in CHUNKS}
    before = counter.count
    for _, chunk in tqdm([(a, int(b)) for a, b in alternate([str(c) for c in CHUNKS], options.rounds)], desc="long prompt"):
        times[chunk].append(interrupt(engines[chunk], stream, long, short))
    check_nothing_compiled(counter, before)
    names = times[CHUNKS[0]][0]
    return [
        {"chunk": chunk} | {name: Spread([1e3 * each[name] for each in times[chunk]]).describe() for name in names}
        for chunk in CHUNKS
    ]


def show_long(results: Sequence[dict]) -> str:
    names = ("short_alone_ms", "short_ms", "long_ms", "longest_gap_ms")
    header = [
        "prefill chunk",
        "first token of the short prompt alone, ms",
        "behind a long one",
        "of the long one",
        "stream's longest gap",
    ]
    rows = [[str(each["chunk"]), *(f"{each[name]['median']:.0f}" for name in names)] for each in results]
    return record.table(header, rows)


def repeat_to(tokens: Sequence[int], length: int) -> list[int]:
    """The tokens, repeated up to this length."""
    return [tokens[index % len(tokens)] for index in range(length)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("under-load", __doc__)
    add_common_options(parser, num_prompts=20, rounds=5)
    parser.add_argument("--tree", type=tree, default=tree("3/1/4"), metavar="S/K/N", help="the draft tree (default: 3/1/4)")
    parser.add_argument(
        "--batch-size",
        "--batch",
        dest="batch",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        help="requests at once (default: 1 2 4 8 16)",
    )
    parser.add_argument("--requests-per-row", type=whole(1), default=2, help="requests per run, for each one at once (default: 2)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run (default: all)")
    return parser.parse(arguments)


PARTS: dict[str, tuple[Callable[..., Any], Callable[..., str]]] = {
    "batches": (batch_sizes, show_batches),
    "host": (host_share, show_host),
    "prefix": (shared_prefix, show_shared),
    "long": (long_prompt, show_long),
}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """One per part."""
    return {name: PARTS[name][1](result) for name, result in results.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    options = parse(arguments)
    prompts = prompts_of(options)
    if len(prompts.prompts) < 17:
        raise BenchmarkError("--num-prompts must be at least 17: the shared-prefix workload has sixteen and a prefix")
    bench, results, counter = Workbench.of(options), {}, CompilationCounter()
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    for name in options.only:
        measure, show = PARTS[name]
        results[name] = measure(bench, encoded, options, counter)
        print(f"\n{show(results[name])}\n", flush=True)
    record.write("under_load", options, prompts, results)
    return 0


if __name__ == "__main__":
    exit_on_error(main)
