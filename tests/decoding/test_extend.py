"""However tokens get into the caches (in one chunk, after a prefix hit, by plain cycles or by trees), the caches are the same."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.extend import catch_up
from jaxspec.decoding.head_drafter import SlidingWindow
from jaxspec.decoding.prefill import prefill
from jaxspec.decoding.state import ProgramOutput, State, admit
from jaxspec.decoding.verify import REPORT_HEADER
from jaxspec.models.layers import causal_metadata
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.testing import engine_target, oracle_head, random_eagle, random_head
from jaxspec.tree_shape import PLAIN, TreeShape
from jaxspec.typing import KeysValues
from tests.decoding import distribution_in_numpy
from tests.decoding.rows import admission_of, chunk_of, models_of, poisoned_state
from tests.sets import exhaustive

PAGE, PAGES, LENGTH, MAX_LAG = 4, 12, 48, 16
TABLE = jnp.array([[5, 2, 9, 0, 7, 11, 3, 1, 10, 4, 8, 6]])
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 128, 18)]
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, presence_penalty=1.5, seed=5, logprobs=3)
TREE = TreeShape(2, 2, 4)
HEADS = ("EAGLE3", exhaustive("EAGLE"))


@cache
def models(algorithm: str) -> tuple[LoadedTarget, LoadedHead]:
    target = engine_target()
    if algorithm == "ORACLE":  # knows what SAMPLED is going to say
        text = plain_states("EAGLE3", SAMPLED)[-1].history[0, : len(PROMPT) + MAX_LAG + 1].tolist()
        return target, oracle_head(target.config, text)
    return target, random_head(target.config) if algorithm == "EAGLE3" else random_eagle(target.config, num_layers=2)


@cache
def compiled(program: Any, algorithm: str, window: SlidingWindow | None = None, **static):
    """The program as a function of its arrays only."""
    target, head = models(algorithm)

    @jax.jit
    def run(params, *arguments):
        return program(models_of(target, head, params, window=window), *arguments, **static)

    return lambda *arguments: run((target.params, head.params), *arguments)


def fresh(algorithm: str, tokens: list[int], params: SamplingParams = GREEDY, rows: int = 1) -> State:
    """Admitted, with nothing in the caches but NaN. Features that would wrongly be taken for lagging ones are huge."""
    target, head = models(algorithm)
    size = {"pages": rows * PAGES, "page_size": PAGE, "max_length": LENGTH, "max_lag": MAX_LAG}
    state = poisoned_state(target, head, rows=rows, **size)
    features = state.features._replace(lagging=jnp.full_like(state.features.lagging, 1e6))
    state = state._replace(features=features)
    return admit(state, admission_of(params, tokens, rows=rows, max_length=LENGTH, vocab_size=target.config.vocab_size))


def prefilled(algorithm: str, tokens: list[int], params: SamplingParams = GREEDY) -> ProgramOutput:
    """The whole text in one chunk."""
    return compiled(prefill, algorithm)(fresh(algorithm, tokens, params), chunk_of(tokens, TABLE, width=40))


def flat(layers: tuple[KeysValues, ...]) -> np.ndarray:
    """[slots, everything] of the one sequence, in the order of its slots."""
    arrays = [np.asarray(array)[np.asarray(TABLE[0])].reshape(PAGES * PAGE, -1) for layer in layers for array in layer]
    return np.concatenate(arrays, 1)


def assert_close(found: Any, expected: Any, name: str) -> None:
    """Up to rounding, as differently shaped matrix products have it."""
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=name)


def caches(state: State) -> dict[str, tuple[KeysValues, ...]]:
    return {"target": state.cache, "draft": state.draft.cache}


def with_caches(state: State, change) -> State:
    """With both caches changed."""
    cache, draft = (jax.tree.map(change, each) for each in (state.cache, state.draft.cache))
    return state._replace(cache=cache, draft=state.draft._replace(cache=draft))


def assert_same_caches(found: State, expected: State, length: int) -> None:
    """Target slots 0 .. length - 1 and head slots 1 .. length; all others were never written."""
    for name, slots in {"target": range(length), "draft": range(1, length + 1)}.items():
        left, right = flat(caches(found)[name]), flat(caches(expected)[name])
        assert_close(left[slots], right[slots], name)
        assert np.isnan(np.delete(left, slots, 0)).all() and np.isnan(np.delete(right, slots, 0)).all()


def assert_same(found: State, expected: State) -> None:
    """The caches, and all that the next cycle starts from."""
    length = int(expected.sequences.length[0])
    assert (int(found.sequences.length[0]), int(found.sequences.root[0])) == (length, int(expected.sequences.root[0]))
    assert found.history[0, : length + 1].tolist() == expected.history[0, : length + 1].tolist()
    assert found.features.lag.tolist() == expected.features.lag.tolist() == [0]
    assert_close(found.draft.hidden, expected.draft.hidden, "hidden")
    assert_same_caches(found, expected, length)


def with_only_prefix(fresh: State, of: State, cached: int) -> State:
    """With the caches `of` another request with the same first pages: NaN from slot `cached` on."""
    shared = TABLE[0, : cached // PAGE]

    def keep(pages):
        return jnp.full_like(pages, jnp.nan).at[shared].set(pages[shared])

    kept = with_caches(of, keep)
    return fresh._replace(cache=kept.cache, draft=fresh.draft._replace(cache=kept.draft.cache))


@pytest.mark.parametrize("algorithm", HEADS)
@pytest.mark.parametrize("cached", range(PAGE, len(PROMPT), PAGE))
def test_a_prefix_hit_leaves_what_prefilling_the_whole_prompt_leaves(algorithm, cached):
    """The row's last user left a feature of NaN, which must not be carried over."""
    whole = prefilled(algorithm, PROMPT)
    state = with_only_prefix(fresh(algorithm, PROMPT), whole.state, cached)
    chunk = chunk_of(PROMPT[cached - 1 :], TABLE, width=24, first_slot=cached - 1, cached=cached)
    hit = compiled(prefill, algorithm)(state, chunk)
    assert hit.report.tolist() == whole.report.tolist()
    assert_same(hit.state, whole.state)
    for before, after in zip(caches(state).values(), caches(hit.state).values(), strict=True):  # shared pages belong to others too
        assert np.array_equal(flat(before)[:cached], flat(after)[:cached], equal_nan=True)


