"""Prefill: chunks of prompts through the target and the head; a prompt's last chunk also samples its first token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.commit import advance, write_slots
from jaxspec.decoding.cycle import logprobs
from jaxspec.decoding.drafter import Models, NewTokens
from jaxspec.decoding.extend import features_of
from jaxspec.decoding.sampling import Logprobs, logprobs_of
from jaxspec.decoding.state import Batch, ProgramOutput, State, gather, last, put
from jaxspec.decoding.tree import root_only
from jaxspec.decoding.verify import Verified, accept, choose_tokens, report
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.linear import NO_TOKEN
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Bool, Float, Int, KeysValues

LOGPROB_BLOCK = 16
"""Prompt log probabilities compute the logits of this many tokens at a time."""


class Chunk(NamedTuple):
    """Tokens first_slot .. first_slot + size - 1 of requests that were admitted before."""

    row: Int[Array, " b"]
    page_table: Int[Array, "b p"]
    tokens: Int[Array, "b w"]
    """Padded to the chunk's width; the values of the padding do not matter."""
    first_slot: Int[Array, " b"]
    size: Int[Array, " b"]
    cached: Int[Array, " b"]
    """Slots below it are committed: first_slot, or first_slot + 1 after a prefix hit. Then the last cached token is computed
    again, because the head needs its feature for the pair of the next slot."""
    is_last: Bool[Array, " b"]
    """The prompt ends with this chunk."""


@jax.named_scope("prefill")
def prefill(models: Models, state: State, chunk: Chunk, *, scores: bool = False) -> ProgramOutput:
    """Commits the chunk to the target's cache, and the drafter absorbs it. After the last chunk the target holds slots 0 .. L-1 and
    a head up to L.

    The prompt's last token is like the root of a plain cycle: its slot is committed and the token after it is emitted. `scores`:
    the output has the prompt's log probabilities. No sequence sees another: what one of them reads, no other may write.
    """
    batch, metadata = batch_of(state, chunk), metadata_of(chunk)
    tokens = jnp.where(jnp.arange(chunk.tokens.shape[1]) < chunk.size[:, None], chunk.tokens, NO_TOKEN)
    out = models.target(tokens, metadata, state.cache, models.drafter.capture)
    tree, logits = root_only(last(chunk.tokens, chunk.size)), models.target.logits(last(out.hidden, chunk.size)[:, None])
    verified = Verified(choose_tokens(state, batch, tree, logits), logits, out.features, out.window)
    accepted = accept(tree, verified.target_tokens, batch, num_steps=0)
    state = commit_chunk(state, chunk, metadata.positions, out.window)
    state = absorb_chunk(models, state, batch, chunk, features_of(models, out.features), accepted.tokens)
    state = advance(state, batch, accepted)
    prompt = prompt_logprobs(models.target, state, batch, out.hidden, metadata.positions + 1) if scores else None
    return ProgramOutput(state, report(accepted, tree), logprobs(verified, accepted, batch), prompt)


def batch_of(state: State, chunk: Chunk) -> Batch:
    """The chunk's sequences. The slot of the prompt's last token is committed with the first emitted token."""
    batch = gather(state, chunk.row, chunk.page_table)
    length = chunk.first_slot + chunk.size - chunk.is_last.astype(jnp.int32)
    return batch._replace(sequences=batch.sequences.replaced(length=length, done=~chunk.is_last))


def metadata_of(chunk: Chunk) -> AttentionMetadata:
    """A token sees the committed slots, the chunk's tokens before it, and itself."""
    batch, width = chunk.tokens.shape
    columns = jnp.arange(width, dtype=jnp.int32)
    positions = chunk.first_slot[:, None] + columns
    causal = jnp.broadcast_to(columns[:, None] >= columns, (batch, width, width))
    return AttentionMetadata(positions, chunk.page_table, jnp.zeros_like(chunk.first_slot), chunk.first_slot, causal)


def commit_chunk(state: State, chunk: Chunk, slots: Int[Array, "b w"], window: tuple[KeysValues, ...]) -> State:
    """Writes the chunk's new keys and values to the target's pages."""
    columns = jnp.arange(slots.shape[1], dtype=jnp.int32)
    path = jnp.broadcast_to(columns, slots.shape)
    write = (columns < chunk.size[:, None]) & (slots >= chunk.cached[:, None])
    layers = zip(state.cache, window, strict=True)  # one by one: a chunk's keys of all layers at once would be large
    pages = [write_slots((cache,), (rows,), chunk.page_table, path, slots, write)[0] for cache, rows in layers]
    return state._replace(cache=tuple(pages))


def absorb_chunk(
    models: Models, state: State, batch: Batch, chunk: Chunk, features: Float[Array, "b w f"], root: Int[Array, "b 1"]
) -> State:
    """The drafter absorbs the chunk's tokens and, after the last chunk, the root.

    Token j goes with the feature of the previous position: first the one carried over from the previous chunk, then the
    chunk's own. A first chunk ignores what was carried over, which is from the row's previous request.
    """
    is_first = (chunk.first_slot == 0) | (chunk.cached > chunk.first_slot)
    carried = jnp.where(is_first[:, None], 0, state.features.last[batch.rows])
    at_root = jnp.arange(chunk.tokens.shape[1] + 1) == chunk.size[:, None]
    new = NewTokens(
        tokens=jnp.where(at_root, root, jnp.pad(chunk.tokens, ((0, 0), (0, 1)))),
        features=jnp.concatenate([carried[:, None], features], 1),
        first_slot=chunk.first_slot,
        cached=jnp.maximum(chunk.cached, models.drafter.first_slot),
        size=chunk.size + chunk.is_last.astype(jnp.int32),
    )
    draft = models.drafter.absorb(models.target, state, batch, new)
    return state._replace(draft=draft, features=put(state.features, batch.rows, last=last(features, chunk.size)))


def prompt_logprobs(
    target: Llama, state: State, batch: Batch, hidden: Float[Array, "b w h"], following: Int[Array, "b w"]
) -> Logprobs:
    """Log probabilities of the tokens at the positions `following`. Block by block, because all logits at once could be gigabytes:
    on a GPU the host runs this loop, so only programs for requests that ask have it."""
    history = state.history[batch.rows]
    tokens = jnp.take_along_axis(history, jnp.minimum(following, history.shape[1] - 1), 1)
    (batch_size, width), blocks = tokens.shape, -(-tokens.shape[1] // LOGPROB_BLOCK)
    padding = blocks * LOGPROB_BLOCK - width
    hiddens = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(batch_size, blocks, LOGPROB_BLOCK, -1)
    chosen = jnp.pad(tokens, ((0, 0), (0, padding))).reshape(batch_size, blocks, LOGPROB_BLOCK)
    found = jax.lax.map(
        lambda block: logprobs_of(target.logits(block[0]), block[1]), (hiddens.swapaxes(0, 1), chosen.swapaxes(0, 1))
    )
    return jax.tree.map(lambda part: part.swapaxes(0, 1).reshape(batch_size, -1, *part.shape[3:])[:, :width], found)
