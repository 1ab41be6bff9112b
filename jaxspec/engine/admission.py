"""A request in the form in which the device learns of it."""

from typing import Any

import jax
import numpy as np

from jaxspec.engine.request import Request
from jaxspec.sampling import SamplingKind, Settings
from jaxspec.sampling_params import SamplingParams
from jaxspec.spec.admit import Admission
from jaxspec.spec.state import MAX_STOP_TOKENS, Sizes


def admission(request: Request, sizes: Sizes, bias: jax.Array | None) -> Admission:
    """What spec.admit.admit takes. `bias` is an array of zeros to save a copy where the request has none of its own."""
    return Admission(
        row=row(request.row, np.int32),
        tokens=padded(request.tokens, sizes.max_length, 0),
        remaining=row(request.params.max_tokens - request.generated, np.int32),
        settings=settings(request, sizes.vocab),
        bias=bias_row(request.params, sizes.vocab) if bias is None else bias,
    )


def settings(request: Request, vocab_size: int) -> Settings:
    """One row of Settings."""
    params = request.params
    return Settings(
        kind=row(SamplingKind.of(params), np.int32),
        temperature=row(params.temperature, np.float32),
        seed=seed_words(request.seed),
        top_k=row(min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size, np.int32),
        top_p=row(params.top_p, np.float32),
        min_p=row(params.min_p, np.float32),
        repetition_penalty=row(params.repetition_penalty, np.float32),
        frequency_penalty=row(params.frequency_penalty, np.float32),
        presence_penalty=row(params.presence_penalty, np.float32),
        prompt_length=row(len(request.prompt), np.int32),
        min_length=row(len(request.prompt) + params.min_tokens, np.int32),
        stop_tokens=padded(request.stop_token_ids, MAX_STOP_TOKENS, -1),
        wants_logprobs=row(params.logprobs is not None, np.bool_),
        wants_prompt_logprobs=row(params.prompt_logprobs is not None, np.bool_),
    )


def seed_words(seed: int) -> Any:
    """[1, 2] uint32: the high word, then the low one."""
    return np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)


def bias_row(params: SamplingParams, vocab_size: int) -> Any:
    """[1, vocab] float32: logit_bias, and -inf for what must not be drawn.

    In:  logit_bias {1: 5}, bad_token_ids [2], allowed_token_ids [1, 2, 3], vocabulary of 5
    Out: [[-inf, 5, -inf, 0, -inf]]
    """
    bias = np.zeros((1, vocab_size), np.float32)
    for token, value in dict(params.logit_bias).items():
        bias[0, token] = value
    if params.allowed_token_ids is not None:
        banned = np.ones(vocab_size, bool)
        banned[list(params.allowed_token_ids)] = False
        bias[0, banned] = -np.inf
    bias[0, list(params.bad_token_ids)] = -np.inf
    return bias


def row(value: float | int, dtype: type[np.generic]) -> Any:
    """[1]: one sequence's value. The host's arrays are as good to a program as the device's, hence no type here."""
    return np.array([value], dtype)


def padded(values: tuple[int, ...] | list[int], width: int, filler: int) -> Any:
    """One row [1, width] int32 that begins with the values.

    In:  (5, 6), 4, -1
    Out: [[5, 6, -1, -1]]
    """
    line = np.full((1, width), filler, np.int32)
    line[0, : len(values)] = values
    return line
