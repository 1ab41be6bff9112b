"""Picks the draft tree for a model, a head, prompts and batch sizes on this machine, and measures by how much it is faster.

One process, no restarts. In three steps:

  1. accept lengths, which do not depend on the batch size: every tree runs all prompts once; a tree that accepts no more than a
     smaller one is dropped
  2. cycle times: a dozen cycles of every tree at every batch size, next to plain cycles; together they predict each speed-up
  3. the most promising trees run end to end, prefill included, side by side with plain decoding: all once, the better half again,
     and so on; the winner is then measured again, and is chosen if it is faster than plain decoding

--exhaustive measures every tree end to end afterwards, to check what the short way misses. The choice is written to a file for
`jaxspec serve --config`, with a picture of the speed-ups next to it.

--simulate-accept-length answers another question: which accept length would a head need? It times cycles with the given head, or
with random weights of the usual size, and assumes the accept length. These figures are always labelled as simulated.

The options of SGLang's bench_speculative work too. --output writes its lines: step_time is our median, not the 20th percentile.

Examples:
    jaxspec bench speculative --batch-size 1 4 16
    jaxspec bench speculative --model-path DIR --draft DIR --prompts mt-bench --steps 3 5 --topk 1 4 8
    jaxspec bench speculative --trees 3/1/4 5/4/8 --exhaustive
    jaxspec bench speculative --model-path DIR --simulate-accept-length 2 2.5 3
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from jaxspec.commands.compat import Ignored, add_ignored
from jaxspec.commands.options import tree, whole
from jaxspec.commands.serve_options import ALGORITHMS, algorithm_of
from jaxspec.commands.workbench import CompilationCounter, Workbench
from jaxspec.config import PLAIN, TreeShape

from . import record
from .options import BenchmarkParser, add_common_options, add_sampling_options, exit_on_error, prompts_of, sampling_params, show
from .speculative_tables import config_file, notes, sglang_lines
from .speculative_tables import tables as tables
from .sweep import Sweep, random_head
from .tuning import (
    acceptances,
    confirm,
    cycle_times,
    describe,
    dominated,
    grid,
    measure,
    shortlist,
    simulated_speed_ups,
    tournament,
    unmeasured,
    warm_up,
)  # fmt: skip

SUFFIXES = (".svg", ".png", ".pdf")
MODEL_FLAGS = {
    "--model-path": "model_path",
    "--speculative-draft-model-path": "speculative_draft_model_path",
    "--speculative-token-map": "speculative_token_map",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--speculative-draft-model-quantization": "speculative_draft_model_quantization",
    "--revision": "revision",
    "--speculative-draft-model-revision": "speculative_draft_model_revision",
    "--download-dir": "download_dir",
    "--tp-size": "tp_size",
}
"""Options that the server needs besides the file."""

OF_THE_SERVER = (
    Ignored("--mem-fraction-static= --mem-fraction=", "the cache has room for what is measured"),
    Ignored("--max-running-requests= --max-num-seqs=", "--batch-size says how many run together"),
    Ignored("--host= --port= --log-level=", "nothing is served"),
    Ignored(
        "--speculative-num-steps= --speculative-eagle-topk= --speculative-num-draft-tokens=",
        "--steps, --topk and --num-draft-tokens name the trees",
    ),
)
"""Flags that SGLang's script passes on to its servers."""
GRID = {"steps": [1, 3, 5, 7], "topk": [1, 2, 4, 8], "num_draft_tokens": [2, 4, 8, 16, 32]}
"""Options and their defaults, used unless --trees is given."""


Combinations = Mapping[int, Sequence[TreeShape]]
"""Trees by batch size."""


