"""Prefill: a chunk of one prompt through the target and the head; the last chunk also samples the first token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.llama import Llama
from jaxspec.spec.commit import commit
from jaxspec.spec.cycle import LOSSLESS, CycleOptions
from jaxspec.spec.extend import extend
from jaxspec.spec.penalties import adjust_logits, prompt_context
from jaxspec.spec.sampling import Logprobs, choose, logprobs_if, logprobs_of
from jaxspec.spec.state import Models, State, StepOutput, last, put, take, write_history
from jaxspec.spec.verify import RUNNING, Accepted, report, truncate
from jaxspec.typing import Array, Bool, Float, Int

LOGPROB_BLOCK = 16
"""Rows of a chunk whose logits exist at the same time, if log probabilities of the prompt are wanted."""


class Chunk(NamedTuple):
    """Tokens first_slot .. first_slot + size - 1 of requests that were admitted before."""

    row: Int[Array, " b"]
    page_table: Int[Array, "b p"]
    tokens: Int[Array, "b w"]
    """Padded behind `size`; what the padding holds does not matter."""
    first_slot: Int[Array, " b"]
    size: Int[Array, " b"]
    cached: Int[Array, " b"]
    """Slots below it are committed: first_slot, or first_slot + 1 behind a prefix hit, where the last cached token is computed
    again only because the head needs its feature for the pair of the next slot."""
    is_last: Bool[Array, " b"]
    """The sequence ends with this chunk."""


@jax.named_scope("prefill")
def prefill(models: Models, state: State, chunk: Chunk, *, options: CycleOptions = LOSSLESS) -> StepOutput:
    """Commits the chunk to both caches. After the last chunk the target holds slots 0 .. L-1 and the head 1 .. L."""
    batch, width = chunk.tokens.shape
    steps = jnp.arange(width, dtype=jnp.int32)
    positions = chunk.first_slot[:, None] + steps
    causal = jnp.broadcast_to(steps[:, None] >= steps, (batch, width, width))
    rows = AttentionMetadata(positions, chunk.page_table, jnp.zeros_like(chunk.first_slot), chunk.first_slot, causal)
    out = models.target(chunk.tokens, rows, state.caches.target, models.capture)
    path = jnp.broadcast_to(steps, (batch, width))
    in_prompt = steps < chunk.size[:, None]
    write = in_prompt & (positions >= chunk.cached[:, None])
    layers = zip(state.caches.target, out.window, strict=True)  # one by one, so that few wait to be written: a chunk's are large
    target_cache = tuple(commit((pages,), (window,), chunk.page_table, path, positions, write)[0] for pages, window in layers)

    before, settings = take(state.sequences, chunk.row), take(state.settings, chunk.row)
    length = chunk.first_slot + chunk.size
    logits = models.target.logits(last(out.hidden, chunk.size)[:, None])

    def adjust(logits: Float[Array, "b n v"]) -> Float[Array, "b n v"]:
        context = prompt_context(state.history[chunk.row], length)
        return adjust_logits(logits, length[:, None], context, settings, state.bias[chunk.row])

    root = choose(logits, length[:, None], settings, chunk.is_last, adjust)
    starting = before._replace(done=~chunk.is_last)
    emitted, finish = truncate(root, jnp.ones_like(chunk.size), starting, settings.stop_tokens)

    draft_cache, draft_hidden = state.caches.draft, before.draft_hidden
    if models.head is not None:
        # Pair j of the chunk is (feature of the position before, token): the feature carried over, then the chunk's own.
        # A first chunk finds the one of the row's last user.
        is_first = (chunk.first_slot == 0) | (chunk.cached > chunk.first_slot)
        carried = jnp.where(is_first[:, None], 0, before.feature)
        features = jnp.concatenate([carried[:, None], out.features], 1)
        at_root = jnp.arange(width + 1) == chunk.size[:, None]
        tokens = jnp.where(at_root, root, jnp.pad(chunk.tokens, ((0, 0), (0, 1))))
        write = jnp.pad(in_prompt, ((0, 0), (0, 1))) | (at_root & chunk.is_last[:, None])
        begin = jnp.maximum(chunk.cached, 1)  # slot 0 has no pair
        draft_cache, hidden = extend(
            models.head, models.target, draft_cache, chunk.page_table, features, tokens, chunk.first_slot, begin, write,
            options.window,
        )  # fmt: skip
        draft_hidden = last(hidden, chunk.size + 1)

    after = before._replace(
        length=length,
        root=root[:, 0],
        draft_hidden=draft_hidden,
        feature=last(out.features, chunk.size),
        remaining=before.remaining - emitted,
        done=~chunk.is_last | (finish != RUNNING),
    )
    state = state._replace(
        caches=state.caches._replace(target=target_cache, draft=draft_cache),
        sequences=put(state.sequences, chunk.row, after),
        history=write_history(state.history, chunk.row, length, root, emitted),
    )
    sampled = Accepted(path=root, tokens=root, accepted=jnp.zeros_like(emitted), emitted=emitted, finish=finish)
    of_root = logprobs_if(settings.wants_logprobs, lambda: logprobs_of(logits, root))
    following = jnp.take_along_axis(state.history[chunk.row], jnp.minimum(positions + 1, state.history.shape[1] - 1), 1)
    of_prompt = logprobs_if(settings.wants_prompt_logprobs, lambda: prompt_logprobs(models.target, out.hidden, following))
    return StepOutput(state, report(sampled), of_root, of_prompt)


def prompt_logprobs(target: Llama, hidden: Float[Array, "b w h"], following: Int[Array, "b w"]) -> Logprobs:
    """Of the token behind each row, block by block: logits of all rows at once could be gigabytes."""
    batch, width = following.shape
    blocks = -(-width // LOGPROB_BLOCK)
    room = blocks * LOGPROB_BLOCK - width
    hidden = jnp.pad(hidden, ((0, 0), (0, room), (0, 0))).reshape(batch, blocks, LOGPROB_BLOCK, -1)
    following = jnp.pad(following, ((0, 0), (0, room))).reshape(batch, blocks, LOGPROB_BLOCK)
    found = jax.lax.map(
        lambda block: logprobs_of(target.logits(block[0]), block[1]), (hidden.swapaxes(0, 1), following.swapaxes(0, 1))
    )
    return jax.tree.map(lambda part: part.swapaxes(0, 1).reshape(batch, -1, *part.shape[3:])[:, :width], found)