@pytest.mark.parametrize("size", [1, 4, 5, 17])
@pytest.mark.parametrize("cached", [0, 8])
def test_chunks_of_any_size_leave_the_same(size, cached):
    whole = prefilled("EAGLE3", PROMPT)
    state = fresh("EAGLE3", PROMPT)
    if cached:
        state = with_only_prefix(state, whole.state, cached)
    begin = max(cached - 1, 0)
    for first in range(begin, len(PROMPT), size):
        part = PROMPT[first : first + size]
        is_last = first + len(part) == len(PROMPT)
        known = cached if first == begin else first
        if is_last or len(part) == size:
            chunk = chunk_of(part, TABLE, width=24, first_slot=first, cached=known, is_last=is_last)
            step = compiled(prefill, "EAGLE3")(state, chunk)
            state = step.state
            assert bool(state.sequences.done[0]) != is_last and (int(step.report[0, 0]) == 1) == is_last
    assert_same(state, whole.state)


@cache
def plain_states(algorithm: str, params: SamplingParams = GREEDY) -> list[State]:
    """After 0 .. MAX_LAG plain cycles."""
    states = [prefilled(algorithm, PROMPT, params).state]
    for _ in range(MAX_LAG):
        states.append(compiled(cycle, algorithm, tree=PLAIN)(states[-1], jnp.array([0]), TABLE).state)
    return states


@pytest.mark.variants
@pytest.mark.parametrize("algorithm", HEADS)
@pytest.mark.parametrize("cycles", range(MAX_LAG + 1))
def test_plain_cycles_and_catching_up_leave_what_prefilling_the_same_text_leaves(algorithm, cycles):
    state = plain_states(algorithm)[cycles]
    text = state.history[0, : len(PROMPT) + cycles].tolist()
    assert state.features.lag.tolist() == [cycles]
    for before, after in zip(*(jax.tree.leaves(each.draft) for each in (plain_states(algorithm)[0], state)), strict=True):
        assert np.array_equal(before, after, equal_nan=True), "the head is left out meanwhile"
    assert_same(compiled(catch_up, algorithm)(state, jnp.array([0]), TABLE), prefilled(algorithm, text).state)


@pytest.mark.variants
@pytest.mark.parametrize("algorithm", HEADS)
@pytest.mark.parametrize("cycles", [1, 4, 9])
def test_trees_leave_what_plain_cycles_and_catching_up_leave(algorithm, cycles):
    """The budget makes trees stop at the same length."""
    state = prefilled(algorithm, PROMPT, SamplingParams(temperature=0, max_tokens=cycles + 1)).state
    while not state.sequences.done[0]:
        state = compiled(cycle, algorithm, tree=TREE)(state, jnp.array([0]), TABLE).state
    assert int(state.sequences.remaining[0]) == 0
    assert_same(state, compiled(catch_up, algorithm)(plain_states(algorithm)[cycles], jnp.array([0]), TABLE))


