"""One cycle of speculative decoding: draft a tree, verify it, commit what the target agrees with, extend the head.

This is the whole algorithm. Plain decoding is the same cycle with an empty tree (num_steps = 0). Sizes are static, so
a cycle is one compiled program; docs/structure.md follows one token through it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import SpecConfig
from jaxspec.spec.commit import commit
from jaxspec.spec.draft import DraftWindow, draft
from jaxspec.spec.extend import extend
from jaxspec.spec.sampling import Logprobs, Thresholds, logprobs_if, logprobs_of
from jaxspec.spec.state import Drafted, Models, Sequences, State, StepOutput, last, put, take, write_history
from jaxspec.spec.tree import Tree, build_tree, root_only
from jaxspec.spec.verify import RUNNING, Accepted, Verified, accept, report, verify
from jaxspec.typing import Array, Bool, Int, KeysValues


@dataclass(frozen=True)
class CycleOptions:
    """What is the same for all cycles of an engine."""

    window: DraftWindow | None = None
    """What of its cache the head sees; None: all."""
    thresholds: Thresholds | None = None
    """Accept drafts that the target would not have chosen. None, the default, is lossless."""


LOSSLESS = CycleOptions()


def cycle(
    models: Models,
    state: State,
    rows: Int[Array, " b"],
    page_table: Int[Array, "b p"],
    *,
    spec: SpecConfig,
    options: CycleOptions = LOSSLESS,
) -> StepOutput:
    """Advances the sequences in the given state rows by 1 .. num_steps + 1 tokens each.

    Before a cycle with a tree the head must not lag behind (extend.catch_up).
    """
    now, settings = take(state.sequences, rows), take(state.settings, rows)
    tree = draft_tree(models, state.caches.draft, now, page_table, spec, options.window)
    verified = verify(models, state, rows, page_table, now, settings, tree, options.thresholds)
    accepted = accept(tree, verified.target_tokens, now, settings.stop_tokens, spec.num_steps)

    steps = jnp.arange(spec.num_steps + 1, dtype=jnp.int32)
    write = steps < accepted.emitted[:, None]
    slots = now.length[:, None] + steps
    target_cache = commit(state.caches.target, verified.window, page_table, accepted.path, slots, write)
    after = now._replace(
        length=now.length + accepted.emitted,
        root=jnp.where(accepted.emitted > 0, last(accepted.tokens, accepted.emitted), now.root),
        remaining=now.remaining - accepted.emitted,
        done=now.done | (accepted.finish != RUNNING),
    )
    state = state._replace(
        caches=state.caches._replace(target=target_cache),
        history=write_history(state.history, rows, now.length + 1, accepted.tokens, accepted.emitted),
    )
    if models.head is not None and spec.num_steps == 0:
        state, after = lag_behind(state, rows, verified, now, after)
    elif models.head is not None:
        features = jnp.take_along_axis(verified.features, accepted.path[:, :, None], 1)
        begin = now.length + 1
        draft_cache, hidden = extend(
            models.head, models.target, state.caches.draft, page_table, features, accepted.tokens, begin, begin, write,
            options.window,
        )  # fmt: skip
        after = after._replace(draft_hidden=jnp.where(write[:, :1], last(hidden, accepted.emitted), now.draft_hidden))
        state = state._replace(caches=state.caches._replace(draft=draft_cache))
    wants_logprobs = settings.wants_logprobs & ~now.done
    return StepOutput(
        state=state._replace(sequences=put(state.sequences, rows, after)),
        report=report(accepted),
        logprobs=logprobs(verified, accepted, wants_logprobs),
        drafted=Drafted(tree.tokens, tree.parents, accepted.path),
    )


def draft_tree(
    models: Models,
    draft_cache: tuple[KeysValues, ...],
    now: Sequences,
    page_table: Int[Array, "b p"],
    spec: SpecConfig,
    window: DraftWindow | None,
) -> Tree:
    """The head's best tree below each root, or the root alone for plain decoding."""
    if spec.num_steps == 0:
        return root_only(now.root)
    assert models.head is not None, "the engine refuses a tree without a head"
    candidates = draft(models.head, models.target, draft_cache, page_table, now.length, now.draft_hidden, spec, window)
    return build_tree(now.root, candidates, spec.num_draft_tokens, spec.num_steps)


def lag_behind(
    state: State, rows: Int[Array, " b"], verified: Verified, now: Sequences, after: Sequences
) -> tuple[State, Sequences]:
    """A plain cycle only keeps the feature that the head will need (extend.catch_up), so it costs no more than without a head."""
    emitted = after.length - now.length  # 0 or 1
    place = jnp.where(emitted > 0, now.lag, state.lag_features.shape[1])
    features = state.lag_features.at[rows, place].set(verified.features[:, 0], mode="drop")
    return state._replace(lag_features=features), after._replace(lag=now.lag + emitted)


@jax.named_scope("logprobs")
def logprobs(verified: Verified, accepted: Accepted, wanted: Bool[Array, " b"]) -> Logprobs:
    """Of the emitted tokens; computed only if a request of the batch wants them."""

    def compute() -> Logprobs:
        return logprobs_of(jnp.take_along_axis(verified.logits, accepted.path[:, :, None], 1), accepted.tokens)

    return logprobs_if(wanted, compute)
