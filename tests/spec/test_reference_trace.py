"""The reference implementation's own trace is reproduced: every tree, accept length and token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SpecConfig
from jaxspec.models.llama import eagle3_layers
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import Models, cycle, draft_tree
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, empty_sequences, take
from jaxspec.typing import KeysValues
from tests.reference import head, target, trace

SPEC = SpecConfig(trace()["depth"] + 1, trace()["top_k"], trace()["total_token"])
PAGES, PAGE_SIZE, CHUNK = 12, 16, 8
ROWS, PAGE_TABLE = jnp.array([0]), jnp.arange(PAGES)[None]


def models(params: tuple[dict, dict]) -> Models:
    return Models(target().merge(params[0]), head().merge(params[1]), eagle3_layers(8))


@jax.jit
def run_prefill(params, caches, sequences, chunk):
    return prefill(models(params), caches, sequences, chunk, kind=SamplingKind.GREEDY)


@jax.jit
def run_cycle(params, caches, sequences):
    tree = draft_tree(models(params), caches, take(sequences, ROWS), PAGE_TABLE, SPEC)
    return tree, cycle(models(params), caches, sequences, ROWS, PAGE_TABLE, spec=SPEC, kind=SamplingKind.GREEDY)


def poisoned_cache(layers: int) -> tuple[KeysValues, ...]:
    """Pages full of NaN: whatever reads a slot that was never written spoils everything after it."""
    config = target().config
    pages = jnp.full((PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim), jnp.nan)
    return tuple(KeysValues(pages, pages) for _ in range(layers))


@pytest.mark.parametrize("number", range(len(trace()["runs"])))
def test_trace(number):
    run = trace()["runs"][number]
    prompt, params = run["prompt"], (target().params, head().params)
    caches = Caches(poisoned_cache(8), poisoned_cache(1))
    sequences = empty_sequences(1, 64, 192, jnp.dtype(jnp.float32))
    for first in range(0, len(prompt), CHUNK):
        part = prompt[first : first + CHUNK]
        chunk = Chunk(
            row=jnp.array([0]),
            page_table=PAGE_TABLE,
            tokens=jnp.array([part + [99] * (CHUNK - len(part))]),
            first_slot=jnp.array([first]),
            size=jnp.array([len(part)]),
            is_last=jnp.array([first + len(part) == len(prompt)]),
            temperature=jnp.zeros(1),
            seed=jnp.zeros((1, 2), jnp.uint32),
            max_tokens=jnp.array([1000]),
            stop_tokens=jnp.full((1, MAX_STOP_TOKENS), -1),
        )
        caches, sequences, report = run_prefill(params, caches, sequences, chunk)
    out = report[0, 3:].tolist()
    for reference, accepted in zip(run["steps"], run["accept_lens"], strict=True):
        tree, step = run_cycle(params, caches, sequences)
        assert tree.tokens[0].tolist() == reference["draft_tokens"]
        assert tree.parents[0].tolist() == reference["parent"]
        assert tree.depth[0].tolist() == reference["pos"]
        assert int(sequences.length[0]) == reference["prefix_len"]
        caches, sequences, report = step
        count = int(report[0, 0])
        assert (int(report[0, 1]), count) == (accepted, accepted + 1)
        out += report[0, 3 : 3 + count].tolist()
    assert out[: len(run["out"])] == run["out"]
    assert np.isfinite(sequences.draft_hidden).all()
