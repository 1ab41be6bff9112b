"""The inputs of programs, in NumPy arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.decoding.prefill import Chunk
from jaxspec.decoding.programs import PrefillProgram
from jaxspec.decoding.settings import SamplingKind, Settings, settings_row
from jaxspec.decoding.state import Admission
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import PrefillChunk
from jaxspec.sampling_params import SamplingParams


def admission(request: Request, vocab_size: int, max_length: int, no_bias: jax.Array | None) -> Admission:
    """The input of decoding.state.admit. `no_bias`: an array of zeros for requests without a bias, which saves a copy."""
    return Admission(
        row=row(request.row, np.int32),
        tokens=padded(request.tokens, max_length),
        remaining=row(request.params.max_tokens - request.generated, np.int32),
        settings=settings(request, vocab_size),
        bias=bias_row(request.params, vocab_size) if no_bias is None or request.params.biases else no_bias,
    )


def prefill_chunk(chunks: Sequence[PrefillChunk], program: PrefillProgram, padding_row: int, page_size: int) -> Chunk:
    """The program's input for these chunks, in NumPy arrays. Its unused rows get empty chunks of the padding row."""
    rows, is_last = np.full(program.batch, padding_row, np.int32), np.zeros(program.batch, bool)
    first_slot, size, cached = np.zeros((3, program.batch), np.int32)
    tokens, tables = np.zeros((program.batch, program.chunk), np.int32), []
    for place, chunk in enumerate(chunks):
        end = chunk.first_slot + chunk.size
        rows[place], is_last[place] = chunk.request.row, chunk.is_last
        first_slot[place], size[place], cached[place] = chunk.first_slot, chunk.size, chunk.cached
        tokens[place, : chunk.size] = chunk.request.tokens[chunk.first_slot : end]
        tables.append(chunk.pages[: end // page_size + 1])  # slot `end` is the head's, after the last chunk
    arrays: Any = rows, padded_table(tables, program.batch, program.pages), tokens, first_slot, size, cached, is_last
    return Chunk(*arrays)


def settings(request: Request, vocab_size: int) -> Settings:
    """One row of Settings: fields of SamplingParams by name, and fields with another form on the device."""
    params = request.params
    values = {name: value for name, value in vars(params).items() if name in Settings._fields} | {
        "kind": SamplingKind.of(params),
        "seed": (request.seed >> 32, request.seed & 0xFFFFFFFF),
        "top_k": min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size,
        "prompt_length": len(request.prompt),
        "min_length": len(request.prompt) + params.min_tokens,
        "stop_tokens": request.stop_token_ids,
        "wants_logprobs": params.logprobs is not None,
    }
    return settings_row(**values)


def bias_row(params: SamplingParams, vocab_size: int) -> Any:
    """[1, vocab] float32: logit_bias, and -inf for banned tokens.

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
    """[1]: one sequence's value. Untyped, because programs take NumPy and JAX arrays alike."""
    return np.array([value], dtype)


def padded(values: tuple[int, ...] | list[int], width: int) -> Any:
    """One row [1, width] int32 that begins with the values.

    In:  (5, 6), 4
    Out: [[5, 6, 0, 0]]
    """
    line = np.zeros((1, width), np.int32)
    line[0, : len(values)] = values
    return line


def padded_table(tables: Sequence[Sequence[int]], batch: int, width: int) -> np.ndarray:
    """[batch, width] int32; unused entries are page 0.

    In:  [[5, 6], [7]], 3, 4
    Out: [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    """
    padded = np.zeros((batch, width), np.int32)
    for row, pages in zip(padded, tables, strict=False):
        row[: len(pages)] = pages
    return padded
