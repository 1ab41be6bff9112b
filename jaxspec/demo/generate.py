"""Batched continuation with a plain contiguous cache: the target's own text, for training the head and for looking at it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from jaxspec.models.layers import AttentionMetadata, causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import LoadedModel
from jaxspec.typing import Array, Int, KeysValues

GROWTH = 64


def continue_prompts(
    model: Llama, prompts: Int[Array, "b w"], key: Array, new_tokens: int, temperature: float
) -> Int[Array, "b n"]:
    """Prompts of one length and `new_tokens` tokens behind each, greedy where temperature is 0.

    One page per sequence holds its whole cache; it grows by GROWTH slots at a time, so short texts are cheap.
    """
    batch, width = prompts.shape
    pages = jnp.arange(batch, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros(batch, jnp.int32)

    def choose(hidden, key):
        logits = model.logits(hidden)
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def step(carry, inputs):
        cache, token = carry
        length, key = inputs
        mask = jnp.ones((batch, 1, 1), bool)
        out = model(token[:, None], AttentionMetadata(zeros[:, None] + length, pages, zeros, zeros + length, mask), cache)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=length, axis=1)
        cache = tuple(KeysValues(put(old.k, new.k), put(old.v, new.v)) for old, new in zip(cache, out.window, strict=True))
        return (cache, choose(out.hidden[:, 0], key)), token

    out = model(prompts, causal_metadata(batch, width))
    cache, token, parts = out.window, choose(out.hidden[:, -1], key), [prompts]
    for first in range(0, new_tokens, GROWTH):
        count = min(GROWTH, new_tokens - first)
        room = ((0, 0), (0, count), (0, 0), (0, 0))
        cache = tuple(KeysValues(jnp.pad(layer.k, room), jnp.pad(layer.v, room)) for layer in cache)
        lengths = width + first + jnp.arange(count, dtype=jnp.int32)
        keys = jax.random.split(jax.random.fold_in(key, first), count)
        (cache, token), tokens = jax.lax.scan(step, (cache, token), (lengths, keys))
        parts.append(tokens.T)
    return jnp.concatenate(parts, 1)


def regenerate(
    target: LoadedModel, prompts: NDArray[np.int32], new_tokens: int, temperature: float = 0.0, batch: int = 128, seed: int = 0
) -> NDArray[np.int32]:
    """int32 [rows, prompt + new_tokens] from int32 [rows, prompt], `batch` rows at a time; a rest of the rows is left out."""

    @jax.jit
    def run(params, prompts, key):
        return continue_prompts(target.merge(params), prompts, key, new_tokens, temperature)

    keys = jax.random.split(jax.random.key(seed), len(prompts) // batch)
    parts = [
        np.asarray(run(target.params, prompts[index * batch : (index + 1) * batch], key))
        for index, key in enumerate(tqdm(keys, desc="target's own text", mininterval=10))
    ]
    return np.concatenate(parts)
