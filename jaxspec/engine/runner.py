"""The device side of the engine: weights, caches, state, and launching programs on them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig, ModelConfig, SpecConfig
from jaxspec.engine.programs import Buckets, CycleProgram, PrefillProgram, Program, Programs, smallest
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import PrefillStep
from jaxspec.models.loaded import LoadedHead, LoadedTarget
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import REPORT_HEADER, Models
from jaxspec.spec.prefill import Chunk
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, empty_sequences
from jaxspec.typing import KeysValues

CPU_CACHE_BYTES = 4 << 30
"""Most memory that the cache takes on a CPU unless num_pages says otherwise."""


class Launched(NamedTuple):
    """A program on its way: row i of its report will belong to requests[i]."""

    requests: list[Request]
    report: jax.Array
    is_cycle: bool


class Emitted(NamedTuple):
    """What a program emitted for one request."""

    tokens: list[int]
    accepted: int
    finish: int


class Runner:
    """Owns everything on the device. Arrays that a launch donates are replaced by its results at once."""

    def __init__(self, target: LoadedTarget, head: LoadedHead | None, spec: SpecConfig, config: EngineConfig, context_length: int):
        self.spec, self._page_size = spec, config.page_size
        capture = head.config.captured_layers if head else ()
        self.params = {"target": target.params, "head": head.params if head else {}}
        dtype = target.params["embed_tokens"].dtype

        def merge(params: dict) -> Models:
            return Models(target.merge(params["target"]), head.merge(params["head"]) if head else None, capture)

        pages_per_sequence = -(-context_length // config.page_size)
        cached = [target.config, *([head.config.layer] if head else [])]
        page_bytes = config.page_size * sum(cache_bytes_per_token(model, dtype) for model in cached)
        self.num_pages = config.num_pages or default_pages(config, pages_per_sequence, page_bytes, self.params)
        self._caches = Caches(
            empty_cache(target.config, self.num_pages, config.page_size, dtype),
            empty_cache(head.config.layer, self.num_pages, config.page_size, dtype) if head else (),
        )
        hidden_size = head.config.layer.hidden_size if head else target.config.hidden_size
        feature_size = head.config.feature_size if head else target.config.hidden_size
        # One row more than requests: the padding of a batch lives there, for ever done.
        self._padding_row = config.max_running_requests
        self._sequences = empty_sequences(self._padding_row + 1, hidden_size, feature_size, dtype)
        self.buckets = Buckets.of(config, pages_per_sequence, narrow_tables=True)
        self.programs = Programs(merge, self.params, self._caches, self._sequences)

    def all_programs(self) -> list[Program]:
        """Every program that serving can need."""
        prefills = [PrefillProgram(chunk, pages) for chunk in self.buckets.chunks for pages in self.buckets.pages]
        cycles = [
            CycleProgram(batch, pages, self.spec, kind)
            for kind in SamplingKind
            for batch in self.buckets.batches
            for pages in self.buckets.pages
        ]
        return [*prefills, *cycles]

    def launch_prefill(self, step: PrefillStep) -> Launched:
        """Starts a chunk; its report holds the first token if the chunk is the prompt's last."""
        request = step.request
        width = smallest(self.buckets.chunks, step.size)
        tokens = request.prompt[step.first_slot : step.first_slot + step.size]
        page_table = self._page_table([request], [step.first_slot + step.size + 1], 1)
        fields: dict[str, Any] = {
            "row": np.array([request.row], np.int32),
            "page_table": page_table,
            "tokens": padded(tokens, width, 0),
            "first_slot": np.array([step.first_slot], np.int32),
            "size": np.array([step.size], np.int32),
            "is_last": np.array([step.is_last]),
            "temperature": np.array([request.params.temperature], np.float32),
            "seed": np.array([[request.seed >> 32, request.seed & 0xFFFFFFFF]], np.uint32),
            "max_tokens": np.array([request.params.max_tokens], np.int32),
            "stop_tokens": padded(request.stop_token_ids, MAX_STOP_TOKENS, -1),
        }
        return self._launch(PrefillProgram(width, page_table.shape[1]), [request], Chunk(**fields))

    def launch_cycle(self, requests: list[Request]) -> Launched:
        """Starts one cycle of these requests."""
        batch = smallest(self.buckets.batches, len(requests))
        sampled = any(request.params.temperature > 0 for request in requests)
        rows = np.full(batch, self._padding_row, np.int32)
        rows[: len(requests)] = [request.row for request in requests]
        emitted = self.spec.num_steps + 1  # by one cycle, at most
        lengths = [len(each.prompt) + len(each.output) + (each.in_flight + 1) * emitted for each in requests]
        page_table = self._page_table(requests, lengths, batch)
        kind = SamplingKind.TEMPERATURE if sampled else SamplingKind.GREEDY
        return self._launch(CycleProgram(batch, page_table.shape[1], self.spec, kind), requests, rows, page_table)

    def _page_table(self, requests: list[Request], lengths: list[int], batch: int) -> np.ndarray:
        """[batch, pages] int32, wide enough for the slots that the launch may reach (`lengths`); unused entries are page 0."""
        needed = [request.pages[: -(-length // self._page_size)] for request, length in zip(requests, lengths, strict=True)]
        table = np.zeros((batch, smallest(self.buckets.pages, max(map(len, needed)))), np.int32)
        for row, pages in zip(table, needed, strict=False):
            row[: len(pages)] = pages
        return table

    def _launch(self, program: Program, requests: list[Request], *arguments) -> Launched:
        step = self.programs[program](self.params, self._caches, self._sequences, *arguments)
        self._caches, self._sequences = step.caches, step.sequences
        step.report.copy_to_host_async()
        return Launched(requests, step.report, isinstance(program, CycleProgram))

    @staticmethod
    def read(launched: Launched) -> list[Emitted]:
        """Waits for a launched program and returns what it emitted, per request."""
        report = np.asarray(launched.report)
        return [
            Emitted(row[REPORT_HEADER : REPORT_HEADER + row[0]].tolist(), int(row[1]), int(row[2]))
            for row in report[: len(launched.requests)]
        ]


def padded(values: tuple[int, ...], width: int, filler: int) -> np.ndarray:
    """One row [1, width] int32 that begins with the values.

    In:  (5, 6), 4, -1
    Out: [[5, 6, -1, -1]]
    """
    row = np.full((1, width), filler, np.int32)
    row[0, : len(values)] = values
    return row


def cache_bytes_per_token(config: ModelConfig, dtype: DTypeLike) -> int:
    """What a model keeps per token, in bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def empty_cache(config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> tuple[KeysValues, ...]:
    """Zeroed pages [pages, page, kv_heads, head_dim] for every layer; keys and values are arrays of their own."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    return tuple(KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def default_pages(config: EngineConfig, pages_per_sequence: int, page_bytes: int, params: dict) -> int:
    """Enough pages for every running request at full length, or as many as fit.

    Raises:
        ValueError: not even one sequence fits.
    """
    device, wanted = jax.devices()[0], config.max_running_requests * pages_per_sequence
    if device.platform == "cpu":
        pages = min(wanted, CPU_CACHE_BYTES // page_bytes)
    else:
        weights = sum(array.nbytes for array in jax.tree.leaves(params))
        room = int(device.memory_stats()["bytes_limit"] * config.mem_fraction) - weights
        pages = min(wanted, room // page_bytes)
    if pages < pages_per_sequence:
        raise ValueError(
            f"the cache has room for {max(pages, 0) * config.page_size} tokens, but one sequence may have "
            f"{pages_per_sequence * config.page_size}: lower context_length, or raise mem_fraction or num_pages"
        )
    return pages
