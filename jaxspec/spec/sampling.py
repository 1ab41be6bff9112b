"""Choosing the target's own token: argmax, or argmax of logits / T + noise, with noise keyed by (seed, position, token id).

The key does not depend on the tree or the batch, so one seed gives one text with any tree (docs/structure.md, idea 4).
Penalties, bias and bans (penalties.py) change the logits before they get here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.spec.tree import Tree
from jaxspec.typing import Array, Bool, Float, Int, UInt

MAX_STOP_TOKENS = 16
"""Stop tokens per request that the device checks, end-of-sequence tokens included."""

type Logits = Float[Array, "b n v"]


class SamplingKind(IntEnum):
    """The steps that a request's sampling needs. A batch runs the steps of its highest kind, in which requests of lower kinds
    get the same tokens as alone."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2
    """With top_k, top_p or min_p."""
    ADJUSTED = 3
    """With penalties, bias, min_tokens, bad or allowed tokens, and perhaps filters."""

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingKind":
        if params.adjusts:
            return cls.ADJUSTED
        return cls.FILTERED if params.filters else cls.TEMPERATURE if params.temperature > 0 else cls.GREEDY


def neutral(value: Any, dtype: DTypeLike) -> Any:
    """Declares a field of Settings: its value for greedy decoding without any extras, and its dtype."""
    return np.asarray(value, dtype)


class Settings(NamedTuple):
    """SamplingParams of r sequences, as the device holds them. This is the one declaration of each field.

    The defaults are one row with neutral values: greedy decoding without stop tokens. `settings_row` and `neutral_settings`
    take dtypes and shapes from them. A field with the name of a SamplingParams field gets its value, unless
    engine/device_state.py computes another.
    """

    kind: Int[Array, " r"] = neutral(SamplingKind.GREEDY, np.int32)
    """A SamplingKind."""
    temperature: Float[Array, " r"] = neutral(0, np.float32)
    """0: greedy."""
    seed: UInt[Array, "r 2"] = neutral((0, 0), np.uint32)
    """A 64-bit number: the high word, then the low one."""
    top_k: Int[Array, " r"] = neutral(np.iinfo(np.int32).max, np.int32)
    """The vocabulary size or more: all tokens."""
    top_p: Float[Array, " r"] = neutral(1, np.float32)
    min_p: Float[Array, " r"] = neutral(0, np.float32)
    repetition_penalty: Float[Array, " r"] = neutral(1, np.float32)
    frequency_penalty: Float[Array, " r"] = neutral(0, np.float32)
    presence_penalty: Float[Array, " r"] = neutral(0, np.float32)
    prompt_length: Int[Array, " r"] = neutral(0, np.int32)
    """The output begins here; frequency and presence penalties count the output only."""
    min_length: Int[Array, " r"] = neutral(0, np.int32)
    """Stop tokens are banned at positions below it."""
    stop_tokens: Int[Array, "r stops"] = neutral([-1] * MAX_STOP_TOKENS, np.int32)
    """Token ids that end the sequence; unused entries are -1."""
    wants_logprobs: Bool[Array, " r"] = neutral(False, np.bool_)
    wants_prompt_logprobs: Bool[Array, " r"] = neutral(False, np.bool_)


def neutral_settings(rows: int) -> Settings:
    """Greedy decoding without stop tokens, in every row. Each field is a separate array, because they are donated."""
    return jax.tree.map(lambda value: jnp.tile(value, (rows, *(1,) * value.ndim)), Settings())


def settings_row(**values: Any) -> Settings:
    """One row of NumPy arrays with these values; other fields are neutral, and short lists are padded with neutral entries.

    In:  temperature=0.5, stop_tokens=[7]
    Out: temperature [0.5], stop_tokens [[7, -1, -1, ...]], top_p [1.0], ...
    """
    fields = Settings()._asdict()
    for name, value in values.items():
        default = fields[name]
        field, given = np.atleast_1d(default).copy(), np.atleast_1d(np.asarray(value, default.dtype))
        field[: len(given)] = given
        fields[name] = field.reshape(default.shape)
    return Settings(**{name: field[None] for name, field in fields.items()})


class Logprobs(NamedTuple):
    """Log probabilities of the tokens at j positions, and the likeliest tokens there, best first."""

    chosen: Float[Array, "b j"]
    top_ids: Int[Array, "b j top"]
    top: Float[Array, "b j top"]


