"""Which draft tree is fastest, and by how much: plain decoding against a list of trees, greedy, in one process.

Every timed run of a tree has a run of plain decoding right beside it, in turned order every other round; a tree's
ratio is taken within each pair, so that a machine that speeds up or slows down in between hits both. Everything is compiled in an
untimed pass before, and a compilation while time is taken is an error.

Example:
    python -m benchmarks.speculative --trees 2/2/4 5/4/8 --batch 1 4 --rounds 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import Spread, check_nothing_compiled, exit_on_error
from benchmarks.options import BenchmarkParser, add_common_options
from jaxspec import SamplingParams, SpecConfig
from jaxspec.commands.arguments import tree
from jaxspec.commands.prompts import load_prompts
from jaxspec.commands.workbench import CompilationCounter, Pass, Workbench, count_equal, depth_acceptance, run
from jaxspec.config import PLAIN

DEFAULT_TREES = ("1/1/2", "2/1/3", "3/1/4", "4/1/5", "2/2/4", "3/2/6", "4/2/8", "5/4/8", "5/4/16", "5/8/32")


@dataclass
class Measured:
    """A tree's timed passes, and those of plain decoding that ran beside them."""

    spec: SpecConfig
    batch: int
    speculative: list[Pass] = field(default_factory=list)
    plain: list[Pass] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Speed-up over plain decoding, pair by pair."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return [plain.seconds / speculative.seconds for plain, speculative in pairs]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return self.speculative[0].accept_length

    @property
    def equal(self) -> int:
        """Prompts for which tree and plain decoding gave the same tokens, in every pair."""
        return min(count_equal(plain.tokens, tree.tokens) for plain, tree in zip(self.plain, self.speculative, strict=True))

    @property
    def cycle_ms(self) -> float:
        """Milliseconds that a request waits per verification."""
        return median(1e3 * each.decode_seconds / max(1, len(each.accept_lengths)) for each in self.speculative)

    def describe(self) -> dict:
        """For JSON."""
        return {
            "tree": str(self.spec),
            "batch": self.batch,
            "speed_up": Spread(self.ratios).describe(),
            "tokens_per_second": Spread([each.tokens_per_second for each in self.speculative]).describe(),
            "decode_tokens_per_second": Spread([each.decode_tokens_per_second for each in self.speculative]).describe(),
            "plain_tokens_per_second": Spread([each.tokens_per_second for each in self.plain]).describe(),
            "plain_decode_tokens_per_second": Spread([each.decode_tokens_per_second for each in self.plain]).describe(),
            "accept_length": self.accept_length,
            "acceptance_by_depth": depth_acceptance(self.speculative[0].accept_lengths),
            "cycle_ms": self.cycle_ms,
            "prompts_equal_to_plain": self.equal,
        }


def measure(
    bench: Workbench, prompts: Sequence[Sequence[int]], trees: Sequence[SpecConfig], batch: int, rounds: int, max_tokens: int
):
    """Plain decoding against every tree, `rounds` pairs each."""
    params = [SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)] * len(prompts)
    engines = {spec: bench.engine(spec, batch) for spec in (PLAIN, *trees)}
    for spec, engine in (untimed := tqdm(engines.items(), desc=f"batch {batch}: compiling, untimed pass", unit="tree")):
        untimed.set_postfix_str(str(spec))
        run(engine, prompts, params)
    results = {spec: Measured(spec, batch) for spec in trees}
    counter = CompilationCounter()
    with tqdm(total=rounds * len(trees), desc=f"batch {batch}: timed pairs", unit="pair") as bar:
        for number in range(rounds):
            for spec in trees if number % 2 == 0 else reversed(trees):
                bar.set_postfix_str(str(spec))
                pair = [(PLAIN, results[spec].plain), (spec, results[spec].speculative)]
                for each, passes in pair if number % 2 == 0 else reversed(pair):
                    passes.append(run(engines[each], prompts, params))
                bar.update()
    check_nothing_compiled(counter, before=0)
    return list(results.values())


def show(results: Sequence[Measured]) -> str:
    """The results of one batch size as a table, plain decoding first."""
    plain = [each for result in results for each in result.plain]
    total, batch = len(plain[0].outputs), results[0].batch
    cycle = median(1e3 * each.decode_seconds / max(1, len(each.accept_lengths)) for each in plain)
    speeds = [Spread([each.tokens_per_second for each in plain]), Spread([each.decode_tokens_per_second for each in plain])]
    rows = [["plain", str(batch), *(f"{median(speed.values):.1f}" for speed in speeds), f"{cycle:.2f}", "1.00", "1.00", ""]]
    for result in results:
        passes = result.speculative
        rows.append(
            [
                str(result.spec),
                str(batch),
                f"{median(each.tokens_per_second for each in passes):.1f}",
                f"{median(each.decode_tokens_per_second for each in passes):.1f}",
                f"{result.cycle_ms:.2f}",
                f"{result.accept_length:.2f}",
                str(Spread(result.ratios)),
                f"{result.equal}/{total}",
            ]
        )
    header = ["tree", "batch", "tokens/s", "decode/s", "cycle ms", "accept length", "speed-up (min..max)", "equal"]
    best = max(results, key=lambda result: median(result.ratios))
    depths = " ".join(f"{rate:.2f}" for rate in depth_acceptance(best.speculative[0].accept_lengths))
    summary = f"best at batch {batch}: {best.spec}, {Spread(best.ratios)} x plain; accepted by depth: {depths}"
    return f"{record.table(header, rows)}\n{summary}\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("speculative", __doc__)
    add_common_options(parser, num_prompts=8)
    trees = [tree(text) for text in DEFAULT_TREES]
    parser.add_argument(
        "--trees", type=tree, nargs="+", default=trees, metavar="S/K/N",
        help=f"num_steps/topk/num_draft_tokens (default: {' '.join(DEFAULT_TREES)})",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests that run together (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="timed pairs per tree (default: %(default)s)")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if any greedy output differs from plain decoding's."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts, options.default_num_prompts)
    bench = Workbench.of(options)
    results = []
    for batch in options.batch:
        measured = measure(
            bench, bench.encode(prompts.prompts, chat=options.chat), options.trees, batch, options.rounds, options.max_tokens
        )
        print(show(measured), flush=True)
        results += measured
    record.write("speculative", options, prompts, [result.describe() for result in results])
    different = [f"{result.spec} at batch {result.batch}" for result in results if result.equal < len(prompts.prompts)]
    if different:
        print(f"greedy output differs from plain decoding's: {', '.join(different)}; see jaxspec check-lossless")
    return 1 if different else 0


if __name__ == "__main__":
    exit_on_error(main)
