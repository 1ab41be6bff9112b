"""The reference implementation's own traces are reproduced: every tree, accept length and token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SpecConfig
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import Models, cycle, draft_tree
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, empty_sequences, take
from jaxspec.typing import KeysValues
from tests.reference import head, target, trace

PAGES, PAGE_SIZE, CHUNK = 12, 16, 8
ROWS, PAGE_TABLE = jnp.array([0]), jnp.arange(PAGES)[None]
CASES = [(case, number) for case in ("e3_trained_sgl3_4_16_t0", "e1_bias_t0") for number in range(len(trace(case)["runs"]))]


class Reference:
    """The two programs of one case."""

    def __init__(self, case: str):
        settings = trace(case)
        self.head = head(settings["head"])
        self.spec = SpecConfig(settings["depth"] + 1, settings["top_k"], settings["total_token"])
        self.params = (target().params, self.head.params)
        self.prefill = jax.jit(self._prefill)
        self.cycle = jax.jit(self._cycle)

    def models(self, params: tuple[dict, dict]) -> Models:
        return Models(target().merge(params[0]), self.head.merge(params[1]), self.head.config.captured_layers)

    def _prefill(self, params, caches, sequences, chunk):
        return prefill(self.models(params), caches, sequences, chunk, kind=SamplingKind.GREEDY)

    def _cycle(self, params, caches, sequences):
        models = self.models(params)
        tree = draft_tree(models, caches, take(sequences, ROWS), PAGE_TABLE, self.spec)
        return tree, cycle(models, caches, sequences, ROWS, PAGE_TABLE, spec=self.spec, kind=SamplingKind.GREEDY)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {case: Reference(case) for case, _ in CASES}


def poisoned_cache(layers: int) -> tuple[KeysValues, ...]:
    """Pages full of NaN: whatever reads a slot that was never written spoils everything after it."""
    config = target().config
    pages = jnp.full((PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim), jnp.nan)
    return tuple(KeysValues(pages, pages) for _ in range(layers))


@pytest.mark.parametrize(("case", "number"), CASES)
def test_trace(references, case, number):
    reference, run = references[case], trace(case)["runs"][number]
    prompt, params = run["prompt"], reference.params
    caches = Caches(poisoned_cache(8), poisoned_cache(1))
    sequences = empty_sequences(1, 64, reference.head.config.feature_size, jnp.dtype(jnp.float32))
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
        caches, sequences, report = reference.prefill(params, caches, sequences, chunk)
    out = report[0, 3:].tolist()
    for expected, accepted in zip(run["steps"], run["accept_lens"], strict=True):
        tree, step = reference.cycle(params, caches, sequences)
        assert tree.tokens[0].tolist() == expected["draft_tokens"]
        assert tree.parents[0].tolist() == expected["parent"]
        assert tree.depth[0].tolist() == expected["pos"]
        assert int(sequences.length[0]) == expected["prefix_len"]
        caches, sequences, report = step
        count = int(report[0, 0])
        assert (int(report[0, 1]), count) == (accepted, accepted + 1)
        out += report[0, 3 : 3 + count].tolist()
    assert out[: len(run["out"])] == run["out"]
    assert np.isfinite(sequences.draft_hidden).all()
