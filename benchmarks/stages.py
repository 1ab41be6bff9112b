"""The parts of a cycle as programs of their own: what cycle() does between its lines, cut at the names of its stages.

Apart they take a little longer than together, because what one hands to the next goes through memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import SpecConfig
from jaxspec.spec.commit import commit
from jaxspec.spec.cycle import draft_tree
from jaxspec.spec.extend import extend
from jaxspec.spec.state import Models, State, take
from jaxspec.spec.verify import accept, verify

Timer = Callable[[Callable[[], Any]], list[float]]
"""Milliseconds of a call, several times."""


class Batch(NamedTuple):
    """Sequences in the middle of decoding: what a cycle's program takes beside the weights."""

    state: State
    rows: Any
    page_table: Any


def time_parts(
    merge: Callable[[dict], Models], params: dict, batch: Batch, spec: SpecConfig, timer: Timer
) -> tuple[dict[str, list[float]], State]:
    """Milliseconds of every part, and the state afterwards: that of `batch` is consumed."""
    state, rows, table = batch
    now, settings = take(state.sequences, rows), take(state.settings, rows)

    @jax.jit
    def draft_part(params, cache, now, table):
        return draft_tree(merge(params), cache, now, table, spec, None)

    @jax.jit
    def verify_part(params, state, rows, table, tree):
        seen = verify(merge(params), state, rows, table, take(state.sequences, rows), take(state.settings, rows), tree)
        return seen.target_tokens, seen.features, seen.window

    def commit_part(cache, tree, wanted, window, now, settings, table):
        accepted = accept(tree, wanted, now, settings.stop_tokens, spec.num_steps)
        steps = jnp.arange(spec.num_steps + 1, dtype=jnp.int32)
        write = steps < accepted.emitted[:, None]
        return commit(cache, window, table, accepted.path, now.length[:, None] + steps, write), (accepted, write)

    def extend_part(cache, params, features, accepted, write, now, table):
        models = merge(params)
        assert models.head is not None
        chosen, begin = jnp.take_along_axis(features, accepted.path[:, :, None], 1), now.length + 1
        return extend(models.head, models.target, cache, table, chosen, accepted.tokens, begin, begin, write)

    to_draft = (params, state.caches.draft, now, table)
    tree = draft_part(*to_draft)
    to_verify = (params, state, rows, table, tree)
    wanted, features, window = verify_part(*to_verify)
    parts = {"draft": timer(lambda: draft_part(*to_draft)), "verify": timer(lambda: verify_part(*to_verify))}
    caches = state.caches
    del to_draft, to_verify, batch  # what they hold is about to be consumed
    parts["accept and commit"], target, (accepted, write) = time_in_place(
        timer, commit_part, caches.target, tree, wanted, window, now, settings, table
    )
    if not spec.num_steps:
        return parts, state._replace(caches=caches._replace(target=target))
    parts["extend"], head, _ = time_in_place(timer, extend_part, caches.draft, params, features, accepted, write, now, table)
    return parts, state._replace(caches=caches._replace(target=target, draft=head))


def time_in_place(timer: Timer, part: Callable[..., tuple[Any, Any]], cache: Any, *others: Any) -> tuple[list[float], Any, Any]:
    """Milliseconds of a part that updates the cache in place; the cache and the other result of the last call."""
    program, held = jax.jit(part, donate_argnums=0), {"cache": cache, "other": None}

    def call():
        held["cache"], held["other"] = program(held["cache"], *others)
        return held["other"]

    return timer(call), held["cache"], held["other"]