def gumbel_noise(seed: UInt[Array, " 2"], position: Int[Array, ""], vocab_size: int) -> Float[Array, " v"]:
    """Standard Gumbel noise for every token at `position` of the request with this seed (two 32-bit words)."""
    return jax.random.gumbel(position_key(seed, position), (vocab_size,), jnp.float32)


def position_key(seed: UInt[Array, " 2"], position: Int[Array, ""]) -> Array:
    """The random key of one position of a request."""
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


@jax.named_scope("choose")
def choose(
    logits: Logits, positions: Int[Array, "b n"], settings: Settings, active: Bool[Array, " b"], adjust: Callable[[Logits], Logits]
) -> Int[Array, "b n"]:
    """The target's token at each of the `positions`; requests with temperature 0 are greedy under every kind.

    Only one branch runs, the one that the highest kind among the active rows needs; the others cost nothing.
    """

    def filtered(logits):
        noise = noise_at(positions, settings, logits.shape[-1])
        return greedy_or(sample_filtered(logits / temperature(settings), noise, settings), logits, settings)

    branches = {
        SamplingKind.GREEDY: greedy,
        SamplingKind.TEMPERATURE: lambda logits: greedy_or(sample(logits, positions, settings), logits, settings),
        SamplingKind.FILTERED: filtered,
        SamplingKind.ADJUSTED: lambda logits: filtered(adjust(logits)),
    }
    needed = jnp.max(jnp.where(active, settings.kind, SamplingKind.GREEDY))
    return jax.lax.switch(needed, [branches[kind] for kind in SamplingKind], logits)


def greedy(logits: Logits) -> Int[Array, "b n"]:
    """The likeliest token; among equals the one with the lowest id."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def greedy_or(sampled: Int[Array, "b n"], logits: Logits, settings: Settings) -> Int[Array, "b n"]:
    """The sampled token, or the likeliest one where the temperature is 0."""
    return jnp.where(settings.temperature[:, None] > 0, sampled, greedy(logits))


def temperature(settings: Settings) -> Float[Array, "b 1 1"]:
    """The divisor of the logits: the temperature, or 1 for greedy requests."""
    return jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None, None]


def noise_at(positions: Int[Array, "b n"], settings: Settings, vocab_size: int) -> Logits:
    """Gumbel noise for every position and token."""
    noise_of_sequence = jax.vmap(gumbel_noise, in_axes=(None, 0, None))
    return jax.vmap(noise_of_sequence, in_axes=(0, 0, None))(settings.seed, positions, vocab_size)


def sample(logits: Logits, positions: Int[Array, "b n"], settings: Settings) -> Int[Array, "b n"]:
    """A sample from softmax(logits / temperature)."""
    return greedy(logits / temperature(settings) + noise_at(positions, settings, logits.shape[-1]))


def sample_filtered(scaled: Logits, noise: Logits, settings: Settings) -> Int[Array, "b n"]:
    """A sample from the tokens that top_k, top_p and min_p keep."""
    ordered, ids, kept = sort_and_filter(scaled, settings)
    best = jnp.argmax(jnp.where(kept, ordered + jnp.take_along_axis(noise, ids, -1), -jnp.inf), -1)
    return jnp.take_along_axis(ids, best[..., None], -1)[..., 0]


def sort_and_filter(scaled: Logits, settings: Settings) -> tuple[Logits, Int[Array, "b n v"], Bool[Array, "b n v"]]:
    """Sorts the logits (temperature applied) in descending order; returns them, their token ids, and which of them are kept.

    All three filters use the same probabilities, so their order does not matter. A token is kept if it is among the top_k, if
    the tokens before it have less than top_p together, and if its probability is at least min_p times the largest one.

    In:  probabilities 0.5, 0.3, 0.15, 0.05; top_k 3, top_p 0.9, min_p 0.4
    Out: the first two are kept (top_k keeps three, top_p three, min_p two)
    """
    order = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
    negative, ids = jax.lax.sort((-scaled, order), num_keys=1, is_stable=True)
    probabilities = jax.nn.softmax(-negative, -1)
    top_k, top_p, min_p = (field[:, None, None] for field in (settings.top_k, settings.top_p, settings.min_p))
    in_top_p = jnp.cumsum(probabilities, -1) - probabilities < top_p
    kept = (order < top_k) & (in_top_p | (top_p >= 1)) & (probabilities >= min_p * probabilities[..., :1])
    return -negative, ids, kept


def logprobs_of(logits: Float[Array, "b j v"], tokens: Int[Array, "b j"], count: int = MAX_LOGPROBS) -> Logprobs:
    """Log probabilities of the tokens, and of the `count` likeliest tokens (or of the whole vocabulary if it is smaller)."""
    count = min(count, logits.shape[-1])
    total = jax.nn.logsumexp(logits, -1)
    top, ids = jax.lax.top_k(logits, count)
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return Logprobs(chosen - total, ids, top - total[..., None])


def logprobs_if(asked: Bool[Array, " b"], compute: Callable[[], Logprobs]) -> Logprobs:
    """The result of `compute` if any sequence asks for it; otherwise zeros of the same shapes, at no cost."""

    def zeros() -> Logprobs:
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(compute))

    return jax.lax.cond(jnp.any(asked), compute, zeros)


@dataclass(frozen=True)
class Thresholds:
    """SGLang's --speculative-accept-threshold-single and -acc, both in (0, 1]. 1 and 1 is lossless."""

    single: float = 1.0
    acc: float = 1.0


