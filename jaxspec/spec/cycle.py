"""One cycle of speculative decoding: draft a tree, verify it, commit what the target agrees with, extend the head.

This is the whole algorithm. Plain decoding is the same cycle with an empty tree (num_steps = 0). Sizes are static, so
a cycle is one compiled program; docs/structure.md follows one token through it.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.config import SpecConfig
from jaxspec.models.head import DraftHead
from jaxspec.models.llama import Llama
from jaxspec.sampling import SamplingKind
from jaxspec.spec.commit import commit, extend
from jaxspec.spec.draft import draft
from jaxspec.spec.state import Caches, Sequences, put, take
from jaxspec.spec.tree import Tree, build_tree, root_only
from jaxspec.spec.verify import RUNNING, Accepted, accept, verify
from jaxspec.typing import Array, Int

REPORT_HEADER = 3
"""Columns of a report before its tokens: emitted tokens, accepted drafts, finish code."""


class Models(NamedTuple):
    """The target, its draft head (None: plain decoding only) and which residual streams of the target the head reads."""

    target: Llama
    head: DraftHead | None
    capture: tuple[int, ...]


class Step(NamedTuple):
    """What a program returns: the new device state, and the one small array that the host reads."""

    caches: Caches
    sequences: Sequences
    report: Int[Array, "b columns"]


def cycle(
    models: Models,
    caches: Caches,
    sequences: Sequences,
    rows: Int[Array, " b"],
    page_table: Int[Array, "b p"],
    *,
    spec: SpecConfig,
    kind: SamplingKind,
) -> Step:
    """Advances the sequences in the given state rows by 1 .. num_steps + 1 tokens each."""
    now = take(sequences, rows)
    tree = draft_tree(models, caches, now, page_table, spec)
    verified = verify(models.target, caches.target, page_table, now, tree, models.capture, kind)
    accepted = accept(tree, verified.wanted, now, spec.num_steps)

    steps = jnp.arange(spec.num_steps + 1, dtype=jnp.int32)
    write = steps < accepted.emitted[:, None]
    slots = now.length[:, None] + steps
    target_cache = commit(caches.target, verified.window, page_table, accepted.path, slots, write)
    draft_cache, draft_hidden = caches.draft, now.draft_hidden
    if models.head is not None:
        features = jnp.take_along_axis(verified.features, accepted.path[:, :, None], 1)
        draft_cache, hidden = extend(
            models.head, models.target, caches.draft, page_table, features, accepted.tokens, now.length + 1, write
        )
        draft_hidden = last(hidden, accepted.emitted)

    after = now._replace(
        length=now.length + accepted.emitted,
        root=jnp.where(accepted.emitted > 0, last(accepted.tokens, accepted.emitted), now.root),
        draft_hidden=draft_hidden,
        remaining=now.remaining - accepted.emitted,
        done=now.done | (accepted.finish != RUNNING),
    )
    return Step(Caches(target_cache, draft_cache), put(sequences, rows, after), report(accepted))


def draft_tree(models: Models, caches: Caches, now: Sequences, page_table: Int[Array, "b p"], spec: SpecConfig) -> Tree:
    """The head's best tree below each root, or the root alone for plain decoding."""
    if spec.num_steps == 0:
        return root_only(now.root)
    assert models.head is not None, "the engine refuses a tree without a head"
    candidates = draft(models.head, models.target, caches.draft, page_table, now.length, now.draft_hidden, spec)
    return build_tree(now.root, candidates, spec.num_draft_tokens, spec.num_steps)


def last(values: Array, count: Int[Array, " b"]) -> Array:
    """values[b, count[b] - 1] of every sequence; entry 0 where count is 0."""
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, 1)[:, 0]


def report(accepted: Accepted) -> Int[Array, "b columns"]:
    """Emitted tokens, accepted drafts, finish code, then the tokens: all that the host needs of a cycle."""
    header = jnp.stack([accepted.emitted, accepted.accepted, accepted.finish], 1)
    return jnp.concatenate([header, accepted.tokens], 1)