def tune(sweep: Sweep, combinations: Combinations, rounds: int, *, exhaustive: bool) -> dict:
    """Runs all three steps. Returns results for JSON."""
    trees = all_trees(combinations)
    counter = CompilationCounter()
    accepted = acceptances(sweep, trees)
    lengths = {tree: each.accept_length for tree, each in accepted.items()}
    beaten = dominated(lengths)
    unbeaten = {batch: [tree for tree in trees if tree not in beaten] or trees for batch, trees in combinations.items()}
    left = combinations if exhaustive else unbeaten
    compile_all(sweep, left)
    batches = []
    for batch in sweep.batches:
        timed = cycle_times(sweep, left[batch], batch, rounds)
        candidates = shortlist([each for each in timed if each.tree in unbeaten[batch]], lengths)
        confirmed = confirm(sweep, tournament(sweep, candidates, batch, rounds, counter), rounds, counter)
        if exhaustive:  # independent of the runs that led to the choice
            timed = [unmeasured(each) for each in timed]
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


def simulate(sweep: Sweep, combinations: Combinations, rounds: int, accept_lengths: Sequence[float]) -> dict:
    """Measures cycle costs and derives speed-ups at these accept lengths. Returns results for JSON."""
    lengths = sorted(set(accept_lengths))
    compile_all(sweep, combinations)
    batches = []
    for batch in sweep.batches:
        timed = cycle_times(sweep, combinations[batch], batch, rounds)
        described = [{**describe(each, None), "simulated_speed_up": simulated_speed_ups(each, lengths)} for each in timed]
        batches.append({"batch": batch, "trees": described})
    return {"simulated_accept_lengths": lengths, "batches": batches}


def compile_all(sweep: Sweep, combinations: Combinations) -> None:
    """Before anything is timed, so that what can't be compiled fails now rather than in half an hour."""
    for batch, trees in combinations.items():
        sweep.compile(trees, [batch])


def all_trees(combinations: Combinations) -> list[TreeShape]:
    """Every tree once."""
    return list(dict.fromkeys(tree for trees in combinations.values() for tree in trees))


