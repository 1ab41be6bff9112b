"""Prefill: a chunk of one prompt through the target and the head; the last chunk also samples the first token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.layers import Rows
from jaxspec.sampling import SamplingKind, choose
from jaxspec.spec.commit import commit, extend
from jaxspec.spec.cycle import Models, Step, last, report
from jaxspec.spec.state import Caches, Sequences, put, take
from jaxspec.spec.verify import RUNNING, Accepted, cut
from jaxspec.typing import Array, Bool, Float, Int, UInt


class Chunk(NamedTuple):
    """Prompt tokens first_slot .. first_slot + size - 1 of one request, and what its state row needs to know."""

    row: Int[Array, " b"]
    page_table: Int[Array, "b p"]
    tokens: Int[Array, "b w"]
    """Padded behind `size`; what the padding holds does not matter."""
    first_slot: Int[Array, " b"]
    size: Int[Array, " b"]
    is_last: Bool[Array, " b"]
    """The prompt ends with this chunk."""
    temperature: Float[Array, " b"]
    seed: UInt[Array, "b 2"]
    max_tokens: Int[Array, " b"]
    stop_tokens: Int[Array, "b t"]


@jax.named_scope("prefill")
def prefill(models: Models, caches: Caches, sequences: Sequences, chunk: Chunk, *, kind: SamplingKind) -> Step:
    """Commits the chunk to both caches. After the last chunk the target holds slots 0 .. L-1 and the head 1 .. L."""
    batch, width = chunk.tokens.shape
    steps = jnp.arange(width, dtype=jnp.int32)
    positions = chunk.first_slot[:, None] + steps
    causal = jnp.broadcast_to(steps[:, None] >= steps, (batch, width, width))
    rows = Rows(positions, chunk.page_table, jnp.zeros_like(chunk.first_slot), chunk.first_slot, causal)
    out = models.target(chunk.tokens, rows, caches.target, models.capture)
    path = jnp.broadcast_to(steps, (batch, width))
    in_prompt = steps < chunk.size[:, None]
    target_cache = commit(caches.target, out.window, chunk.page_table, path, positions, in_prompt)

    length = chunk.first_slot + chunk.size
    logits = models.target.logits(last(out.hidden, chunk.size)[:, None])
    root = choose(logits, length[:, None], chunk.temperature, chunk.seed, kind)
    before = take(sequences, chunk.row)._replace(remaining=chunk.max_tokens, stop_tokens=chunk.stop_tokens, done=~chunk.is_last)
    emitted, finish = cut(root, jnp.ones_like(chunk.size), before)

    draft_cache, draft_hidden = caches.draft, before.draft_hidden
    if models.head is not None:
        # Pair j of the chunk is (feature of the position before, token): the feature carried over, then the chunk's own.
        carried = jnp.where(chunk.first_slot[:, None] == 0, 0, before.feature)  # a first chunk finds the row's last user's
        features = jnp.concatenate([carried[:, None], out.features], 1)
        at_root = jnp.arange(width + 1) == chunk.size[:, None]
        tokens = jnp.where(at_root, root, jnp.pad(chunk.tokens, ((0, 0), (0, 1))))
        write = jnp.pad(in_prompt, ((0, 0), (0, 1))) | (at_root & chunk.is_last[:, None])
        draft_cache, hidden = extend(
            models.head, models.target, caches.draft, chunk.page_table, features, tokens, chunk.first_slot, write
        )
        draft_hidden = last(hidden, chunk.size + 1)

    after = before._replace(
        length=length,
        root=root[:, 0],
        draft_hidden=draft_hidden,
        feature=last(out.features, chunk.size),
        temperature=chunk.temperature,
        seed=chunk.seed,
        remaining=chunk.max_tokens - emitted,
        done=~chunk.is_last | (finish != RUNNING),
    )
    sampled = Accepted(path=root, tokens=root, accepted=jnp.zeros_like(emitted), emitted=emitted, finish=finish)
    return Step(Caches(target_cache, draft_cache), put(sequences, chunk.row, after), report(sampled))
