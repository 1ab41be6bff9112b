"""Prompts computed together against the same prompts one by one: the time until all first tokens are there.

Two engines differ in nothing but whether a program may compute chunks of several prompts. Each case (8x16: eight prompts of 16
tokens) runs in both in alternating order, so that a machine that changes its speed slows both; the shares are of pairs of runs.
Where other work runs, seconds of all cores (CPU) say more than the clock. A single prompt runs the same program in both engines.

Examples:
    jaxspec bench prefill
    jaxspec bench prefill --model-path DIR --draft DIR --cases 8x16 4x64 2x128
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxspec import SamplingParams
from jaxspec.commands.workbench import CompilationCounter, Workbench, run
from jaxspec.engine.engine import Engine

from . import record
from .load import alternate, check_nothing_compiled
from .options import BenchmarkError, BenchmarkParser, add_common_options, exit_on_error, prompts_of
from .record import Spread

CASES = ((1, 16), (1, 64), (8, 16), (4, 64))
WAYS = TOGETHER, ONE_BY_ONE = "together", "one by one"
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class Run(NamedTuple):
    """One case, once."""

    seconds: float
    """By the clock, until all first tokens were there."""
    cpu_seconds: float
    """Of all cores."""
    tokens: list[tuple[int, ...]]


def measure(engines: dict[str, Engine], prompts: Sequence[Sequence[int]], rounds: int) -> dict:
    """Runs a case in both engines. Returns results for JSON."""

    def run_once(way: str) -> Run:
        before = time.process_time()
        done = run(engines[way], prompts, [FIRST_TOKEN] * len(prompts))
        return Run(done.seconds, time.process_time() - before, done.tokens)

    for way in WAYS:  # compiles
        run_once(way)
    counter, found = CompilationCounter(), {way: list[Run]() for way in WAYS}
    for _, way in alternate(WAYS, rounds):
        found[way].append(run_once(way))
    check_nothing_compiled(counter, before=0)

    def shares(name: str) -> dict:
        values = {way: [getattr(each, name) for each in runs] for way, runs in found.items()}
        return Spread(record.shares(values[TOGETHER], values[ONE_BY_ONE])).describe()

    return {
        "prompts": len(prompts),
        "tokens": len(prompts[0]),
        "milliseconds": {way: Spread([1e3 * each.seconds for each in runs]).describe() for way, runs in found.items()},
        "share_of_time": shares("seconds"),
        "share_of_cpu_time": shares("cpu_seconds"),
        "equal": found[TOGETHER][0].tokens == found[ONE_BY_ONE][0].tokens,
    }


def engines_of(bench: Workbench, cases: Sequence[tuple[int, int]]) -> dict[str, Engine]:
    """An engine for each way."""
    most, longest = max(count for count, _ in cases), max(tokens for _, tokens in cases)
    context = bench.context_for([[0] * longest], FIRST_TOKEN.max_tokens)
    engines = {way: bench.engine(bench.models.tree, most, context, prefix_cache=False) for way in WAYS}
    table = engines[ONE_BY_ONE].runner.table
    engines[ONE_BY_ONE].runner.table = replace(table, prompts=(1,) * len(table.chunks))
    return engines


def tables(results: dict[str, Any]) -> dict[str, str]:
    """`shares`."""
    rows = []
    for each in results["cases"]:
        times = [f"{each['milliseconds'][way]['median']:.1f}" for way in WAYS]
        shares = [str(Spread(each[name]["values"])) for name in ("share_of_time", "share_of_cpu_time")]
        rows.append([f"{each['prompts']} x {each['tokens']}", *times, *shares])
    headers = ["prompts x tokens", *(f"{way}, ms" for way in WAYS), "share of the time (min..max)", "of CPU time"]
    return {"shares": record.table(headers, rows)}


def case(text: str) -> tuple[int, int]:
    """In:  "8x16"  Out: (8, 16)"""
    count, _, tokens = text.partition("x")
    if not (count.isdecimal() and tokens.isdecimal() and int(count) and int(tokens)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected prompts x tokens, such as 8x16")
    return int(count), int(tokens)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("prefill", __doc__)
    add_common_options(parser, num_prompts=50, max_tokens=1, rounds=20)
    shown = " ".join(f"{count}x{tokens}" for count, tokens in CASES)
    parser.add_argument("--cases", type=case, nargs="+", default=CASES, metavar="NxT", help=f"prompts x tokens (default: {shown})")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a first token differs."""
    options = parse(arguments)
    prompts = prompts_of(options)
    bench = Workbench.of(options)
    prompts = bench.ask(prompts, options.max_tokens)
    text = [token for prompt in bench.encode(prompts.prompts, chat=options.chat) for token in prompt]
    if len(text) < max(count * tokens for count, tokens in options.cases):
        raise BenchmarkError("the prompts are too short for these cases: give more with --num-prompts")
    engines, found = engines_of(bench, options.cases), []
    for count, tokens in options.cases:
        cut = [text[tokens * number : tokens * (number + 1)] for number in range(count)]
        found.append(measure(engines, cut, options.rounds))
    results = {"cases": found}
    record.write("prefill", options, prompts, results)
    print("\n" + "\n\n".join(tables(results).values()) + "\n", flush=True)
    return 0 if all(each["equal"] for each in found) else 1


if __name__ == "__main__":
    exit_on_error("prefill", main)
