"""Picks the draft tree for a model, a head, prompts and batch sizes on this machine, and measures by how much it is faster.

One process, no restarts. In three steps:

  1. accept lengths, which do not depend on the batch size: every tree runs all prompts once; a tree that accepts no more than a
     smaller one is dropped
  2. cycle times: a dozen cycles of every tree at every batch size, next to plain cycles; together they predict each speed-up
  3. the most promising trees run end to end, prefill included, side by side with plain decoding: all once, the better half again,
     and so on; the winner is then measured again, and is chosen if it is faster than plain decoding

--exhaustive measures every tree end to end afterwards, to check what the short way misses. The choice is written to a file for
`jaxspec serve --config`.

Examples:
    jaxspec bench speculative --batch-size 1 4 16
    jaxspec bench speculative --model-path DIR --draft DIR --prompts mt-bench --steps 3 5 --topk 1 4 8
    jaxspec bench speculative --trees 3/1/4 5/4/8 --exhaustive
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from jaxspec.commands.options import HEAD, tree, whole
from jaxspec.commands.serve_options import ALGORITHMS, algorithm_of
from jaxspec.commands.workbench import CompilationCounter, Workbench
from jaxspec.tree_shape import PLAIN, TreeShape

from . import record
from .options import BenchmarkParser, add_common_options, add_sampling_options, exit_on_error, prompts_of, sampling_params, show
from .speculative_tables import config_file, notes
from .speculative_tables import tables as tables
from .sweep import Sweep
from .tuning import acceptances, cycle_times, describe, dominated, grid, measure, shortlist, tournament, warm_up

OF_THE_MODEL = ("model_path", *HEAD, "dtype", "quantization", "revision", "download_dir", "tp_size")
"""Options that the server needs besides the file."""
GRID = {"steps": [1, 3, 5, 7], "topk": [1, 2, 4, 8], "num_draft_tokens": [2, 4, 8, 16, 32]}
"""Options and their defaults, used unless --trees is given."""


def tune(sweep: Sweep, trees: Sequence[TreeShape], rounds: int, *, exhaustive: bool) -> dict:
    """Runs all three steps. Returns results for JSON."""
    counter = CompilationCounter()
    accepted = acceptances(sweep, trees)
    lengths = {tree: each["accept_length"] for tree, each in accepted.items()}
    beaten = dominated(lengths)
    left = [tree for tree in trees if exhaustive or tree not in beaten]
    sweep.compile(left, sweep.batches)  # so that what can't be compiled fails now rather than in half an hour
    batches = []
    for batch in sweep.batches:
        timed = cycle_times(sweep, left, batch, rounds)
        candidates = shortlist([each for each in timed if each.tree not in beaten], lengths)
        confirmed = replace(tournament(sweep, candidates, batch, rounds, counter), tree_passes=[], plain_passes=[])
        measure(sweep, [confirmed], batch, rounds, counter)  # again: the maximum of several noisy figures is biased upwards
        if exhaustive:  # independent of the runs that led to the choice
            timed = [replace(each, tree_passes=[], plain_passes=[]) for each in timed]
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
        "acceptance": {str(tree): each for tree, each in accepted.items()},
        "dominated": {str(tree): str(other) for tree, other in beaten.items()},
        "batches": batches,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("speculative", __doc__)
    add_common_options(parser, num_prompts=10, max_tokens=100, rounds=3)
    parser.add_options("as for a server", "speculative_algorithm", "speculative_ngram", "tp_size")
    add_sampling_options(parser)
    sizes = parser.add_argument_group("trees and batch sizes: every combination")
    sizes.add_argument("--batch-size", type=whole(1), nargs="+", default=[1, 2, 4, 8, 16], help="(default: 1 2 4 8 16)")
    sizes.add_argument("--steps", type=whole(0), nargs="+", help="(default: 1 3 5 7)")
    sizes.add_argument("--topk", type=whole(0), nargs="+", help="(default: 1 2 4 8)")
    numbers = "(default: 2 4 8 16 32; chains have one size)"
    sizes.add_argument("--num-draft-tokens", type=whole(0), nargs="+", help=numbers)
    of_both = "these trees instead of a grid; with --speculative-ngram also S/K/D/H, where the head drafts H levels"
    sizes.add_argument("--trees", type=tree, nargs="+", metavar="S/K/D", help=of_both)
    parser.add_argument("--exhaustive", action="store_true", help="measure every tree end to end at every batch size")
    add = parser.add_argument_group("files").add_argument
    add("--config-out", type=Path, metavar="FILE", help="for `jaxspec serve --config` (default: --out's name, .yaml)")
    options = parser.parse(arguments, lambda given: "_exhaustive" if given.exhaustive else "")  # it has a file of its own
    options.config_out = options.config_out or options.out.with_suffix(".yaml")
    if options.config_out == options.out:
        parser.error(f"--out and --config-out are both {options.out}: give two files")
    useless = [f"--{name.replace('_', '-')}" for name in GRID if vars(options)[name] is not None]
    if options.trees and useless:
        parser.error(f"--trees names the trees: leave out {', '.join(useless)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    prompts = prompts_of(options)
    if options.trees:
        trees, skipped = [each for each in dict.fromkeys(options.trees) if each != PLAIN], dict[str, str]()
    else:
        trees, skipped = grid(*(vars(options)[name] or default for name, default in GRID.items()))
    if not trees and options.trees:
        raise ValueError("plain decoding is always measured: give at least one tree that drafts in --trees")
    if not trees:
        raise ValueError(f"no tree has these sizes: {'; '.join(f'{name}: {why}' for name, why in skipped.items())}")
    algorithm = algorithm_of(options.speculative_algorithm)
    bench = Workbench.of(options)
    if algorithm is not None and bench.models.head is not None and bench.models.head.config.algorithm not in ALGORITHMS[algorithm]:
        raise ValueError(f"--speculative-algorithm {algorithm} was given, but the drafts are {bench.models.algorithm}")
    if bench.models.head is None:
        raise ValueError("the model has no draft head: give --draft")
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    params, ngram = sampling_params(options, len(encoded)), bool(options.speculative_ngram)
    sweep = Sweep(bench, encoded, trees, options.batch_size, params, ngram=ngram)
    for each in trees:
        sweep.timed_cycles(each)  # raises now rather than in half an hour
    print(f"{len(trees)} trees at batch {', '.join(map(str, sweep.batches))}: {' '.join(map(str, trees))}", flush=True)
    results = tune(sweep, trees, options.rounds, exhaustive=options.exhaustive)
    results |= {"head": bench.models.head.config.algorithm, **({"ngram": True} if ngram else {}), "skipped": skipped}
    made = record.write("speculative", options, prompts, results)
    print("\n" + "\n\n".join([*tables(results).values(), notes(made)]) + "\n", flush=True)
    options.config_out.parent.mkdir(parents=True, exist_ok=True)
    options.config_out.write_text(config_file(made))
    print(f"for the server: {server_command(options, results)}")
    return 0


def server_command(options: argparse.Namespace, results: dict) -> str:
    """The command line for the choice. Plain decoding takes no option of a head."""
    unused = HEAD if all(at["choice"] == "plain" for at in results["batches"]) else ()
    given = [name for name in OF_THE_MODEL if vars(options)[name] not in (None, "auto") and name not in unused]
    model = "".join(f" --{name.replace('_', '-')} ..." for name in given)
    return f"jaxspec serve{model} --config {show(options.config_out)}"


if __name__ == "__main__":
    exit_on_error("speculative", main)
