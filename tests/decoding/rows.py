"""State rows for tests: set up from SamplingParams as the engine does it, over caches full of NaN."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.drafter import Models
from jaxspec.decoding.head_drafter import HeadDrafter, HeadState
from jaxspec.decoding.prefill import Chunk
from jaxspec.decoding.settings import Settings
from jaxspec.decoding.state import Admission, Sizes, State
from jaxspec.engine import inputs
from jaxspec.engine.models import new_state
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.model_config import ModelConfig
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import TinyTokenizer
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.typing import KeysValues


def poisoned_cache(config: ModelConfig, pages: int, page_size: int) -> tuple[KeysValues, ...]:
    """Pages full of NaN: whatever reads a slot that was never written spoils everything after it."""
    empty = jnp.full((pages, page_size, config.num_kv_heads, config.head_dim), jnp.nan)
    return (KeysValues(empty, empty),) * config.num_layers


def poisoned_state(
    target: LoadedTarget, head: LoadedHead, *, rows: int, pages: int, page_size: int, max_length: int, max_lag: int = 1
) -> State:
    """Free rows whose last users left nothing but NaN."""
    state = new_state(target.config, HeadDrafter.of(head), Sizes(rows, 0, page_size, max_length, max_lag, jnp.float32))
    draft = HeadState(poisoned_cache(head.config.layer, pages, page_size), nan_like(state.draft.hidden), state.draft.calibration)
    return state._replace(
        cache=poisoned_cache(target.config, pages, page_size),
        features=state.features._replace(last=nan_like(state.features.last)),
        bias=nan_like(state.bias),
        draft=draft,
    )


def nan_like(array: jax.Array) -> jax.Array:
    return jnp.full_like(array, jnp.nan)


def models_of(target: LoadedTarget, head: LoadedHead, params: tuple[dict, dict] | None = None, **options) -> Models:
    """The models with these weights of target and head, or with their own. `options`: as for HeadDrafter.of."""
    of_target, of_head = params or (target.params, head.params)
    return Models(target.merge(of_target), HeadDrafter.of(head, **options).with_weights(of_head))


def request(params: SamplingParams, prompt: Sequence[int] = (0,)) -> Request:
    """A request that has just arrived."""
    seed = 0 if params.seed is None else params.seed
    asked = GenerationRequest(tuple(prompt), params)
    return Request("test", asked, seed, params.stop_token_ids, Detokenizer(TinyTokenizer(), ()), row=0)


def settings_of(params: Sequence[SamplingParams], vocab_size: int, prompt: Sequence[int] = (0,)) -> Settings:
    """One row per request, all with this prompt."""
    rows = [inputs.settings(request(each, prompt), vocab_size) for each in params]
    return jax.tree.map(lambda *fields: jnp.asarray(np.concatenate(fields)), *rows)


def admission_of(params: SamplingParams, prompt: Sequence[int], *, rows: int, max_length: int, vocab_size: int) -> Admission:
    """The same request in rows 0, 1, ..."""
    one = inputs.admission(request(params, prompt), vocab_size, max_length, None)
    several = jax.tree.map(lambda field: jnp.repeat(jnp.asarray(field), rows, 0), one)
    return several._replace(row=jnp.arange(rows, dtype=jnp.int32))


def chunk_of(
    tokens: Sequence[int],
    page_table: jax.Array,
    *,
    width: int | None = None,
    first_slot: int = 0,
    cached: int | None = None,
    is_last: bool = True,
) -> Chunk:
    """The same chunk for rows 0, 1, ..., one per line of the page table, padded with token 5."""
    rows, width = len(page_table), width or len(tokens)
    return Chunk(
        row=jnp.arange(rows, dtype=jnp.int32),
        page_table=page_table,
        tokens=jnp.broadcast_to(jnp.array([*tokens, *[5] * (width - len(tokens))], jnp.int32), (rows, width)),
        first_slot=jnp.full(rows, first_slot, jnp.int32),
        size=jnp.full(rows, len(tokens), jnp.int32),
        cached=jnp.full(rows, first_slot if cached is None else cached, jnp.int32),
        is_last=jnp.full(rows, is_last),
    )