def choose_by_threshold(
    logits: Logits, positions: Int[Array, "b n"], settings: Settings, tree: Tree, thresholds: Thresholds
) -> Int[Array, "b n"]:
    """SGLang's threshold acceptance, which is lossy: a draft may be accepted although the target would sample another token.

    At each node the drafted children are tried in order, best first, with one uniform number u per position: a child with the
    target's probability p is taken if u < (the sum of p over the children tried so far, itself included) / acc, or if
    p >= single. If none is taken, a token is sampled from the target's distribution without the children. With both thresholds
    at 1 the result has exactly the target's distribution; below 1 the text favours the drafts. Greedy requests stay greedy.
    """
    probabilities, scaled = filtered_distribution(logits, settings)
    nodes = tree.tokens.shape[1]
    is_child = tree.parents[:, None, :] == jnp.arange(nodes)[:, None]  # [b, parent, child]
    of_child = jnp.take_along_axis(probabilities, jnp.broadcast_to(tree.tokens[:, None], is_child.shape), 2)
    of_child = jnp.where(is_child, of_child, 0.0)
    tried = jnp.cumsum(of_child, -1)  # children come in flat order: the head's likeliest first
    taken = is_child & (of_child > 0)
    taken &= (uniforms(positions, settings)[:, :, None] < tried / thresholds.acc) | (of_child >= thresholds.single)
    first = jnp.argmax(taken, -1)

    batch, node = jnp.arange(tree.tokens.shape[0])[:, None, None], jnp.arange(nodes)[None, :, None]
    rest = scaled.at[batch, node, tree.tokens[:, None]].add(jnp.where(is_child, -jnp.inf, 0.0))
    sampled = jnp.argmax(rest + noise_at(positions, settings, logits.shape[-1]), -1).astype(jnp.int32)
    accepted = jnp.take_along_axis(tree.tokens, first, 1)
    return greedy_or(jnp.where(jnp.any(taken, -1), accepted, sampled), logits, settings)


def filtered_distribution(logits: Logits, settings: Settings) -> tuple[Logits, Logits]:
    """Probabilities after temperature and filters, and their logarithms up to a constant, in order of token ids."""
    ordered, ids, kept = sort_and_filter(logits / temperature(settings), settings)
    batch, nodes, _ = logits.shape
    place = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[None, :, None], ids
    scaled = jnp.zeros_like(logits).at[place].set(jnp.where(kept, ordered, -jnp.inf))
    return jax.nn.softmax(scaled, -1), scaled


def uniforms(positions: Int[Array, "b n"], settings: Settings) -> Float[Array, "b n"]:
    """One number in [0, 1) per position, keyed like the noise but independent of it."""

    def uniform(seed, position):
        return jax.random.uniform(jax.random.fold_in(position_key(seed, position), 1), ())

    return jax.vmap(jax.vmap(uniform, in_axes=(None, 0)))(settings.seed, positions)
