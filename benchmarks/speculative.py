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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from jaxspec.commands.common import table
from jaxspec.commands.compat import Ignored, add_ignored
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import CompilationCounter, Workbench
from jaxspec.config import PLAIN, TreeShape

from . import record
from .options import BenchmarkParser, add_common_options, add_sampling_options, exit_on_error, prompts_of, sampling_params, show
from .record import Spread, measured_on
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
    "--download-dir": "download_dir",
}
"""Options that the server needs besides the file."""

MEMORY = Ignored("--mem-fraction-static= --mem-fraction=", "the cache has room for what is measured")
DEVICES = Ignored("--tp-size= --tensor-parallel-size= --tp= -tp=", "trees are measured on one device", ("1",))
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


def sglang_lines(results: dict, max_tokens: int) -> Iterator[dict]:
    """The records of SGLang's bench_speculative, one per batch size and tree; 0 steps are plain decoding. Times are seconds, speeds
    tokens per second of one request."""
    for at in results["batches"]:
        first = at["trees"][0]
        plain = {"tree": "0/0/0", "cycle_ms": first["cycle_ms"] / first["cost"]["median"]}
        for each in [plain, *at["trees"]]:
            steps, topk, nodes = map(int, each["tree"].split("/"))
            length = results["acceptance"][each["tree"]]["accept_length"] if steps else 1.0
            seconds = each["cycle_ms"] / 1000
            yield {
                "batch_size": at["batch"],
                "steps": steps,
                "topk": topk,
                "num_draft_tokens": nodes,
                "acc_length": round(length, 3),
                "step_time": round(seconds, 5),
                "speed": round(length / seconds, 3),
                "completion_tokens": float(max_tokens),
            }


def tables(results: dict) -> dict[str, str]:
    """`best`: the choice per batch size; `brute force`: the choice against all trees; `batch N`: all trees at that batch size."""
    made = {} if "simulated_accept_lengths" in results else {"best": best_table(results)}
    made |= {"brute force": brute_force_table(results)} if results.get("exhaustive") else {}
    return made | {f"batch {each['batch']}": batch_table(results, each) for each in results["batches"]}


def best_table(results: dict) -> str:
    """The tuner's choices."""
    header = ["batch", "best tree", "accept length", "cost of a cycle, plain steps", "predicted", "speed-up (min..max)", "tokens/s"]
    rows = [
        [str(at["batch"]), *(plain_cells(at) if at["choice"] == "plain" else chosen_cells(at["confirmed"], results))]
        for at in results["batches"]
    ]
    return table(header, rows)


def brute_force_table(results: dict) -> str:
    """The tuner's choice against the best tree, both measured in rounds that the tuner did not use."""
    rows = []
    for at in results["batches"]:
        chosen, best = next((each for each in at["trees"] if each["tree"] == at["choice"]), None), best_of(at)
        shown = [f"{name_of(each)} {speed_up_of(each):.2f}" for each in (best, chosen)]
        rows.append([str(at["batch"]), *shown, f"{speed_up_of(chosen) / speed_up_of(best):.3f}"])
    return table(["batch", "best tree by brute force", "the tuner's choice", "choice / best"], rows)


def chosen_cells(chosen: dict, results: dict) -> list[str]:
    accepted = results["acceptance"][chosen["tree"]]
    return [
        chosen["tree"],
        f"{accepted['accept_length']:.2f}",
        f"{chosen['cost']['median']:.2f}",
        f"{chosen['predicted_speed_up']:.2f}",
        str(Spread(chosen["speed_up"]["values"])),
        f"{chosen['tokens_per_second']['median']:.0f}",
    ]


def plain_cells(at: dict) -> list[str]:
    return ["plain", "1.00", "1.00", "1.00", "1.00", f"{at['confirmed']['plain_tokens_per_second']['median']:.0f}"]


def best_of(at: dict) -> dict | None:
    """The fastest measured tree; None if plain decoding is faster."""
    best = max((each for each in at["trees"] if "speed_up" in each), key=lambda each: each["speed_up"]["median"])
    return best if best["speed_up"]["median"] > 1 else None


def name_of(tree: dict | None) -> str:
    return "plain" if tree is None else tree["tree"]


def speed_up_of(tree: dict | None) -> float:
    return 1.0 if tree is None else tree["speed_up"]["median"]


