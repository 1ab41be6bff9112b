"""From what a user asks for to a request, or a refusal that names the field. Plain Python, no JAX."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.engine.detokenizer import Decoder, Detokenizer
from jaxspec.engine.request import Request
from jaxspec.sampling_params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """What the engine can serve."""

    vocab_size: int
    context_length: int
    """Prompt and output together, in tokens."""
    max_stop_tokens: int
    num_pages: int
    page_size: int


class Intake:
    """Checks what comes in and makes requests of it."""

    def __init__(self, limits: Limits, eos_token_ids: tuple[int, ...], tokenizer: Decoder | None, random_seed: int):
        self._limits, self._eos_token_ids, self._tokenizer = limits, eos_token_ids, tokenizer
        self._seeds = random.Random(random_seed)
        self._arrivals = 0

    def request(self, prompt: Sequence[int], params: SamplingParams, request_id: str, priority: int, deadline: float) -> Request:
        """A new request. Raises ValueError, naming the field, for one that can't be served."""
        prompt = tuple(prompt)
        self._check(prompt, params)
        stop = tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))))
        if len(stop) > self._limits.max_stop_tokens:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence tokens are {len(stop)}; at most {self._limits.max_stop_tokens} fit"
            )
        drawn = self._seeds.getrandbits(64)  # drawn for every request, so that one with a seed does not shift the others
        number, self._arrivals = self._arrivals, self._arrivals + 1
        return Request(
            id=request_id,
            prompt=prompt,
            params=params,
            seed=drawn if params.seed is None else params.seed % 2**64,
            stop_token_ids=stop,
            detokenizer=Detokenizer.of_request(self._tokenizer, params),
            priority=priority,
            arrival=number,
            deadline=deadline,
        )

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        limits = self._limits
        if not prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        allowed = params.allowed_token_ids
        for name, ids in {
            "prompt": prompt,
            "stop_token_ids": params.stop_token_ids,
            "bad_token_ids": params.bad_token_ids,
            "allowed_token_ids": allowed or (),
            "logit_bias": list(dict(params.logit_bias)),
        }.items():
            if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"{name} holds token id {wrong}; ids are 0 to {limits.vocab_size - 1}")
        if len(set(params.bad_token_ids)) == limits.vocab_size or (allowed and not set(allowed) - set(params.bad_token_ids)):
            raise ValueError("bad_token_ids bans every token that could be drawn: leave some")
        if params.n != 1:
            raise ValueError(f"n is {params.n}: a request of the engine is one completion; add SamplingParams.copies() one by one")
        needed = len(prompt) + params.max_tokens
        if needed > limits.context_length:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) are {needed} tokens together, more than the "
                f"context length of {limits.context_length}: shorten the prompt or lower max_tokens"
            )
        if needed > limits.num_pages * limits.page_size:
            raise ValueError(
                f"prompt and max_tokens are {needed} tokens together, more than the cache's {limits.num_pages} pages of "
                f"{limits.page_size} hold: lower max_tokens or raise num_pages"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model directory has none: use stop_token_ids")
