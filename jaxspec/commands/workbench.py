"""For checks and benchmarks: a model loaded once, engines that share its weights, and passes of prompts through them."""

import itertools
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxspec.commands.common import Chat, PromptSet, Turns, load_arguments
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.load import load_models, with_row_cost
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.prompts import Prompt, encode
from jaxspec.tree_shape import PLAIN, TreeShape

ASKED_TOGETHER = 8
"""Conversations held at the same time."""
ROUNDED_TO = 256
"""Context lengths are powers of two from here on, so that different prompts share compiled programs."""


class Workbench:
    """A loaded model, without an engine. `options` are those of LLM."""

    def __init__(self, model: Path | None, draft: Path | None, **options):
        self.models = load_models(model, draft, **{"progress": True, "max_running_requests": 1, **options})

    @classmethod
    def of(cls, given: Namespace, **options) -> "Workbench":
        """From the options of `add_model_options`, and those of the engine that the command has."""
        return cls(**load_arguments(given), **options)

    def check_drafts(self) -> None:
        """Raises ValueError if the model has neither a head nor n-grams."""
        if self.models.head is None and not self.models.config.ngram:
            raise ValueError(f"{self.models.name} comes without a draft head: give --draft, or --draft ngram")

    def engine(self, tree: TreeShape, batch: int, context_length: int | None = None, *, head: bool = True, **more: Any) -> Engine:
        """A new engine for up to `batch` requests, which drafts with the head, n-grams, or both, depending on how the model was
        loaded; a plain one with neither. It compiles in its first pass. `more`: fields of EngineConfig."""
        loaded, source = self.models.config, self.models.head if tree.num_steps and head else None
        kept: dict[str, Any] = {name: vars(loaded)[name] for name in ("tp_size", "kv_cache_dtype", "row_cost")}
        kept |= {"ngram": loaded.ngram and tree != PLAIN, **more}
        config = EngineConfig(max_running_requests=batch, context_length=context_length, **kept)
        if tree.num_steps and source is None and not config.ngram:
            raise ValueError("a draft tree needs a draft head: give --draft")
        return Engine(self.models.target, source, self.models.tokenizer, tree, with_row_cost(config, self.models.target))

    def ask(self, prompts: PromptSet, max_tokens: int) -> PromptSet:
        """The prompts, each Turns replaced by one conversation per question, up to that question. The answers in between are the
        model's own: plain greedy decoding writes them, up to `max_tokens` each, before anything is measured."""
        turns = {at: each.questions for at, each in enumerate(prompts.prompts) if isinstance(each, Turns)}
        if not turns:
            return prompts
        held = {at: [Chat([{"role": "user", "content": questions[0]}])] for at, questions in turns.items()}
        while asking := [at for at, questions in turns.items() if len(held[at]) < len(questions)]:
            answers = self._answers([held[at][-1] for at in asking], max_tokens)
            for at, answer in zip(asking, answers, strict=True):
                held[at].append(held[at][-1].then(answer, turns[at][len(held[at])]))
        each_turn = [held.get(at, [each]) for at, each in enumerate(prompts.prompts)]
        kinds = prompts.kinds and [kind for kind, each in zip(prompts.kinds, each_turn, strict=True) for _ in each]
        return replace(prompts, prompts=list(itertools.chain(*each_turn)), kinds=kinds)

    def _answers(self, chats: Sequence[Chat], max_tokens: int) -> list[str]:
        encoded, params = self.encode(chats), SamplingParams(max_tokens=max_tokens, temperature=0)
        engine = self.engine(PLAIN, min(len(chats), ASKED_TOGETHER), self.context_for(encoded, max_tokens))
        return [output.text for output in run(engine, encoded, [params] * len(chats)).outputs]

    def encode(self, prompts: Sequence[Prompt | Chat | Turns], *, chat: bool = False) -> list[list[int]]:
        """Token ids of the prompts. The chat template renders conversations and, with `chat`, texts, as user messages. Turns
        must have gone through `ask`."""
        template = ChatTemplate.of_model(self.models.tokenizer)
        with template or nullcontext():
            return [self._encode(prompt, template, chat=chat) for prompt in prompts]

    def _encode(self, prompt: Prompt | Chat | Turns, template: ChatTemplate | None, *, chat: bool) -> list[int]:
        assert not isinstance(prompt, Turns)
        if not chat and not isinstance(prompt, Chat):
            return encode(self.models.tokenizer, prompt)
        if template is None or self.models.tokenizer is None:
            raise ValueError("the model has no chat template: leave out --chat, or give prompts of text")
        if not isinstance(prompt, str | Chat):
            raise ValueError("--chat needs prompts of text, but one consists of token ids")
        messages = prompt.messages if isinstance(prompt, Chat) else [{"role": "user", "content": prompt}]
        return self.models.tokenizer.encode(template.render(messages), add_special_tokens=False)

    def context_for(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """A context length for these prompts and their outputs. Raises ValueError if the model's is too short."""
        longest = max(map(len, prompts)) + max_tokens
        limit = self.models.target.config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"the longest prompt and --max-tokens {max_tokens} need {longest} tokens, but the model's limit is {limit}: "
                "lower --max-tokens or leave out long prompts"
            )
        return min(limit, max(ROUNDED_TO, 1 << (longest - 1).bit_length()))