def part(batches: Sequence[int], trees: Sequence[TreeShape], start: int, end: int | None) -> Combinations:
    """Some of all combinations, which are numbered from 0, the trees of the first batch size first.

    In:  batches [1, 4], trees [a, b], start 1, end None
    Out: {1: [b], 4: [a, b]}
    """
    chosen: dict[int, list[TreeShape]] = {}
    for batch, each in [(batch, each) for batch in dict.fromkeys(batches) for each in trees][start:end]:
        chosen.setdefault(batch, []).append(each)
    return chosen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("speculative", __doc__)
    add_common_options(parser, num_prompts=10, max_tokens=100, rounds=3)
    parser.add_options("as for a server", "speculative_algorithm", "speculative_ngram", "tp_size")
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
    sizes.add_argument("--start", type=whole(0), default=0, metavar="N", help="the first combination (default: %(default)s)")
    sizes.add_argument("--end", type=whole(0), metavar="N", help="the combination before which to stop (default: none)")
    of_both = "these trees instead of a grid; with --speculative-ngram also S/K/D/H, where the head drafts H levels"
    sizes.add_argument("--trees", type=tree, nargs="+", metavar="S/K/D", help=of_both)
    ways = parser.add_argument_group("ways to measure")
    ways.add_argument("--exhaustive", action="store_true", help="measure every tree end to end at every batch size")
    ways.add_argument(
        "--simulate-accept-length",
        type=float,
        nargs="+",
        metavar="TOKENS",
        help="assume these accept lengths instead of measuring them",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--config-out", type=Path, metavar="FILE", help="for `jaxspec serve --config` (default: --out's name, .yaml)"
    )
    files.add_argument("--output", type=Path, metavar="FILE", help="append the lines of SGLang's bench_speculative to this file")
    files.add_argument("--picture-out", type=Path, metavar="FILE", help="svg, png or pdf (default: --out's name, .svg)")
    add_ignored(parser, *OF_THE_SERVER)
    options = parser.parse(arguments, mode)
    for note in options.ignored:
        print(note, file=sys.stderr)
    if options.simulate_accept_length and min(options.simulate_accept_length) < 1:
        parser.error("--simulate-accept-length must be at least 1: every verification emits a token")
    if options.simulate_accept_length and (options.exhaustive or options.config_out):
        parser.error("--simulate-accept-length chooses no tree: leave out --exhaustive and --config-out")
    if options.simulate_accept_length and options.output:
        parser.error("--simulate-accept-length measures no accept length: leave out --output")
    parser.refuse_beside_trees(options, GRID)
    options.picture_out = options.picture_out or options.out.with_suffix(".svg")
    if options.picture_out.suffix not in SUFFIXES:
        parser.error(f"--picture-out must end in {', '.join(SUFFIXES)}, got {options.picture_out.name}")
    return options


def mode(options: argparse.Namespace) -> str:
    """Brute force and simulations have result files of their own."""
    return "_simulated" if options.simulate_accept_length else "_exhaustive" if options.exhaustive else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    options = parse(arguments)
    from .plots import draw_trees, save_figure  # before anything is measured: the error says what to install

    prompts = prompts_of(options)
    chosen = grid(*(vars(options)[name] or default for name, default in GRID.items()))
    trees = [each for each in dict.fromkeys(options.trees) if each != PLAIN] if options.trees else chosen.trees
    if not trees and options.trees:
        raise ValueError("plain decoding is always measured: give at least one tree that drafts in --trees")
    if not trees:
        raise ValueError(f"no tree has these sizes: {'; '.join(f'{name}: {why}' for name, why in chosen.skipped.items())}")
    algorithm = algorithm_of(options.speculative_algorithm)
    bench = Workbench.of(options, **({} if options.tp_size is None else {"tp_size": options.tp_size}))
    if algorithm is not None and bench.models.head is not None and bench.models.head.config.algorithm not in ALGORITHMS[algorithm]:
        raise ValueError(f"--speculative-algorithm {algorithm} was given, but the drafts are {bench.models.algorithm}")
    has_head = bench.models.head is not None
    if not has_head and options.simulate_accept_length and bench.models.config.tp_size > 1:
        raise ValueError("random weights are on one device: leave out --tp-size, or give --draft")
    if not has_head and options.simulate_accept_length:
        bench.models.head = random_head(bench.models.target)
    if bench.models.head is None:
        raise ValueError("the model has no draft head: give --draft, or --simulate-accept-length")
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    combinations = part(options.batch_size, trees, options.start, options.end)
    if not (trees := all_trees(combinations)):
        raise ValueError("--start and --end leave no combination of a batch size and a tree")
    params, ngram = sampling_params(options, len(encoded)), bool(options.speculative_ngram)
    sweep = Sweep(bench, encoded, trees, list(combinations), params, ngram=ngram)
    for each in trees:
        sweep.timed_cycles(each)  # raises now rather than in half an hour
    print(f"{len(trees)} trees at batch {', '.join(map(str, sweep.batches))}: {' '.join(map(str, trees))}", flush=True)
    if options.simulate_accept_length:
        results = simulate(sweep, combinations, options.rounds, options.simulate_accept_length)
    else:
        results = tune(sweep, combinations, options.rounds, exhaustive=options.exhaustive)
    results |= {"head": bench.models.head.config.algorithm if has_head else "random weights"} | ({"ngram": True} if ngram else {})
    results["skipped"] = {} if options.trees else chosen.skipped
    made = record.write("speculative", options, prompts, results)
    print("\n" + "\n\n".join([*tables(results).values(), notes(results)]) + "\n", flush=True)
    if options.output:
        with options.output.open("a") as lines:
            lines.writelines(json.dumps(line) + "\n" for line in sglang_lines(results, options.max_tokens))
    save_figure(draw_trees(results), options.picture_out)
    print(f"picture: {show(options.picture_out)}")
    if not options.simulate_accept_length:
        path = options.config_out or options.out.with_suffix(".yaml")
        path.write_text(config_file(made))
        models = "".join(f" {flag} ..." for flag, given in MODEL_FLAGS.items() if vars(options)[given] not in (None, "auto"))
        print(f"for the server: jaxspec serve{models} --config {show(path)}")
    return 0


if __name__ == "__main__":
    exit_on_error("speculative", main)