@pytest.mark.variants
def test_catching_up_twice_and_going_on():
    """Plain, catch up, tree, plain, catch up: as one prefill of the text."""
    state, rows = prefilled("EAGLE3", PROMPT).state, jnp.array([0])
    for spec, count in ((PLAIN, 3), (TREE, 2), (PLAIN, 2), (PLAIN, 1), (TREE, 1), (PLAIN, 5)):
        for _ in range(count):
            state = compiled(cycle, "EAGLE3", tree=spec)(state, rows, TABLE).state
        state = compiled(catch_up, "EAGLE3")(state, rows, TABLE)
    again = compiled(catch_up, "EAGLE3")(state, rows, TABLE)
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(*map(jax.tree.leaves, (state, again)), strict=True))
    assert_same(state, prefilled("EAGLE3", state.history[0, : int(state.sequences.length[0])].tolist()).state)


@pytest.mark.variants
def test_rows_of_a_batch_catch_up_each_by_its_own_number():
    """Row 0 ends after three plain cycles, row 1 goes on; both are then what they are alone."""
    table = jnp.concatenate([TABLE, TABLE + PAGES])
    state = compiled(prefill, "EAGLE3")(fresh("EAGLE3", PROMPT, rows=2), chunk_of(PROMPT, table, width=24)).state
    state = state._replace(sequences=state.sequences.replaced(remaining=jnp.array([3, 100])))
    for _ in range(7):
        state = compiled(cycle, "EAGLE3", tree=PLAIN)(state, jnp.arange(2), table).state
    assert state.features.lag.tolist() == [3, 7] and state.sequences.done.tolist() == [True, False]
    state = compiled(catch_up, "EAGLE3")(state, jnp.arange(2), table)
    for row, cycles in enumerate((3, 7)):
        pages = slice(row * PAGES, (row + 1) * PAGES)
        of_pages = with_caches(state, lambda array, pages=pages: array[pages])
        rows = state._replace(cache=None, draft=state.draft._replace(cache=None, calibration=None))
        of_row = jax.tree.map(lambda array, row=row: array[row : row + 1], rows)
        of_row = of_row._replace(cache=of_pages.cache, draft=of_pages.draft._replace(hidden=of_row.draft.hidden))
        text = of_row.history[0, : len(PROMPT) + cycles].tolist()
        assert_same(of_row, prefilled("EAGLE3", text).state)


