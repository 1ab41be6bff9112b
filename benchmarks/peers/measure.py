"""Everybody in turn, round by round; and ratios of the rounds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tqdm import tqdm

from jaxspec import SamplingParams
from jaxspec.commands.workbench import CompilationCounter, Workbench, count_equal, run
from jaxspec.config import PLAIN, SpecConfig

from ..load import alternate, check_nothing_compiled
from ..record import Spread, shares
from .process import NotRun, Peer, Timed

OURS = "jaxspec"
TRANSFORMERS = "transformers"


class Contender(NamedTuple):
    """One engine with or without speculation."""

    engine: str
    mode: str
    """"" for a peer's plain decoding."""
    way: str
    """Which of the engine's ways to do this it is; the fastest."""
    generate: Callable[[Sequence[Sequence[int]]], Timed]
    """Some prompts, once, one after the other."""

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.mode}" if self.mode and self.engine != OURS else f"{self.engine} {self.mode}".rstrip()


class Measured(NamedTuple):
    """What came out."""

    rounds: dict[str, list[Timed]]
    """Of every contender that ran, by name, in the order of the contenders."""
    not_run: dict[str, str]
    """Why, by name."""


def ours(bench: Workbench, spec: SpecConfig, max_tokens: int) -> Contender:
    """Our engine with this tree; it compiles on its first pass."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine = bench.engine(spec, 1)

    def generate(prompts: Sequence[Sequence[int]]) -> Timed:
        result = run(engine, prompts, [params] * len(prompts))
        return result.seconds, [list(tokens) for tokens in result.tokens]

    return Contender(OURS, "plain" if spec == PLAIN else str(spec), "", generate)


def theirs(peer: Peer, mode: str, way: str, max_tokens: int) -> Contender:
    """A peer in one of its modes."""
    name = "" if mode == "plain" else mode
    return Contender(peer.kind.name, name, way, lambda prompts: peer.generate(mode, way, prompts, max_tokens))


def measure(everybody: Sequence[Contender], prompts: Sequence[Sequence[int]], rounds: int) -> Measured:
    """Results of every contender, round by round, after an untimed one. Everybody runs a prompt before anybody runs the next: a
    machine that changes its speed does it to all. Whoever fails is out; the others go on."""
    running = {each.name: each for each in everybody}
    not_run: dict[str, str] = {}

    def attempt(name: str, prompt: Sequence[int]) -> Timed | None:
        if name not in running:
            return None
        try:
            return running[name].generate([prompt])
        except NotRun as error:
            del running[name]
            not_run[name] = str(error)
            return None

    def run_round() -> dict[str, Timed]:
        runs: dict[str, list[Timed]] = {name: [] for name in running}
        for number, name in alternate(list(running), len(prompts)):
            bar.set_postfix_str(name)
            if timed := attempt(name, prompts[number]):
                runs[name].append(timed)
            bar.update()
        return {name: joined(runs[name]) for name in running}

    with tqdm(total=len(running) * len(prompts), desc="untimed round", unit="run") as bar:
        run_round()
    counter = CompilationCounter()
    with tqdm(total=rounds * len(running) * len(prompts), desc="timed", unit="run") as bar:
        done = [run_round() for _ in range(rounds)]
    check_nothing_compiled(counter, before=0)
    return Measured({name: [each[name] for each in done] for name in running}, not_run)


def joined(runs: Sequence[Timed]) -> Timed:
    """Runs of one prompt each as one."""
    return sum(seconds for seconds, _ in runs), [tokens for _, several in runs for tokens in several]


def summarize(everybody: Sequence[Contender], measured: Measured, max_tokens: int) -> dict:
    """For JSON: speeds, and ratios to the baseline, round by round: transformers' generate, or, without it, our plain decoding.

    The first contender is our plain decoding, which everybody's tokens are compared with.
    """
    rounds = measured.rounds
    reference = everybody[0].name
    baseline = TRANSFORMERS if TRANSFORMERS in rounds else reference
    return {
        "reference": reference,
        "baseline": baseline,
        "baseline_is_transformers": baseline == TRANSFORMERS,
        "contenders": [
            describe(each, rounds[each.name], rounds[reference], rounds[baseline], max_tokens)
            for each in everybody
            if each.name in rounds
        ],
    }


def describe(
    contender: Contender, rounds: Sequence[Timed], reference: Sequence[Timed], baseline: Sequence[Timed], max_tokens: int
) -> dict:
    """One contender. Its tokens are those of its worst round."""
    expected = reference[0][1]
    worst = min((tokens for _, tokens in rounds), key=lambda tokens: count_equal(tokens, expected))
    return {
        "name": contender.name,
        "engine": contender.engine,
        "mode": contender.mode,
        "way": contender.way,
        "seconds": [seconds for seconds, _ in rounds],
        "tokens_per_second": Spread([sum(map(len, tokens)) / seconds for seconds, tokens in rounds]).describe(),
        "ratio_to_baseline": Spread(shares([each[0] for each in baseline], [each[0] for each in rounds])).describe(),
        "equal_to_reference": count_equal(worst, expected),
        "prompts": len(worst),
        "tokens": sum(map(len, worst)),
        "tokens_asked": max_tokens * len(worst),
    }
