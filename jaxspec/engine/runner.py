"""The device side of the engine: weights, caches, state, and launching programs on them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.programs import Buckets, CycleProgram, PrefillProgram, Program, Programs, smallest
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import PrefillStep
from jaxspec.models.layers import KeysValues
from jaxspec.models.llama import eagle3_layers
from jaxspec.models.loading import LoadedModel
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import REPORT_HEADER, Models
from jaxspec.spec.prefill import Chunk
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, empty_sequences

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

    def __init__(self, target: LoadedModel, head: LoadedModel | None, spec: SpecConfig, config: EngineConfig, context_length: int):
        self.spec = spec
        capture = eagle3_layers(target.config.num_layers) if head else ()
        self.params = {"target": target.params, "head": head.params if head else {}}
        dtype = target.params["embed_tokens"].dtype

        def merge(params: dict) -> Models:
            return Models(target.merge(params["target"]), head.merge(params["head"]) if head else None, capture)

        pages_per_sequence = -(-context_length // config.page_size)
        page_bytes = config.page_size * sum(cache_bytes_per_token(model, dtype) for model in (target, head) if model)
        self.num_pages = config.num_pages or default_pages(config, pages_per_sequence, page_bytes, self.params)
        self._caches = Caches(
            empty_cache(target, self.num_pages, config.page_size, dtype),
            empty_cache(head, self.num_pages, config.page_size, dtype) if head else (),
        )
        size = target.config.hidden_size
        # One row more than requests: the padding of a batch lives there, for ever done.
        self._padding_row = config.max_running_requests
        self._sequences = empty_sequences(self._padding_row + 1, size, size * max(1, len(capture)), dtype)
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
        width = smallest(self.buckets.chunks, step.count)
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : step.count] = request.prompt[step.first_slot : step.first_slot + step.count]
        stop_tokens = np.full((1, MAX_STOP_TOKENS), -1, np.int32)
        stop_tokens[0, : len(request.stop_token_ids)] = request.stop_token_ids
        page_table = self._page_table([request], 1)
        chunk = Chunk(
            row=np.array([request.row], np.int32),
            page_table=page_table,
            tokens=tokens,
            first_slot=np.array([step.first_slot], np.int32),
            count=np.array([step.count], np.int32),
            is_last=np.array([step.is_last]),
            temperature=np.array([request.params.temperature], np.float32),
            seed=np.array([[request.seed >> 32, request.seed & 0xFFFFFFFF]], np.uint32),
            max_tokens=np.array([request.params.max_tokens], np.int32),
            stop_tokens=stop_tokens,
        )
        return self._launch(PrefillProgram(width, page_table.shape[1]), [request], chunk)

    def launch_cycle(self, requests: list[Request]) -> Launched:
        """Starts one cycle of these requests."""
        batch = smallest(self.buckets.batches, len(requests))
        sampled = any(request.params.temperature > 0 for request in requests)
        rows = np.full(batch, self._padding_row, np.int32)
        rows[: len(requests)] = [request.row for request in requests]
        page_table = self._page_table(requests, batch)
        kind = SamplingKind.TEMPERATURE if sampled else SamplingKind.GREEDY
        return self._launch(CycleProgram(batch, page_table.shape[1], self.spec, kind), requests, rows, page_table)

    def _page_table(self, requests: list[Request], batch: int) -> np.ndarray:
        """[batch, pages] int32 in the narrowest bucket that holds every request; unused entries are page 0."""
        table = np.zeros((batch, smallest(self.buckets.pages, max(len(request.pages) for request in requests))), np.int32)
        for row, request in zip(table, requests, strict=False):
            row[: len(request.pages)] = request.pages
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


def cache_shape(model: LoadedModel) -> tuple[int, int, int]:
    """Layers, KV heads and head size of what a model keeps per token."""
    config = getattr(model.config, "layer", model.config)
    return config.num_layers, config.num_kv_heads, config.head_dim


def cache_bytes_per_token(model: LoadedModel, dtype: DTypeLike) -> int:
    layers, kv_heads, head_dim = cache_shape(model)
    return 2 * layers * kv_heads * head_dim * jnp.dtype(dtype).itemsize


def empty_cache(model: LoadedModel, num_pages: int, page_size: int, dtype: DTypeLike) -> tuple[KeysValues, ...]:
    """Zeroed pages [pages, page, kv_heads, head_dim] for every layer; keys and values are arrays of their own."""
    layers, kv_heads, head_dim = cache_shape(model)
    shape = (num_pages, page_size, kv_heads, head_dim)
    return tuple(KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def default_pages(config: EngineConfig, pages_per_sequence: int, page_bytes: int, params: dict) -> int:
    """Enough pages for every running request at full length, or as many as fit.

    Raises:
        ValueError: not even one sequence fits.
    """
    device = jax.devices()[0]
    budget = CPU_CACHE_BYTES
    if device.platform != "cpu":
        weights = sum(array.nbytes for array in jax.tree.leaves(params))
        budget = int(device.memory_stats()["bytes_limit"] * config.mem_fraction) - weights
    pages = (
        budget // page_bytes
        if device.platform != "cpu"
        else min(budget // page_bytes, config.max_running_requests * pages_per_sequence)
    )
    if pages < pages_per_sequence:
        raise ValueError(
            f"the cache has room for {max(pages, 0) * config.page_size} tokens, one sequence of {pages_per_sequence * config.page_size} "
            "does not fit: lower context_length, or raise mem_fraction or num_pages"
        )
    return pages
