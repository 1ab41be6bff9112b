"""Measures how much of a head's drafts is accepted: accept length and rates by depth, chains against trees with as many nodes.

Nodes are what verification costs, so trees are compared at equal node counts. Accept lengths depend on the head, the text and the
temperature, not on the machine: this benchmark takes no times. Use prompts like those the head will see. The last verification of a
prompt does not count, because --max-tokens may cut it.

Sampled prompts are also measured without an engine: what drafts of the likeliest tokens, rejection sampling and coupled drafts
would reach on the same distributions (distributions.py).

Examples:
    jaxspec bench acceptance
    jaxspec bench acceptance --trees 3/1/4 5/4/8 5/4/16 --temperature 0 0.3 0.6 0.8 1 1.2 --num-prompts 50
    jaxspec bench acceptance --model-path DIR --draft DIR --prompts mt-bench --temperature 0.8
"""

import argparse
from collections.abc import Sequence
from statistics import median

from tqdm import tqdm

from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import Pass, Workbench, count_equal, depth_acceptance, mean
from jaxspec.tree_shape import PLAIN, TreeShape

from . import record
from .distributions import STEPS, compare
from .options import (
    BenchmarkError,
    BenchmarkParser,
    add_common_options,
    add_sampling_options,
    exit_on_error,
    prompts_of,
    sampling_params,
)
from .sweep import Sweep

DEFAULT_TREES = ("3/1/4", "2/2/4", "3/2/4", "7/1/8", "3/4/8", "5/4/8", "15/1/16", "5/4/16", "5/8/32")
"""Chains, and trees with as many nodes."""


def describe(tree: TreeShape, done: Pass, plain: Pass, kinds: Sequence[str] | None = None) -> dict:
    """One tree, for JSON. `kinds`: those of the prompts."""
    complete = [each[:-1] for each in done.accept_lengths]  # --max-tokens may cut the last
    lengths = [length for several in complete for length in several]
    of_prompts = [mean(several) for several in complete if several]
    if not lengths:
        raise BenchmarkError(f"--max-tokens is too small: with {tree} every prompt took one verification")
    drafted = (tree.num_draft_tokens - 1) * len(lengths)
    return {
        "tree": str(tree),
        "nodes": tree.num_draft_tokens,
        "verifications": len(lengths),
        "accept_length": mean(lengths),
        "accepted_at_depth": [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, tree.num_steps + 1)],
        "accepted_given_parent": depth_acceptance(lengths),
        "accept_rate": sum(length - 1 for length in lengths) / drafted,
        "accept_length_of_prompts": of_prompts,
        "equal_to_plain": count_equal(done.tokens, plain.tokens),
        "prompts": len(plain.tokens),
        "kinds": mean_of_kinds(kinds, complete) if kinds else None,
    }


