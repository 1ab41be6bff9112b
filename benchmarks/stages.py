"""The stages of a cycle as programs of their own, timed one by one: the functions that `cycle` calls.

Apart they take a little longer than together, because results pass from one to the next through memory.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxspec.config import TreeShape
from jaxspec.decoding.commit import advance, commit
from jaxspec.decoding.cycle import propose
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.extend import extend
from jaxspec.decoding.state import State, gather
from jaxspec.decoding.verify import accept, verify

Timer = Callable[[Callable[[], Any]], list[float]]
"""Returns the milliseconds of a call, several times."""


def time_parts(
    merge: Callable[[dict], Models], params: dict, state: State, rows: Any, page_table: Any, tree: TreeShape, timer: Timer
) -> tuple[dict[str, list[float]], State]:
    """Milliseconds of every stage, and the state afterwards.

    Takes the arguments of a cycle: the state rows [b] and page table [b, p] of sequences in the middle of decoding. The state
    is consumed.
    """

    @jax.jit
    def draft_part(params, state, batch):
        return propose(merge(params), state, batch, tree).tree

    @jax.jit
    def verify_part(params, state, batch, drafted):
        unread: Any = None  # only log probabilities need the logits later
        return verify(merge(params), state, batch, drafted)._replace(logits=unread)

    def commit_part(state, batch, drafted, verified):
        accepted = accept(drafted, verified.target_tokens, batch, tree.num_steps)
        return advance(commit(state, batch, verified, accepted), batch, accepted), accepted

    def extend_part(state, params, batch, verified, accepted):
        return extend(merge(params), state, batch, verified, accepted), None

    batch = jax.jit(gather)(state, rows, page_table)
    drafted = draft_part(params, state, batch)
    verified = verify_part(params, state, batch, drafted)
    parts = {
        "draft": timer(lambda: draft_part(params, state, batch)),
        "verify": timer(lambda: verify_part(params, state, batch, drafted)),
    }
    parts["accept and commit"], state, accepted = time_in_place(timer, commit_part, state, batch, drafted, verified)
    if tree.num_steps:
        parts["extend"], state, _ = time_in_place(timer, extend_part, state, params, batch, verified, accepted)
    return parts, state


def time_in_place(
    timer: Timer, part: Callable[..., tuple[State, Any]], state: State, *others: Any
) -> tuple[list[float], State, Any]:
    """Milliseconds of a stage that updates the state in place; the state and the other result of the last call."""
    program = jax.jit(part, donate_argnums=0)
    held: dict[str, Any] = {"state": state, "other": None}

    def call():
        held["state"], held["other"] = program(held["state"], *others)
        return held["state"]

    return timer(call), held["state"], held["other"]