@pytest.mark.variants
@pytest.mark.parametrize(("size", "sink"), [exhaustive(6, 0), (6, 2), exhaustive(3, 4)])
def test_a_sliding_window_hides_what_is_outside_it(size, sink):
    """With NaN in all hidden slots of the head's cache, trees still are what they are without."""
    window, rows = SlidingWindow(size, sink), jnp.array([0])
    state = compiled(catch_up, "EAGLE3")(plain_states("EAGLE3")[10], rows, TABLE)
    length = int(state.sequences.length[0]) + 1
    first = (length - size) // PAGE * PAGE if sink else length - size
    hidden = range(-(-sink // PAGE) * PAGE, first)
    assert len(hidden) > 10
    pages = TABLE[0, jnp.array(hidden) // PAGE], jnp.array(hidden) % PAGE
    draft = jax.tree.map(lambda array: array.at[pages].set(jnp.nan), state.draft.cache)
    poisoned = state._replace(draft=state.draft._replace(cache=draft))
    step = compiled(cycle, "EAGLE3", window, tree=TREE)
    clean, spoiled = step(state, rows, TABLE), step(poisoned, rows, TABLE)
    assert clean.report.tolist() == spoiled.report.tolist()
    assert np.array_equal(clean.state.draft.hidden, spoiled.state.draft.hidden)
    everything = compiled(cycle, "EAGLE3", tree=TREE)(state, rows, TABLE)
    assert not np.array_equal(clean.state.draft.hidden, everything.state.draft.hidden)


@cache
def forward_of_padded_text():
    target = engine_target()

    @jax.jit
    def run(params, tokens):
        module = target.merge(params)
        return module.logits(module(tokens, causal_metadata(1, LENGTH)).hidden)

    return lambda tokens: run(target.params, tokens)


def whole_forward(text: list[int]) -> np.ndarray:
    """Logits of the token after each token of the text, from one pass over all of it. (No token sees the padding after it.)"""
    return np.asarray(forward_of_padded_text()(jnp.array([text + [0] * (LENGTH - len(text))]))[0, : len(text)])


def log_probabilities(text: list[int]) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(whole_forward(text), -1))


def test_the_first_token_is_penalized_for_the_whole_prompt():
    """The prompt's last token would be the likeliest one, and with its penalty just isn't."""
    newest, logits = PROMPT[-1], whole_forward(PROMPT)[-1]
    assert newest not in PROMPT[:-1]
    penalized = distribution_in_numpy.adjust_logits(logits, PROMPT, len(PROMPT), SamplingParams(repetition_penalty=5.0))
    others = np.delete(penalized, newest).max()
    bias = others - (logits[newest] + penalized[newest]) / 2
    params = SamplingParams(temperature=0, repetition_penalty=5.0, logit_bias={newest: float(bias)})
    assert penalized[newest] + bias < others - 0.1 and logits[newest] + bias > others + 0.1
    root = int(prefilled("EAGLE3", PROMPT, params).state.sequences.root[0])
    assert root == int(np.argmax(np.where(np.arange(len(penalized)) == newest, -np.inf, penalized)))


@pytest.mark.variants
@pytest.mark.parametrize(("size", "width"), [exhaustive(18, 40), exhaustive(18, 18), (5, 24), exhaustive(7, 7)])
def test_prompt_logprobs_are_those_of_a_whole_forward(size, width):
    expected = log_probabilities(PROMPT)
    state = fresh("EAGLE3", PROMPT, SamplingParams(temperature=0.5, top_k=3, presence_penalty=1.0, prompt_logprobs=0))
    chosen, top_ids, top = [], [], []
    for first in range(0, len(PROMPT), size):
        part = PROMPT[first : first + size]
        is_last = first + len(part) == len(PROMPT)
        chunk = chunk_of(part, TABLE, width=width, first_slot=first, is_last=is_last)
        step = compiled(prefill, "EAGLE3", scores=True)(state, chunk)
        state, found = step.state, step.prompt_logprobs
        chosen += found.chosen[0, : len(part)].tolist()
        top_ids += found.top_ids[0, : len(part)].tolist()
        top += found.top[0, : len(part)].tolist()
    assert not np.any(step.logprobs.chosen), "nobody asked for the output's"
    following = expected[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(chosen[:-1], following, rtol=1e-4, atol=1e-4)
    best = np.argsort(-expected, -1)[:, :MAX_LOGPROBS]
    assert top_ids == best.tolist()
    np.testing.assert_allclose(top, np.take_along_axis(expected, best, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.variants
@pytest.mark.parametrize(("algorithm", "spec"), [("EAGLE3", PLAIN), exhaustive("EAGLE3", TREE), ("ORACLE", TREE)], ids=str)
def test_logprobs_of_the_output_are_those_of_a_whole_forward(algorithm, spec):
    """Before temperature and penalties, for every emitted token, drafts and bonus alike."""
    step = prefilled(algorithm, PROMPT, SAMPLED)
    text, found = [*PROMPT, int(step.report[0, REPORT_HEADER])], [float(step.logprobs.chosen[0, 0])]
    for _ in range(4):
        step = compiled(cycle, algorithm, tree=spec)(step.state, jnp.array([0]), TABLE)
        count = int(step.report[0, 0])
        assert algorithm != "ORACLE" or count == TREE.num_steps + 1, "a walk past the root's second child"
        text += step.report[0, REPORT_HEADER : REPORT_HEADER + count].tolist()
        found += step.logprobs.chosen[0, :count].tolist()
        best = np.argsort(-log_probabilities(text[:-1])[-1])[:MAX_LOGPROBS]
        assert step.logprobs.top_ids[0, count - 1].tolist() == best.tolist()
    expected = log_probabilities(text)[np.arange(len(PROMPT) - 1, len(text) - 1), text[len(PROMPT) :]]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.variants
def test_logprobs_that_nobody_wants_are_zeros():
    step = prefilled("EAGLE3", PROMPT)
    assert not any(np.any(array) for array in step.logprobs) and step.prompt_logprobs is None
    step = compiled(cycle, "EAGLE3", tree=TREE)(step.state, jnp.array([0]), TABLE)
    assert not any(np.any(array) for array in step.logprobs) and step.prompt_logprobs is None
