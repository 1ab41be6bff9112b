"""jaxspec check-draft: runs prompts with and without a draft head, to see whether it is right for the model."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxspec.checks import short
from jaxspec.commands.common import add_prompt_options, in_flags, listing, load_prompts, run_guarded, table
from jaxspec.commands.options import ENGINE, Parser, add_model_options, add_tree_options, chosen_tree
from jaxspec.defaults import NGRAM
from jaxspec.sampling_params import SamplingParams
from jaxspec.tree_shape import PLAIN

if TYPE_CHECKING:
    from jaxspec.commands.workbench import Pass

NUM_PROMPTS, MAX_TOKENS = 20, 128
USELESS = 1.1
"""Mean accept length below which a head is useless; 1.0 is plain decoding."""
RARE = 0.05
"""Levels accepted in a smaller share of the verifications are not worth drafting."""
BAR = 40
"""Length of a full bar, in characters."""
EPILOG = """The exit status is 0, or 1 if the mean accept length is below --min-accept-length.
Prompts should resemble the head's training data: for a chat model give --chat, and --prompts of your own.
Speeds are of one pass each; `jaxspec bench speculative` measures with more care."""


@dataclass(frozen=True)
class Report:
    model: str
    head: str
    """Where the drafts come from: LoadedModels.algorithm."""
    tree: str
    temperature: float
    prompts: dict[str, Any]
    """Source, number and hash of the prompts."""
    tokens: int
    verifications: int
    accept_length: float
    """Mean tokens per verification, bonus included."""
    accepted_at_depth: list[float]
    """Share of verifications that accepted a draft at depth 1, 2, ..."""
    accepted_given_parent: list[float]
    """The same, among verifications that accepted a draft at the depth before."""
    histogram: dict[int, int]
    """Number of verifications, by tokens per verification."""
    accept_length_of_prompts: list[float]
    worst_prompt: str
    """The beginning of the prompt with the lowest accept length."""
    sharpness: float | None
    """The factor on the logits of likely tokens, learnt by sampled drafts; 1: the head is as sure as the target. None: greedy
    decoding, or n-grams draft too."""
    tokens_per_second: float
    plain_tokens_per_second: float
    prompts_equal_to_plain: int

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True)
class Verdict:
    """Whether the head passes, why, and further remarks."""

    passed: bool
    reason: str
    notes: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if too few drafts are accepted, 2 if the head can't be loaded or does not fit."""
    parser = Parser("jaxspec check-draft", "Check whether a draft head fits a model and speeds it up on this machine.", EPILOG)
    add_model_options(parser, *ENGINE)
    add_tree_options(parser)
    add_prompt_options(parser, num_prompts=NUM_PROMPTS, max_tokens=MAX_TOKENS)
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy; sampled runs are seeded")
    least = "fail below this accept length (default: %(default)s)"
    add("--min-accept-length", type=float, default=USELESS, metavar="X", help=least)
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if isnan(options.min_accept_length):  # nothing is below it
        parser.error("--min-accept-length must be a number, got nan")

    def run() -> int:
        report = check(options)
        verdict = judge(report, options.min_accept_length)
        print(json.dumps(asdict(report) | {"verdict": asdict(verdict)}, indent=1) if options.json else show(report, verdict))
        return 0 if verdict.passed else 1

    return run_guarded(parser.prog, run, in_flags)


def check(options: argparse.Namespace) -> Report:
    """Runs the prompts without and with the head, one at a time, after an untimed pass of each that compiles.

    Raises ValueError if there are no drafts, or if head, model and prompts do not fit.
    """
    tree = chosen_tree(options)
    if tree == PLAIN:
        raise ValueError("--tree plain drafts nothing: give another tree, or leave it out")

    from jaxspec.commands.workbench import Workbench, count_equal, depth_acceptance, run

    prompts = load_prompts(options.prompts, options.num_prompts, NUM_PROMPTS)
    bench = Workbench.of(options, tree=tree, adaptive=False)  # else a CPU may choose plain decoding
    bench.check_drafts()
    tree = bench.models.tree
    prompts = bench.ask(prompts, options.max_tokens)
    encoded = bench.encode(prompts.prompts, chat=options.chat)
    context = bench.context_for(encoded, options.max_tokens)
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=seed, ignore_eos=True)
        for seed in range(len(encoded))
    ]
    passes: list[Pass] = []
    with tqdm(total=4, desc="running the prompts", unit="pass") as bar:
        for each in (PLAIN, tree):
            engine = bench.engine(each, 1, context, row_cost=0)  # all drafts are verified, as on a GPU
            for _ in range(2):
                bar.set_postfix_str(each.name)
                passes.append(run(engine, encoded, params))
                bar.update()
    _, plain, _, speculative = passes
    lengths, own = speculative.verifications, [output.speculation.accept_length for output in speculative.outputs]
    reached = [sum(length > depth for length in lengths) / max(1, len(lengths)) for depth in range(1, tree.num_steps + 1)]
    sharpness = None
    if options.temperature and not bench.models.config.ngram:
        _, of_likely, of_noise = engine.runner.state.draft.calibration.weights.tolist()
        sharpness = round(of_likely / of_noise, 3)
    return Report(
        model=bench.models.name,
        head=bench.models.algorithm,
        tree=str(tree),
        temperature=options.temperature,
        prompts=prompts.describe() | {"chat": options.chat},
        tokens=sum(map(len, speculative.tokens)),
        verifications=len(lengths),
        accept_length=speculative.accept_length,
        accepted_at_depth=[round(share, 4) for share in reached],
        accepted_given_parent=depth_acceptance(lengths),
        histogram={length: lengths.count(length) for length in range(1, tree.num_steps + 2)},
        accept_length_of_prompts=[round(length, 3) for length in own],
        worst_prompt=short(prompts.prompts[own.index(min(own))]),
        sharpness=sharpness,
        tokens_per_second=speculative.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
        prompts_equal_to_plain=count_equal(plain.tokens, speculative.tokens),
    )