def batch_table(results: dict, at: dict) -> str:
    """All trees timed at one batch size, best prediction first."""
    lengths = results.get("simulated_accept_lengths")
    header = [f"tree, batch {at['batch']}", "cycle, ms", "in plain steps = break-even (min..max)"]
    if lengths:
        header += [f"SIMULATED speed-up at accept length {length:g}" for length in lengths]
        rows = [[*timed_cells(each), *simulated_cells(each)] for each in at["trees"]]
        return table(header, rows)
    header += ["accept length", "predicted speed-up", "measured (min..max)", "tokens/s"]
    rows = []
    for each in sorted(at["trees"], key=lambda each: each["predicted_speed_up"], reverse=True):
        measured = (
            [str(Spread(each["speed_up"]["values"])), f"{each['tokens_per_second']['median']:.0f}"]
            if "speed_up" in each
            else ["", ""]
        )
        length = results["acceptance"][each["tree"]]["accept_length"]
        rows.append([*timed_cells(each), f"{length:.2f}", f"{each['predicted_speed_up']:.2f}", *measured])
    return table(header, rows)


def timed_cells(each: dict) -> list[str]:
    return [each["tree"], f"{each['cycle_ms']:.2f}", str(Spread(each["cost"]["values"]))]


def simulated_cells(each: dict) -> list[str]:
    return ["too short" if value is None else f"{value:.2f}" for value in each["simulated_speed_up"].values()]


def notes(results: dict) -> str:
    """Skipped trees, differing texts, and the assumption behind simulated figures."""
    lines = []
    if "simulated_accept_lengths" in results:
        lines.append(
            f"simulated: accept lengths are assumed, cycle times are measured (head: {results['head']}), prefill is not counted"
        )
    if (dropped := results.get("dominated")) and not results["exhaustive"]:
        pairs = ", ".join(f"{tree} ({other})" for tree, other in dropped.items())
        lines.append(f"not timed because a smaller tree (in parentheses) accepts as much: {pairs}")
    different = [tree for tree, each in results.get("acceptance", {}).items() if each["equal"] < each["prompts"]]
    if different:
        lines.append(f"texts differ from plain decoding with {', '.join(different)}: near ties, or run jaxspec check-lossless")
    return "\n".join(lines)


def config_file(record: dict) -> str:
    """The choice as YAML for `jaxspec serve --config`: the tree of the smallest batch size that has one. If other batch sizes want
    another tree or none, the server compiles all of them and chooses while it runs (--speculative-adaptive)."""
    batches = record["results"]["batches"]
    choices = [at["choice"] for at in batches]
    lines = [f"# {record['command']}", f"# {measured_on(record)}. Give the model, the head and the dtype on the command line.", "#"]
    lines += [f"# {line}" for line in best_table(record["results"]).splitlines()]
    tree = next((each for each in choices if each != "plain"), None)
    if tree is None:
        lines += ["# Plain decoding was the fastest at every batch size.", "speculative-num-steps: 0"]
    else:
        steps, topk, nodes = tree.split("/")
        lines += [f"speculative-num-steps: {steps}", f"speculative-eagle-topk: {topk}", f"speculative-num-draft-tokens: {nodes}"]
        if set(choices) != {tree}:
            lines += ["speculative-adaptive: true"]
            trees = [each for each in dict.fromkeys(choices) if each != "plain"]
            lines += [f"speculative-adaptive-trees: {' '.join(trees)}"]
    return "\n".join([*lines, f"max-running-requests: {batches[-1]['batch']}", ""])


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
    sizes.add_argument("--start", type=whole(0), default=0, metavar="N", help="the first combination (default: %(default)s)")
    sizes.add_argument("--end", type=whole(0), metavar="N", help="the combination before which to stop (default: none)")
    sizes.add_argument("--trees", type=tree, nargs="+", metavar="S/K/D", help="these trees instead of a grid")
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
    add_ignored(parser, MEMORY, DEVICES)
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
    bench = Workbench.of(options)
    has_head = bench.models.head is not None
    if not has_head and options.simulate_accept_length:
        bench.models.head = random_head(bench.models.target)
    if bench.models.head is None:
        raise ValueError("the model has no draft head: give --draft, or --simulate-accept-length")
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    combinations = part(options.batch_size, trees, options.start, options.end)
    if not (trees := all_trees(combinations)):
        raise ValueError("--start and --end leave no combination of a batch size and a tree")
    sweep = Sweep(bench, encoded, trees, list(combinations), sampling_params(options, len(encoded)))
    for each in trees:
        sweep.timed_cycles(each)  # raises now rather than in half an hour
    print(f"{len(trees)} trees at batch {', '.join(map(str, sweep.batches))}: {' '.join(map(str, trees))}", flush=True)
    if options.simulate_accept_length:
        results = simulate(sweep, combinations, options.rounds, options.simulate_accept_length)
    else:
        results = tune(sweep, combinations, options.rounds, exhaustive=options.exhaustive)
    results |= {"head": bench.models.head.config.algorithm if has_head else "random weights"}
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
