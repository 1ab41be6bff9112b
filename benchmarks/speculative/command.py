"""Picks the draft tree for a model, a head, prompts and batch sizes, on this machine; and tells by how much it is faster, if it is.

One process, no restarts: trees are programs of one engine. In three steps:

  1. accept lengths: every tree runs all prompts once (they don't depend on the batch size); what a smaller tree matches is dropped
  2. cycle times: a dozen cycles of every tree at every batch size, beside plain cycles; both together predict each speed-up
  3. those that may be best run end to end, prefills included, side by side with plain decoding: all once, the better half again,
     and so on; the winner is measured anew, and is the choice if it is faster than plain decoding

--exhaustive measures every tree end to end afterwards: brute force, to see what the short way misses. The choice goes to a file
for `jaxspec serve --config`, the picture (speed-ups of all trees, and of the best by batch size) beside it.

--simulate-accept-length answers another question: what would a head have to accept? It times cycles with the head that there
is, or with random weights of the usual size, and assumes the accept length. Such figures are called simulated everywhere.

Examples:
    python -m benchmarks.speculative --batch-size 1 4 16
    python -m benchmarks.speculative --model-path DIR --draft DIR --prompts mt_bench.jsonl --chat --steps 3 5 --topk 1 4 8
    python -m benchmarks.speculative --trees 3/1/4 5/4/8 --exhaustive
    python -m benchmarks.speculative --model-path DIR --simulate-accept-length 2 2.5 3
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import record
from benchmarks.options import BenchmarkParser, add_common_options, add_sampling_options, prompts_of, sampling_params, show
from benchmarks.speculative.config_file import config_file
from benchmarks.speculative.grid import dominated, grid
from benchmarks.speculative.simulated import describe_simulated, random_head
from benchmarks.speculative.sweep import Sweep
from benchmarks.speculative.tables import tables, worth_knowing
from benchmarks.speculative.tuning import acceptances, anew, confirm, cycle_times, describe, measure, shortlist, tournament, warm_up
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import SMALLEST_CONTEXT, CompilationCounter, Workbench
from jaxspec.config import PLAIN, SpecConfig

SUFFIXES = (".svg", ".png", ".pdf")
MODEL_FLAGS = {
    "--model-path": "model_path",
    "--speculative-draft-model-path": "speculative_draft_model_path",
    "--speculative-token-map": "speculative_token_map",
    "--dtype": "dtype",
}
"""What the server must be told beside the file."""

GRID = {"steps": [1, 3, 5, 7], "topk": [1, 2, 4, 8], "num_draft_tokens": [2, 4, 8, 16, 32]}
"""Options and their defaults, which count unless --trees names the trees."""


def tune(sweep: Sweep, trees: Sequence[SpecConfig], rounds: int, *, exhaustive: bool) -> dict:
    """All three steps; the results, for JSON."""
    counter = CompilationCounter()
    accepted = acceptances(sweep, trees)
    lengths = {tree: each.accept_length for tree, each in accepted.items()}
    beaten = dominated(lengths)
    left = [tree for tree in trees if exhaustive or tree not in beaten]
    sweep.compile(left, sweep.batches)
    batches = []
    for batch in sweep.batches:
        timed = cycle_times(sweep, left, batch, rounds)
        candidates = shortlist([each for each in timed if each.tree not in beaten], lengths)
        confirmed = confirm(sweep, tournament(sweep, candidates, batch, rounds, counter), rounds, counter)
        if exhaustive:  # of the choice it is to judge it knows nothing
            timed = [anew(each) for each in timed]
            warm_up(sweep, timed, batch)
            measure(sweep, timed, batch, rounds, counter)
        batches.append({
            "batch": batch,
            "choice": str(confirmed.tree) if median(confirmed.speed_ups) > 1 else "plain",
            "confirmed": describe(confirmed, lengths[confirmed.tree]),
            "candidates": [str(each.tree) for each in candidates],
            "trees": [describe(each, lengths[each.tree]) for each in timed],
        })  # fmt: skip
    return {
        "exhaustive": exhaustive,
        "acceptance": {str(tree): vars(each) for tree, each in accepted.items()},
        "dominated": {str(tree): str(other) for tree, other in beaten.items()},
        "batches": batches,
    }


def simulate(sweep: Sweep, trees: Sequence[SpecConfig], rounds: int, accept_lengths: Sequence[float]) -> dict:
    """Cycle costs, and what they would mean at these accept lengths; for JSON."""
    sweep.compile(trees, sweep.batches)
    batches = [
        {
            "batch": batch,
            "trees": [describe_simulated(each, sorted(set(accept_lengths))) for each in cycle_times(sweep, trees, batch, rounds)],
        }
        for batch in sweep.batches
    ]
    return {"simulated_accept_lengths": sorted(set(accept_lengths)), "batches": batches}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("speculative", __doc__)
    add_common_options(parser, num_prompts=10, max_tokens=100, rounds=3)
    add_sampling_options(parser)
    sizes = parser.add_argument_group("trees and batch sizes: every combination, as in SGLang's bench_speculative")
    sizes.add_argument("--batch-size", type=whole(1), nargs="+", default=[1, 2, 4, 8, 16], help="(default: 1 2 4 8 16)")
    sizes.add_argument("--steps", type=whole(0), nargs="+", help="(default: 1 3 5 7)")
    sizes.add_argument("--topk", type=whole(0), nargs="+", help="(default: 1 2 4 8)")
    sizes.add_argument(
        "--num-draft-tokens",
        type=whole(0),
        nargs="+",
        help="(default: 2 4 8 16 32; chains have one size)",
    )
    sizes.add_argument("--trees", type=tree, nargs="+", metavar="S/K/D", help="these trees instead of a grid")
    ways = parser.add_argument_group("ways to measure")
    ways.add_argument("--exhaustive", action="store_true", help="measure every tree end to end at every batch size")
    ways.add_argument(
        "--simulate-accept-length", type=float, nargs="+", metavar="TOKENS", help="assume these instead of running a head's drafts"
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--config-out", type=Path, metavar="FILE", help="for `jaxspec serve --config` (default: --out's name, .yaml)"
    )
    files.add_argument("--picture-out", type=Path, metavar="FILE", help="svg, png or pdf (default: --out's name, .svg)")
    options = parser.parse(arguments, mode)
    if options.simulate_accept_length and min(options.simulate_accept_length) < 1:
        parser.error("--simulate-accept-length must be at least 1: every verification gives a token")
    if options.simulate_accept_length and (options.exhaustive or options.config_out):
        parser.error("--simulate-accept-length chooses no tree: leave out --exhaustive and --config-out")
    parser.refuse_beside_trees(options, GRID)
    options.picture_out = options.picture_out or options.out.with_suffix(".svg")
    if options.picture_out.suffix not in SUFFIXES:
        parser.error(f"--picture-out must end in {', '.join(SUFFIXES)}, got {options.picture_out.name}")
    return options


def mode(options: argparse.Namespace) -> str:
    """Brute force and simulations have results of their own."""
    return "_simulated" if options.simulate_accept_length else "_exhaustive" if options.exhaustive else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    options = parse(arguments)
    from benchmarks.speculative.picture import save  # says what to install before anything is measured

    prompts = prompts_of(options)
    chosen = grid(*(vars(options)[name] or default for name, default in GRID.items()))
    trees = [each for each in dict.fromkeys(options.trees) if each != PLAIN] if options.trees else chosen.trees
    if not trees and options.trees:
        raise ValueError("plain decoding is always measured: give --trees that draft")
    if not trees:
        raise ValueError(f"none of these sizes make a tree: {'; '.join(f'{name}: {why}' for name, why in chosen.skipped.items())}")
    bench = Workbench.of(options, context_length=SMALLEST_CONTEXT)
    has_head = bench.llm.head is not None
    if not has_head and options.simulate_accept_length:
        bench.llm.head = random_head(bench.llm.target)
    if bench.llm.head is None:
        raise ValueError("trees need a draft head: give --draft, or --simulate-accept-length if there is none")
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    sweep = Sweep(bench, encoded, trees, options.batch_size, sampling_params(options, len(encoded)))
    for each in trees:
        sweep.timed_cycles(each)  # an error now is better than one in half an hour
    print(f"{len(trees)} trees at batch {', '.join(map(str, sweep.batches))}: {' '.join(map(str, trees))}", flush=True)
    if options.simulate_accept_length:
        results = simulate(sweep, trees, options.rounds, options.simulate_accept_length)
    else:
        results = tune(sweep, trees, options.rounds, exhaustive=options.exhaustive)
    results |= {"head": bench.llm.head.config.algorithm if has_head else "random weights"}
    results["skipped"] = {} if options.trees else chosen.skipped
    made = record.write("speculative", options, prompts, results)
    print("\n" + "\n\n".join([*tables(results).values(), worth_knowing(results)]) + "\n", flush=True)
    save(results, options.picture_out)
    if not options.simulate_accept_length:
        path = options.config_out or options.out.with_suffix(".yaml")
        path.write_text(config_file(made))
        models = "".join(f" {flag} ..." for flag, given in MODEL_FLAGS.items() if vars(options)[given] not in (None, "auto"))
        print(f"for the server: jaxspec serve{models} --config {show(path)}")
    return 0
