"""Engines that share one model's weights, one per draft tree, and a pass of prompts through one of them."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax

from jaxspec import LLM, SamplingParams, SpecConfig
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput

PLAIN = SpecConfig(num_steps=0)


class BenchmarkError(Exception):
    """A benchmark can't give figures; the message says why and what to do."""


def tree(text: str) -> SpecConfig:
    """The SpecConfig that "steps/topk/nodes" names.

    In: "5/4/8"  Out: SpecConfig(num_steps=5, topk=4, num_draft_tokens=8)
    """
    try:
        steps, topk, nodes = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a tree is num_steps/topk/num_draft_tokens, as in 5/4/8; got {text!r}") from None
    try:
        return SpecConfig(steps, topk, nodes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Workbench:
    """One model, loaded once; engines for any tree and batch size on the same weights. Plain engines hold no head."""

    def __init__(self, model: Path | None, draft: Path | None):
        self.llm = LLM(model, draft, progress=True, max_running_requests=1)

    def engine(self, spec: SpecConfig, batch: int) -> Engine:
        """A new engine that runs up to `batch` requests together; it compiles what it needs on its first pass."""
        if spec.num_steps and self.llm.head is None:
            raise ValueError("trees need a draft head: give --draft")
        head = self.llm.head if spec.num_steps else None
        return Engine(self.llm.target, head, self.llm.tokenizer, spec, EngineConfig(max_running_requests=batch))

    def encode(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Token ids of the prompts."""
        return [self.llm.encode(prompt) for prompt in prompts]


@dataclass(frozen=True)
class Pass:
    """All prompts through one engine, once."""

    outputs: list[GenerationOutput]
    seconds: float
    """Wall time from the first prompt queued to the last token, prefills included."""
    decode_seconds: float
    """Summed over the requests: from a request's first token to its last."""

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.token_ids for output in self.outputs]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Per request and without prefill: what one user sees."""
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.decode_seconds

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens of every verification of every request."""
        return [length for output in self.outputs for length in output.speculation.accept_lengths]


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Pass:
    """Queues every prompt and steps the engine until all are done."""
    started = time.perf_counter()
    order = [engine.add(prompt, each).id for prompt, each in zip(prompts, params, strict=True)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    outputs: dict[str, GenerationOutput] = {}
    while engine.has_work:
        for update in engine.step():
            last[update.request_id] = time.perf_counter()
            first.setdefault(update.request_id, last[update.request_id])
            if update.output:
                outputs[update.request_id] = update.output
    decoding = sum(last[request] - first[request] for request in order)
    return Pass([outputs[request] for request in order], max(last.values()) - started, decoding)


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    values: list[float]

    def __str__(self) -> str:
        return f"{median(self.values):.2f} ({min(self.values):.2f}..{max(self.values):.2f})"

    def describe(self) -> dict:
        """For JSON."""
        return {"median": median(self.values), "min": min(self.values), "max": max(self.values), "values": self.values}


def depth_acceptance(accept_lengths: Sequence[int]) -> list[float]:
    """How often a draft at depth 1, 2, ... was accepted, given that all before it were.

    In: [1, 3, 3, 2]  Out: [0.75, 0.667] (three of four verifications took a first draft, two of those three a second)
    """
    reached = [sum(length >= depth for length in accept_lengths) for depth in range(1, max(accept_lengths, default=0) + 1)]
    return [round(deeper / before, 3) for before, deeper in itertools.pairwise(reached)]


class CompilationCounter:
    """Counts what JAX compiles in this process, loads from the persistent cache included."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == self.EVENT

    def check(self, before: int) -> None:
        """Raises BenchmarkError if anything was compiled since the count was `before`."""
        if self.count != before:
            raise BenchmarkError(f"{self.count - before} programs were compiled while time was taken, so the figures are worthless")


def alternate(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Every name once per round, in turned order every other round, so that a drift of the machine hits all alike.

    In: ["a", "b"], 2  Out: (0, a), (0, b), (1, b), (1, a)
    """
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


def count_equal(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> int:
    """Prompts whose tokens are the same in both."""
    return sum(list(one) == list(other) for one, other in zip(first, second, strict=True))


def exit_on_error(main: Callable[[], int]) -> None:
    """Runs a command; what the user can fix ends it with a message and status 2, not with a traceback."""
    try:
        raise SystemExit(main())
    except (ValueError, OSError, BenchmarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