@dataclass
class Pass:
    """One run of some prompts through an engine, or several added up."""

    seconds: float = 0.0
    """Wall time from the first prompt queued to the last token, prefills included."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt."""
    accept_lengths: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt: tokens of every verification."""
    host_seconds: float = 0.0
    launching_seconds: float = 0.0
    waiting_seconds: float = 0.0
    cycles: int = 0
    """Of the engine, as the three above in EngineStats; one cycle serves a whole batch."""
    outputs: list[GenerationOutput] = field(default_factory=list)

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(mine + added for mine, added in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def verifications(self) -> list[int]:
        """Tokens of every verification of every request."""
        return [length for each in self.accept_lengths for length in each]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return mean(self.verifications)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def per_cycle_ms(self) -> dict[str, float]:
        """The host's work, launching programs, and waiting for the device."""
        seconds = {"host": self.host_seconds, "launch": self.launching_seconds, "wait": self.waiting_seconds}
        return {what: 1e3 * each / max(1, self.cycles) for what, each in seconds.items()}


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    concurrency: int | None = None,
    tree: TreeShape | None = None,
) -> Pass:
    """Runs all prompts to the end, `concurrency` at a time. The prefix cache is flushed first, so that no pass profits from an
    earlier one. `concurrency`: None: as many as the engine takes.

    Raises ValueError if a request failed, as the pass then took less time than it should.
    """
    engine.flush_cache()
    before, started, order = engine.stats(), time.perf_counter(), list[str]()
    waiting = [GenerationRequest(tuple(prompt), each, tree=tree) for prompt, each in zip(prompts, params, strict=True)][::-1]
    outputs: dict[str, GenerationOutput] = {}
    while waiting or engine.has_work:
        while waiting and (concurrency is None or len(order) - len(outputs) < concurrency):
            order.append(engine.add(waiting.pop()).id)
        for update in engine.step():
            ended = time.perf_counter()
            if update.output:
                if update.output.finish_reason == "error":
                    raise ValueError(f"a request failed: {update.output.error}")
                outputs[update.request_id] = update.output
    after, done = engine.stats(), [outputs[request] for request in order]
    return Pass(
        ended - started,
        [output.token_ids for output in done],
        [output.speculation.accept_lengths for output in done],
        after.host_seconds - before.host_seconds,
        after.launching_seconds - before.launching_seconds,
        after.waiting_seconds - before.waiting_seconds,
        after.cycles - before.cycles,
        done,
    )


def mean(values: Sequence[float]) -> float:
    """The mean; 0.0 for an empty sequence."""
    return sum(values) / len(values) if values else 0.0


def depth_acceptance(accept_lengths: Sequence[int]) -> list[float]:
    """How often a draft at depth 1, 2, ... was accepted, given that the one before it was.

    In: [1, 3, 3, 2]  Out: [0.75, 0.667] (three of four verifications took a first draft, two of those three a second)
    """
    reached = [sum(length >= depth for length in accept_lengths) for depth in range(1, max(accept_lengths, default=0) + 1)]
    return [round(deeper / before, 3) for before, deeper in itertools.pairwise(reached)]


def count_equal(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> int:
    """The number of prompts whose tokens are equal in both."""
    return sum(list(one) == list(other) for one, other in zip(first, second, strict=True))


class CompilationCounter:
    """Counts the programs that JAX compiles in this process, or loads from the persistent cache."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == self.EVENT
