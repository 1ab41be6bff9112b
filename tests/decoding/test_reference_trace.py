"""The reference implementation's own traces are reproduced: every tree, accept length and token."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.prefill import prefill
from jaxspec.decoding.state import admit
from jaxspec.decoding.tree import ancestor_mask
from jaxspec.sampling_params import SamplingParams
from jaxspec.tree_shape import TreeShape
from tests.decoding.rows import admission_of, chunk_of, models_of, poisoned_state
from tests.reference import head, target, trace
from tests.sets import exhaustive

PAGES, PAGE_SIZE, CHUNK = 12, 16, 8
ROWS, PAGE_TABLE = jnp.array([0]), jnp.arange(PAGES)[None]
NAMES = {"e3_trained_sgl3_4_16_t0": pytest.param, "e1_bias_t0": exhaustive}
CASES = [make(case, number) for case, make in NAMES.items() for number in range(len(trace(case)["runs"]))]
GREEDY = SamplingParams(temperature=0, max_tokens=1000)


@cache
def programs(case: str):
    """The head of a case, its prefill and its cycle."""
    settings = trace(case)
    drafting, params = head(settings["head"]), (target().params, head(settings["head"]).params)
    spec = TreeShape(settings["depth"] + 1, settings["top_k"], settings["total_token"])

    @jax.jit
    def run_prefill(params, state, chunk):
        return prefill(models_of(target(), drafting, params), state, chunk)

    @jax.jit
    def run_cycle(params, state):
        step = cycle(models_of(target(), drafting, params), state, ROWS, PAGE_TABLE, tree=spec)
        return step, jnp.sum(ancestor_mask(step.drafted.parents, spec.num_steps), -1) - 1  # the depth, as build_tree has it

    return drafting, partial(run_prefill, params), partial(run_cycle, params)


@pytest.mark.parametrize(("case", "number"), CASES)
def test_trace(case, number):
    (drafting, run_prefill, run_cycle), run = programs(case), trace(case)["runs"][number]
    prompt, length = run["prompt"], PAGES * PAGE_SIZE
    state = poisoned_state(target(), drafting, rows=1, pages=PAGES, page_size=PAGE_SIZE, max_length=length)
    vocab_size = target().config.vocab_size
    state = admit(state, admission_of(GREEDY, prompt, rows=1, max_length=length, vocab_size=vocab_size))
    for first in range(0, len(prompt), CHUNK):
        part = prompt[first : first + CHUNK]
        is_last = first + len(part) == len(prompt)
        step = run_prefill(state, chunk_of(part, PAGE_TABLE, width=CHUNK, first_slot=first, is_last=is_last))
        state = step.state
    out = step.report[0, 3:].tolist()
    for expected, accepted in zip(run["steps"], run["accept_lens"], strict=True):
        step, depth = run_cycle(state)
        assert step.drafted.tokens[0].tolist() == expected["draft_tokens"]
        assert step.drafted.parents[0].tolist() == expected["parent"]
        assert depth[0].tolist() == expected["pos"]
        assert int(state.sequences.length[0]) == expected["prefix_len"]
        state = step.state
        count = int(step.report[0, 0])
        assert (int(step.report[0, 1]), count) == (accepted, accepted + 1)
        out += step.report[0, 3 : 3 + count].tolist()
    assert out[: len(run["out"])] == run["out"]
    assert state.history[0, : len(prompt) + len(out)].tolist() == prompt + out
    assert np.isfinite(state.draft.hidden).all()
