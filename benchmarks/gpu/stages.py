"""The four parts of a cycle as programs of their own, and the whole beside them."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.cycles import lower_cycle, time_steps
from benchmarks.gpu.kernels import Cases
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.state import Batch, make_batch
from jaxspec.config import SpecConfig
from jaxspec.spec.commit import commit
from jaxspec.spec.cycle import draft_tree
from jaxspec.spec.extend import extend
from jaxspec.spec.verify import accept, verify


def stages(lab: Lab) -> Cases:
    """Per tree one case, which measures all parts in turn, at batch 1 and the context of the goals."""
    for spec in lab.size.staged_trees:
        case = {"tree": str(spec), "batch": 1, "context": lab.size.goal_context}
        yield case, partial(time_stages, lab, spec)


def time_stages(lab: Lab, spec: SpecConfig) -> dict:
    """Milliseconds of each part, of their sum, and of the whole cycle."""
    made = make_batch(lab, 1, lab.size.goal_context)
    try:
        parts = time_parts(lab, spec, made)
        made.put_back()
        whole = lower_cycle(lab, spec, 1, lab.size.goal_context).compile()
        whole_ms, _ = time_steps(lab, made, lambda state: whole(lab.params, state, made.rows, made.page_table))
    finally:
        made.delete()
    total = sum(median(values) for values in parts.values())
    return {"milliseconds": {**parts, "whole cycle": whole_ms}, "sum_over_whole": total / median(whole_ms)}


def time_parts(lab: Lab, spec: SpecConfig, made: Batch) -> dict[str, list[float]]:
    """What cycle() does between its lines, cut at the names of its stages."""
    table, state = made.page_table, made.state
    now = state.sequences  # the rows of the batch are all rows there are

    @jax.jit
    def draft_part(params, cache, now, table):
        return draft_tree(lab.merge(params), cache, now, table, spec, None)

    @jax.jit
    def verify_part(params, state, rows, table, tree):
        seen = verify(lab.merge(params), state, rows, table, state.sequences, state.settings, tree)
        return seen.wanted, seen.features, seen.window

    def commit_part(cache, tree, wanted, window, now, settings, table):
        accepted = accept(tree, wanted, now, settings.stop_tokens, spec.num_steps)
        steps = jnp.arange(spec.num_steps + 1, dtype=jnp.int32)
        write = steps < accepted.emitted[:, None]
        return commit(cache, window, table, accepted.path, now.length[:, None] + steps, write), (accepted, write)

    def extend_part(cache, params, features, accepted, write, now, table):
        models = lab.merge(params)
        assert models.head is not None
        chosen, begin = jnp.take_along_axis(features, accepted.path[:, :, None], 1), now.length + 1
        return extend(models.head, models.target, cache, table, chosen, accepted.tokens, begin, begin, write)

    to_draft = (lab.params, state.caches.draft, now, table)
    to_verify = (lab.params, state, made.rows, table, draft_part(*to_draft))
    wanted, features, window = verify_part(*to_verify)
    parts = {
        "draft": lab.time(lambda: draft_part(*to_draft)).values,
        "verify": lab.time(lambda: verify_part(*to_verify)).values,
    }
    caches, tree = state.caches, to_verify[-1]
    del to_draft, to_verify  # what they hold is about to be consumed
    parts["accept and commit"], target, (accepted, write) = time_in_place(
        lab, commit_part, caches.target, tree, wanted, window, now, state.settings, table
    )
    made.state = state._replace(caches=caches._replace(target=target))
    parts["extend"], head, _ = time_in_place(lab, extend_part, caches.draft, lab.params, features, accepted, write, now, table)
    made.state = state._replace(caches=caches._replace(target=target, draft=head))
    return parts


def time_in_place(lab: Lab, part: Callable[..., tuple[Any, Any]], cache: Any, *others: Any) -> tuple[list[float], Any, Any]:
    """Milliseconds of a part that updates the cache in place; the cache and the other result of the last call."""
    program, held = jax.jit(part, donate_argnums=0), {"cache": cache, "other": None}

    def call():
        held["cache"], held["other"] = program(held["cache"], *others)
        return held["other"]

    return lab.time(call).values, held["cache"], held["other"]
