"""One model, loaded once; engines that share its weights, one per draft tree; and a pass of prompts through one of them."""

import itertools
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput
from jaxspec.llm import LLM, Prompt
from jaxspec.sampling_params import SamplingParams

SMALLEST_CONTEXT = 2
"""Tokens. For a model whose own engine is not used: its cache then takes no memory."""
ROUNDED_TO = 256
"""Tokens. Contexts grow by powers of two from here, so that programs compiled for some prompts serve others too."""


class Workbench:
    """The model; plain engines hold no head. `options` are those of LLM."""

    def __init__(self, model: Path | None, draft: Path | None, **options):
        self.llm = LLM(model, draft, **{"progress": True, "max_running_requests": 1, **options})

    @classmethod
    def of(cls, given: Namespace, **options) -> "Workbench":
        """With what was given for `add_model_options`."""
        model, draft, token_map = given.model_path, given.speculative_draft_model_path, given.speculative_token_map
        return cls(model, draft, token_map=token_map, dtype=given.dtype, **options)

    def engine(self, spec: SpecConfig, batch: int, context_length: int | None = None, *, prefix_cache: bool = True) -> Engine:
        """A new engine that runs up to `batch` requests together; it compiles what it needs on its first pass."""
        if spec.num_steps and self.llm.head is None:
            raise ValueError("trees need a draft head: give --draft")
        head = self.llm.head if spec.num_steps else None
        config = EngineConfig(max_running_requests=batch, context_length=context_length, prefix_cache=prefix_cache)
        return Engine(self.llm.target, head, self.llm.tokenizer, spec, config)

    def encode(self, prompts: Sequence[Prompt], *, chat: bool = False) -> list[list[int]]:
        """Token ids of the prompts; `chat`: of conversations that begin with them."""
        if chat:
            return chat_tokens(self.llm, prompts)
        return [self.llm.encode(prompt) for prompt in prompts]

    def context_for(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
        """A context length that holds these prompts and what is generated for them. Raises ValueError if the model's does not."""
        longest = max(map(len, prompts)) + max_tokens
        limit = self.llm.target.config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"the longest prompt and --max-tokens {max_tokens} take {longest} tokens, the model was made for {limit}: "
                "lower --max-tokens or leave out long prompts"
            )
        return min(limit, max(ROUNDED_TO, 1 << (longest - 1).bit_length()))


def chat_tokens(llm: LLM, messages: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of conversations, each of one user's message, in the model's chat template and up to where the reply begins.

    Raises ValueError if the model has no template or it refuses a message, or a message is not text.
    """
    from jaxspec.server.chat_template import ChatTemplate  # loads jinja2

    template = ChatTemplate.of_model(llm.tokenizer)
    if template is None or llm.tokenizer is None:
        raise ValueError("the model has no chat template: leave out --chat")
    if not all(isinstance(message, str) for message in messages):
        raise ValueError("--chat takes prompts of text, and one of them is token ids")
    with template:
        texts = [template.render([{"role": "user", "content": str(message)}]) for message in messages]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


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

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return mean(self.accept_lengths)


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Pass:
    """Queues every prompt and steps the engine until all are done. No prompt finds a prefix that an earlier pass left."""
    engine.flush_cache()
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


def mean(values: Sequence[float]) -> float:
    """0.0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def depth_acceptance(accept_lengths: Sequence[int]) -> list[float]:
    """How often a draft at depth 1, 2, ... was accepted, given that all before it were.

    In: [1, 3, 3, 2]  Out: [0.75, 0.667] (three of four verifications took a first draft, two of those three a second)
    """
    reached = [sum(length >= depth for length in accept_lengths) for depth in range(1, max(accept_lengths, default=0) + 1)]
    return [round(deeper / before, 3) for before, deeper in itertools.pairwise(reached)]


def count_equal(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> int:
    """Prompts whose tokens are the same in both."""
    return sum(list(one) == list(other) for one, other in zip(first, second, strict=True))


class CompilationCounter:
    """Counts what JAX compiles in this process, loads from the persistent cache included."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == self.EVENT