def mean_of_kinds(kinds: Sequence[str], accept_lengths: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean accept length of each kind of prompt."""
    of_kinds: dict[str, list[int]] = {kind: [] for kind in kinds}
    for kind, lengths in zip(kinds, accept_lengths, strict=True):
        of_kinds[kind] += lengths
    return {kind: mean(lengths) for kind, lengths in of_kinds.items()}


def tables(results: dict) -> dict[str, str]:
    """`temperatures`: accept length by tree and temperature, if there are several; `kinds T`: by kind of prompt, if they have one;
    `rules`: coupled drafts against other rules.

    Of the first temperature `nodes`: chains against trees; `depth`: how often the draft at each depth is accepted, of the best
    tree per node count.
    """
    first, *others = results["temperatures"].values()
    found = {"temperatures": by_temperature(results["temperatures"])} if others else {}
    for name, each in results["temperatures"].items():
        if each[0].get("kinds"):
            found[f"kinds {name}"] = f"Temperature {name}:\n\n{by_kind(each)}"
    if results["distributions"]:
        found["rules"] = by_rule(results["distributions"])
    rows, best = [], []
    for count in sorted({each["nodes"] for each in first}):
        group = [each for each in first if each["nodes"] == count]
        chain = next((each for each in group if each["tree"].split("/")[1] == "1"), None)
        best.append(max(group, key=lambda each: each["accept_length"]))
        rows += [row(each, chain, bold=each is best[-1] and len(group) > 1) for each in group]
    header = ["tree", "nodes", "accept length", "relative to the chain", "per prompt: min, median, max", "drafts accepted"]
    depth = max(len(each["accepted_at_depth"]) for each in best)
    by_depth = [
        [each["tree"], *(f"{rate:.0%}" for rate in each["accepted_at_depth"]), *[""] * (depth - len(each["accepted_at_depth"]))]
        for each in best
    ]
    return found | {
        "nodes": record.table(header, rows),
        "depth": record.table(["accepted at depth", *map(str, range(1, depth + 1))], by_depth),
    }


def by_temperature(temperatures: dict[str, list[dict]]) -> str:
    """Accept lengths: a row per tree, a column per temperature."""
    trees = [each["tree"] for each in next(iter(temperatures.values()))]
    lengths = {name: {each["tree"]: each["accept_length"] for each in found} for name, found in temperatures.items()}
    rows = [[tree, *(f"{found[tree]:.2f}" for found in lengths.values())] for tree in trees]
    return record.table(["accept length at temperature", *lengths], rows)


def by_kind(found: Sequence[dict]) -> str:
    """Accept lengths: a row per kind of prompt, a column per tree."""
    rows = [[kind, *(f"{each['kinds'][kind]:.2f}" for each in found)] for kind in found[0]["kinds"]]
    return record.table(["kind of prompt", *(each["tree"] for each in found)], rows)


def by_rule(distributions: dict[str, dict]) -> str:
    """Accept lengths of five levels on the same distributions, and those of coupled drafts relative to rejection sampling."""
    rows = [
        [name, children, f"{each['likeliest']:.2f}", f"{each['rejection']:.2f}", f"{each['coupled']:.2f}",
         f"{each['coupled'] / each['rejection']:.2f}", f"{found['calibration_error']:.3f}"]
        for name, found in distributions.items()
        for children, each in found["accept_length"].items()
    ]  # fmt: skip
    header = ["temperature", "children per node", "likeliest tokens", "rejection sampling", "coupled", "coupled / rejection"]
    return record.table([*header, "calibration error"], rows)


def row(each: dict, chain: dict | None, *, bold: bool) -> list[str]:
    prompts = sorted(each["accept_length_of_prompts"])
    gain = "" if chain is None else f"{each['accept_length'] / chain['accept_length']:.2f}"
    length = f"**{each['accept_length']:.2f}**" if bold else f"{each['accept_length']:.2f}"
    spread = f"{prompts[0]:.2f}, {median(prompts):.2f}, {prompts[-1]:.2f}"
    return [each["tree"], str(each["nodes"]), length, gain, spread, f"{each['accept_rate']:.0%}"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("acceptance", __doc__)
    add_common_options(parser, num_prompts=20, max_tokens=128)
    add_sampling_options(parser, several=True)
    trees = [tree(text) for text in DEFAULT_TREES]
    about = f"(default: {' '.join(DEFAULT_TREES)})"
    parser.add_argument("--trees", type=tree, nargs="+", default=trees, metavar="S/K/D", help=about)
    parser.add_argument("--batch-size", type=whole(1), default=8, help="requests at once; changes only the run time")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    prompts = prompts_of(options)
    bench = Workbench.of(options)
    if bench.models.head is None:
        raise ValueError("this benchmark measures a draft head, and the model has none: give --draft")
    trees = [each for each in dict.fromkeys(options.trees) if each != PLAIN]
    if not trees:
        raise ValueError("plain decoding drafts nothing: give at least one tree that drafts in --trees")
    if max(options.temperature) > 0 and options.max_tokens <= STEPS:
        raise ValueError(f"--max-tokens must be above {STEPS} to compare rules of acceptance, got {options.max_tokens}")
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    sweep = Sweep(bench, encoded, trees, [options.batch_size], sampling_params(options, len(encoded), 0.0), ngram=False, row_cost=0)
    sweep.compile(trees, sweep.batches)
    temperatures, distributions = {}, {}
    for temperature in tqdm(dict.fromkeys(options.temperature), desc="accept lengths", unit="temperature"):
        sweep.params = sampling_params(options, len(encoded), temperature)
        plain = sweep.accept(PLAIN)
        temperatures[f"{temperature:g}"] = [describe(tree, sweep.accept(tree), plain, prompts.kinds) for tree in trees]
        if temperature > 0:
            texts = list(zip(encoded, plain.tokens, strict=True))
            distributions[f"{temperature:g}"] = compare(bench.models, texts, temperature, sweep.calibration)
    results = {"head": bench.models.head.config.algorithm, "temperatures": temperatures, "distributions": distributions}
    record.write("acceptance", options, prompts, results)
    print("\n" + "\n\n".join(tables(results).values()) + "\n", flush=True)
    for name, found in temperatures.items():
        if different := [each["tree"] for each in found if each["equal_to_plain"] < each["prompts"]]:
            how = "near ties, or run jaxspec check-lossless"
            print(f"at temperature {name} texts differ from plain decoding with {', '.join(different)}: {how}")
    return 0


if __name__ == "__main__":
    exit_on_error("acceptance", main)
