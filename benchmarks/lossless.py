"""Speculation changes no token: plain decoding at batch 1 against every tree, alone and in mixed batches, greedy and sampled.

Sampled requests have a fixed seed each, and the noise depends on seed, position and token only, so their text must be the
same with any tree. Exits with 1 and says where the first difference is if any output differs.

Example:
    python -m benchmarks.lossless --num-prompts 50 --trees 5/4/8 3/1/4 --batch 1 8
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import PLAIN, Pass, Workbench, count_equal, exit_on_error, run, tree
from benchmarks.prompts import load_prompts
from jaxspec import SamplingParams, SpecConfig

DEFAULT_TREES = ("5/4/8", "5/4/16", "3/1/4", "5/8/32")


@dataclass(frozen=True)
class Difference:
    """The first place where two runs of one prompt part."""

    prompt: int
    position: int
    """Among the generated tokens, from 0."""
    expected: list[int]
    """Plain decoding's tokens from there on, at most three."""
    found: list[int]

    def __str__(self) -> str:
        return f"prompt {self.prompt}, generated token {self.position}: plain {self.expected}, speculative {self.found}"


@dataclass(frozen=True)
class Comparison:
    """One tree at one batch size, sampled in one way, against plain decoding at batch 1."""

    tree: str
    batch: int
    sampling: str
    equal: int
    total: int
    accept_length: float
    first_difference: Difference | None


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Difference | None:
    """Of the first prompt that differs; None if all are equal.

    In: [[5, 6, 7]], [[5, 9, 7]]  Out: prompt 0, position 1, expected [6, 7], found [9, 7]
    """
    for prompt, (one, other) in enumerate(zip(expected, found, strict=True)):
        if tuple(one) != tuple(other):
            pairs = enumerate(zip(one, other, strict=False))
            at = next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))
            return Difference(prompt, at, list(one[at : at + 3]), list(other[at : at + 3]))
    return None


def compare(spec: SpecConfig, batch: int, sampling: str, expected: Pass, found: Pass) -> Comparison:
    """How many outputs are plain decoding's, token for token."""
    lengths = found.accept_lengths
    return Comparison(
        tree=str(spec) if spec.num_steps else "plain",
        batch=batch,
        sampling=sampling,
        equal=count_equal(expected.tokens, found.tokens),
        total=len(expected.outputs),
        accept_length=sum(lengths) / len(lengths) if lengths else 0.0,
        first_difference=first_difference(expected.tokens, found.tokens),
    )


def sampling_params(options: argparse.Namespace) -> dict[str, list[SamplingParams]]:
    """Per way of sampling, the parameters of every prompt; prompt i has the seed --seed + i."""
    common = dict(max_tokens=options.max_tokens, ignore_eos=True)
    seeds = range(options.seed, options.seed + options.num_prompts)
    return {
        "greedy": [SamplingParams(temperature=0.0, **common) for _ in seeds],
        f"temperature {options.temperature}": [
            SamplingParams(temperature=options.temperature, seed=seed, **common) for seed in seeds
        ],
    }


def compare_all(bench: Workbench, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[Comparison]:
    """Every tree and plain decoding, at every batch size, in both ways of sampling."""
    ways, comparisons = sampling_params(options), []
    settings = [(spec, batch) for batch in options.batch for spec in (PLAIN, *options.trees) if (spec, batch) != (PLAIN, 1)]
    with tqdm(total=(len(settings) + 1) * len(ways), desc="comparing", unit="run") as bar:
        bar.set_postfix_str("plain, batch 1")
        engine, expected = bench.engine(PLAIN, 1), {}
        for sampling, params in ways.items():
            expected[sampling] = run(engine, prompts, params)
            bar.update()
        for spec, batch in settings:
            engine = bench.engine(spec, batch)
            for sampling, params in ways.items():
                bar.set_postfix_str(f"{spec}, batch {batch}, {sampling}")
                comparisons.append(compare(spec, batch, sampling, expected[sampling], run(engine, prompts, params)))
                bar.update()
    return comparisons


def show(comparisons: Sequence[Comparison]) -> str:
    """A table, then the first differences if there are any."""
    rows = [
        [each.tree, str(each.batch), each.sampling, f"{each.equal}/{each.total}", f"{each.accept_length:.2f}"]
        for each in comparisons
    ]
    lines = [record.table(["tree", "batch", "sampling", "equal to plain", "accept length"], rows)]
    for each in comparisons:
        if each.first_difference:
            lines.append(f"{each.tree} at batch {each.batch}, {each.sampling}: {each.first_difference}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.common_arguments(parser, out="lossless.json", num_prompts=50)
    trees = [tree(text) for text in DEFAULT_TREES]
    parser.add_argument(
        "--trees", type=tree, nargs="+", default=trees, metavar="S/K/N",
        help=f"num_steps/topk/num_draft_tokens (default: {' '.join(DEFAULT_TREES)})",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests that run together, at most (default: 1 8)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="of the first prompt's sampled run (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every output equals plain decoding's, else 1."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts)
    bench = Workbench(options.model, options.draft)
    comparisons = compare_all(bench, bench.encode(prompts.prompts), options)
    print(show(comparisons), flush=True)
    record.write("lossless", options, prompts, [asdict(each) for each in comparisons])
    return 0 if all(each.equal == each.total for each in comparisons) else 1


if __name__ == "__main__":
    exit_on_error(main)