def judge(report: Report, least: float) -> Verdict:
    reason = f"accept length {report.accept_length:.2f}, {report.speed_up:.2f} times the speed of plain decoding"
    if report.accept_length < USELESS and report.head == NGRAM:
        reason = f"accept length {report.accept_length:.2f}: these texts hardly repeat, so drafts from them are useless"
    elif report.accept_length < USELESS:
        reason = (
            f"accept length {report.accept_length:.2f}: the head is useless. Is it for another model, does it read other layers "
            "(see `jaxspec convert --inspect`), or do the prompts need --chat?"
        )
    elif report.accept_length < least:
        reason = f"accept length {report.accept_length:.2f} is below {least:g}"
    notes = []
    if different := len(report.accept_length_of_prompts) - report.prompts_equal_to_plain:
        notes.append(f"{different} texts differ from plain decoding: `jaxspec check-lossless` shows where and by how much")
    if report.speed_up < 1:
        notes.append(f"slower than plain decoding here, {report.speed_up:.2f} times: try a smaller --tree, such as 3/1/4")
    useful = sum(share >= RARE for share in report.accepted_at_depth)
    if 0 < useful < len(report.accepted_at_depth) and report.accept_length >= USELESS:
        notes.append(f"below depth {useful}, less than {RARE:.0%} of verifications accept a draft: use fewer steps")
    return Verdict(report.accept_length >= least, reason, notes)


def show(report: Report, verdict: Verdict) -> str:
    own, total = report.accept_length_of_prompts, max(1, report.verifications)
    sampling = f"temperature {report.temperature:g}" if report.temperature else "greedy"
    deepest = len(report.accepted_at_depth) + 1
    facts = {
        "model": f"{report.model}, {report.head} drafts, tree {report.tree}, {sampling}, one request at a time",
        "prompts": f"{len(own)} ({report.prompts['source']}), {report.tokens} tokens in {report.verifications} verifications",
        "accept length": f"{report.accept_length:.2f} tokens per verification, bonus included (plain: 1, at most: {deepest})",
        "per prompt": f"{min(own):.2f} to {max(own):.2f}, median {median(own):.2f}; lowest for {report.worst_prompt}",
        "speed": f"{report.tokens_per_second:.0f} tokens/s, {report.plain_tokens_per_second:.0f} without speculation: "
        f"{report.speed_up:.2f} times",
        "same text": f"{report.prompts_equal_to_plain} of {len(own)} prompts, compared with plain decoding",
    }
    given = [*report.accepted_given_parent, *[0.0] * len(report.accepted_at_depth)]
    if report.sharpness is not None:
        facts["sharpness"] = (
            f"{report.sharpness:.2f}: the learnt factor on the head's logits of likely tokens; 1: as sure as the target"
        )
    depths = [
        [str(depth), f"{share:.0%}", f"{conditional:.0%}"]
        for depth, (share, conditional) in enumerate(zip(report.accepted_at_depth, given, strict=False), 1)
    ]
    bars = {f"{length}": f"{count / total:4.0%} {'#' * round(BAR * count / total)}" for length, count in report.histogram.items()}
    outcome = "passed" if verdict.passed else "FAILED"
    return "\n\n".join(
        [
            listing(facts),
            table(["depth", "accepted", "given parent"], depths),
            f"tokens per verification\n{listing(bars)}",
            "\n".join([f"{outcome}: {verdict.reason}", *(f"  note: {note}" for note in verdict.notes)]),
        ]
    )
