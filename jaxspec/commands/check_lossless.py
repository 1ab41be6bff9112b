"""jaxspec check-lossless: compares draft trees, alone and in batches, with plain decoding at batch 1, token for token.

Sampled requests have fixed seeds, and their noise depends on seed, position and token only: their text must be the same with any
tree.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from jaxspec.commands.common import add_prompt_options, in_flags, load_prompts, run_guarded, table
from jaxspec.commands.options import ENGINE, Parser, add_model_options, tree, whole
from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.tree_shape import PLAIN, TreeShape

if TYPE_CHECKING:
    from jaxspec.commands.workbench import Pass, Workbench
    from jaxspec.engine.request import GenerationOutput
    from jaxspec.text.detokenizer import Decoder

NUM_PROMPTS, MAX_TOKENS = 20, 64
SHOWN_TOKENS = 3
"""Tokens shown of each side of a difference."""
SHOWN_CONTEXT = 12
"""Tokens shown before a difference."""
SHOWN_DIFFERENCES = 5
"""Differences shown per tree, batch size and way of sampling."""
TIE = 0.02
"""Gap between two log probabilities that 16-bit rounding may close."""


@dataclass(frozen=True)
class Difference:
    """The first place where two runs of one prompt differ."""

    prompt: int
    position: int
    """Among the generated tokens, from 0."""
    expected: list[int]
    """The next tokens of plain decoding."""
    found: list[int]
    context: str = ""
    """The text before it and both continuations, if the model has a tokenizer."""
    gap: float | None = None
    """By how much plain decoding prefers its token, in log probability. None: sampled, or not among the most likely tokens."""

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, generated token {self.position}: plain {self.expected}, speculative {self.found}"
        if self.gap is not None:
            where += f"; plain decoding prefers its token by {self.gap:.2g}" + (", a near tie" if self.gap < TIE else "")
        return where + (f"\n    {self.context}" if self.context else "")


@dataclass(frozen=True)
class Comparison:
    """One tree, batch size and way of sampling, compared with plain decoding at batch 1."""

    tree: str
    batch: int
    sampling: str
    equal: int
    total: int
    accept_length: float
    differences: list[Difference]
    """The first of them."""


def differences(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[Difference]:
    """One Difference per prompt whose tokens differ.

    In: [[5, 6, 7]], [[5, 9, 7]]  Out: prompt 0, position 1, expected [6, 7], found [9, 7]
    """
    parted = []
    for prompt, (one, other) in enumerate(zip(expected, found, strict=True)):
        if tuple(one) != tuple(other):
            pairs = enumerate(zip(one, other, strict=False))
            at = next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))
            parted.append(Difference(prompt, at, list(one[at : at + SHOWN_TOKENS]), list(other[at : at + SHOWN_TOKENS])))
    return parted


def ways_of_sampling(count: int, max_tokens: int, temperature: float, seed: int) -> dict[str, list[SamplingParams]]:
    """For greedy and sampled decoding, the parameters of every prompt; prompt i has the seed `seed` + i."""
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return {
        "greedy": [greedy] * count,
        f"temperature {temperature:g}": [replace(greedy, temperature=temperature, seed=seed + index) for index in range(count)],
    }


def compare_all(
    bench: "Workbench",
    prompts: Sequence[Sequence[int]],
    trees: Sequence[TreeShape],
    batches: Sequence[int],
    ways: Mapping[str, Sequence[SamplingParams]],
    context_length: int | None = None,
) -> list[Comparison]:
    """Every tree and plain decoding, at every batch size, in every way of sampling."""
    from jaxspec.commands.workbench import count_equal, run

    comparisons = []
    settings = [(shape, batch) for batch in batches for shape in (PLAIN, *trees) if (shape, batch) != (PLAIN, 1)]
    with tqdm(total=(len(settings) + 1) * len(ways), desc="comparing", unit="run") as bar:
        bar.set_postfix_str("plain, batch 1")
        reference = bench.engine(PLAIN, 1, context_length)
        expected: dict[str, Pass] = {}
        for sampling, params in ways.items():
            likeliest = [replace(each, logprobs=None if each.temperature else MAX_LOGPROBS) for each in params]
            expected[sampling] = run(reference, prompts, likeliest)
            bar.update()
        for shape, batch in settings:
            engine = bench.engine(shape, batch, context_length)
            for sampling, params in ways.items():
                bar.set_postfix_str(f"{shape.name}, batch {batch}, {sampling}")
                found, right = run(engine, prompts, params), expected[sampling]
                parted = [
                    explain(each, right.outputs[each.prompt], reference.tokenizer)
                    for each in differences(right.tokens, found.tokens)[:SHOWN_DIFFERENCES]
                ]
                equal = count_equal(right.tokens, found.tokens)
                comparisons.append(Comparison(shape.name, batch, sampling, equal, len(prompts), found.accept_length, parted))
                bar.update()
    return comparisons


def explain(difference: Difference, right: "GenerationOutput", tokenizer: "Decoder | None") -> Difference:
    """The difference with the text around it and, where plain decoding has log probabilities, the gap between both tokens."""
    if right.logprobs and difference.expected and difference.found:
        top, one, other = dict(right.logprobs[difference.position].top), difference.expected[0], difference.found[0]
        difference = replace(difference, gap=top[one] - top[other] if one in top and other in top else None)
    if tokenizer is None:
        return difference
    before = [*right.prompt_token_ids, *right.token_ids[: difference.position]]
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=False)
        for tokens in (before[-SHOWN_CONTEXT:], difference.expected, difference.found)
    ]
    return replace(difference, context="after {!r}: plain {!r}, speculative {!r}".format(*texts))


def show(comparisons: Sequence[Comparison]) -> str:
    """A table, then the differences if there are any."""
    rows = [
        [each.tree, str(each.batch), each.sampling, f"{each.equal}/{each.total}", f"{each.accept_length:.2f}"]
        for each in comparisons
    ]
    lines = [table(["tree", "batch", "sampling", "equal to plain", "accept length"], rows)]
    for each in comparisons:
        lines += [f"{each.tree} at batch {each.batch}, {each.sampling}: {difference}" for difference in each.differences]
        if (more := each.total - each.equal - len(each.differences)) > 0:
            lines.append(f"{each.tree} at batch {each.batch}, {each.sampling}: and {more} more")
    return "\n".join(lines)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """One line."""
    equal, total = sum(each.equal for each in comparisons), sum(each.total for each in comparisons)
    if equal == total:
        return f"lossless: all {total} outputs equal plain decoding, token for token"
    gaps = [difference.gap for each in comparisons for difference in each.differences]
    are_ties = len(gaps) == total - equal and all(gap is not None and gap < TIE for gap in gaps)
    ties = ": near ties, which rounding can decide" if are_ties else ""
    return f"NOT EQUAL: {total - equal} of {total} outputs differ from plain decoding{ties}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if an output differs, 2 if model or head can't be loaded."""
    description = "Compare speculation with plain decoding of single requests, token for token, greedy and sampled with seeds."
    parser = Parser("jaxspec check-lossless", description, "The exit status is 1 if any output differs.")
    add_model_options(parser, *ENGINE)
    add = parser.add_argument_group("what is compared").add_argument
    add("--trees", type=tree, nargs="+", metavar="S/K/D", help="draft trees (default: the one that jaxspec serve uses)")
    add("--batch", type=whole(1), nargs="+", default=[1, 4], metavar="N", help="batch sizes (default: 1 4)")
    add("--temperature", type=float, default=0.8, metavar="T", help="temperature of the sampled runs (default: %(default)s)")
    add("--seed", type=int, default=1000, metavar="N", help="seed of the first sampled prompt (default: %(default)s)")
    add_prompt_options(parser, num_prompts=NUM_PROMPTS, max_tokens=MAX_TOKENS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    def run() -> int:
        comparisons = check(options)
        if options.json:
            print(json.dumps({"verdict": verdict(comparisons), "comparisons": [asdict(each) for each in comparisons]}, indent=1))
        else:
            print(f"{show(comparisons)}\n\n{verdict(comparisons)}")
        return 0 if all(each.equal == each.total for each in comparisons) else 1

    return run_guarded(parser.prog, run, in_flags)


def check(options: argparse.Namespace) -> list[Comparison]:
    """Loads and compares. Raises ValueError if there are no drafts, or if head, model and prompts do not fit."""
    from jaxspec.commands.workbench import Workbench

    trees = [each for each in dict.fromkeys(options.trees or ()) if each != PLAIN]
    if options.trees and not trees:
        raise ValueError("--trees plain drafts nothing: give a tree that drafts, or leave --trees out")
    prompts = load_prompts(options.prompts, options.num_prompts, NUM_PROMPTS)
    bench = Workbench.of(options, adaptive=False)  # else a CPU may choose plain decoding, which would be compared with itself
    bench.check_drafts()
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    ways = ways_of_sampling(len(encoded), options.max_tokens, options.temperature, options.seed)
    context = bench.context_for(encoded, options.max_tokens)
    return compare_all(bench, encoded, trees or [bench.models.tree], options.batch, ways, context)
