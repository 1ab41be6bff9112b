"""Coupled drafts: the head drafts under the target's own noise.

The target's token is argmax(logits / T + noise), and the noise of a position is known before the target runs. With the *same*
noise on its own logits the head proposes what the target will most likely choose, and a sampled sequence is accepted almost like
a greedy one: a match has at least the probability (1 - TV) / (1 + TV), where TV is the distance of the two distributions (Daliri,
Musco and Suresh, arXiv 2408.07978). The target's choice is unchanged, so the seed still determines the text.

This needs a head that is as confident as its target, which most are not. So the target's logits are modelled as the head's, times
a `sharpness`, plus errors with a Gumbel distribution of scale s. Given the noise, the probability that the target chooses a token
is then the softmax of (sharpness * logits + T * noise) / s. Heads predict likely tokens better than others, so each of these two
kinds has its own sharpness. The three weights, both sharpnesses / s and 1 / s, are fitted while serving, by maximum likelihood, to
the token that the target chose after each root; deeper levels use the same weights. These probabilities rank the candidates, and
path scores estimate the log probability of acceptance.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.noise import noise_at
from jaxspec.decoding.penalties import Context, adjust_logits
from jaxspec.decoding.sampling import apply_filters
from jaxspec.decoding.settings import SamplingKind, divisor
from jaxspec.decoding.state import Batch, State
from jaxspec.typing import Array, Float, Int
from pallas_kernels.dispatch import by_platform, choose

LEAST, MOST = 1 / 8, 8.0
"""Bounds of the sharpness, of likely tokens and of others, and of 1 / s."""
LIKELY = -4.0
"""The log probability that separates likely tokens from the rest."""
INFORMATION_PRIOR = 30.0
"""Information, about that of 30 tokens, which keeps the first moves small."""
INFORMATION_MEMORY = 0.999
"""The share of the information that each cycle keeps, so that the weights adapt to other texts within some thousand tokens."""
LOWEST = -1e30
"""Replaces -inf: every token that a head knows may be banned."""


class Calibration(NamedTuple):
    """How well a head's logits predict the target's choice, fitted while serving. All requests share it."""

    weights: Float[Array, " 3"]
    """For unlikely tokens' logits, likely tokens' logits, and the noise times the temperature. Larger weights make the prediction
    more confident."""
    information: Float[Array, "3 3"]
    """The Fisher information of the observations so far: the more there is, the smaller the next move."""


def uncalibrated() -> Calibration:
    """Before the first observation."""
    return Calibration(jnp.ones(3, jnp.float32), jnp.zeros((3, 3), jnp.float32))


type Depth = int | Int[Array, " w"]
"""The depth of the nodes that logits [b, w, v] come after: one for all, or one per column."""
type Step = Callable[[Float[Array, "b w v"]], Float[Array, "b w v"]]


class Prediction(NamedTuple):
    """All that turns a head's logits into a prediction of the target's choice."""

    needed: Int[Array, ""]
    """The highest SamplingKind of the batch."""
    state: State
    batch: Batch
    token_map: Int[Array, " v"] | None
    """The target id of each of the head's ids; None: they are the same."""
    calibration: Calibration

    def noise(self, depth: Depth, count: int) -> Float[Array, "b m v"]:
        """The noise of the target's choices after nodes at this depth, for the `count` tokens that the head knows; m is 1 or the
        number of columns."""
        ids = jnp.arange(count) if self.token_map is None else self.token_map
        positions = self.batch.sequences.length[:, None] + jnp.atleast_1d(depth) + 1
        return noise_at(positions, self.batch.settings.seed[:, None], ids)

    def of_kinds[Result](
        self, likeliest: Callable[[Float[Array, "b w v"]], Result], logits: Float[Array, "b w v"], depth: Depth
    ) -> Result:
        """`likeliest` of the logits after nodes at this depth or, unless all requests are greedy, of their scores."""

        def sampled(kind: SamplingKind | None) -> Callable[[Float[Array, "b w v"]], Result]:
            return lambda logits: likeliest(self.scores(logits, depth, kind))

        def by_kind(logits: Float[Array, "b w v"]) -> Result:
            others = [sampled(kind) for kind in SamplingKind if kind > SamplingKind.GREEDY]
            return jax.lax.switch(self.needed, [likeliest, *others], logits)

        def nested(logits: Float[Array, "b w v"]) -> Result:
            return jax.lax.cond(self.needed > SamplingKind.GREEDY, sampled(None), likeliest, logits)

        # A branch for each kind halves a GPU's launches, but makes compiling for a CPU take a third longer.
        return choose(logits, on_gpu=by_kind, elsewhere=nested)

    def scores(self, logits: Float[Array, "b w v"], depth: Depth, kind: SamplingKind | None = None) -> Float[Array, "b w v"]:
        """The logits after nodes at this depth, treated as the target's will be: adjusted, divided by the temperature, filtered,
        and with the noise added; scaled to log probabilities, up to a constant. Greedy requests' logits are only adjusted.

        Penalties count the text up to the root, not the drafts after it, and the filters' cut-offs are rough: drafts need not be
        exact. `kind`: the batch's highest, if the caller knows it; None: `needed` decides in the program.
        """
        batch, settings = self.batch, self.batch.settings
        is_sampled, weights = settings.temperature[:, None, None] > 0, self.calibration.weights
        logits = jnp.where(is_sampled, calibrated(logits, boundary(logits), weights), logits)

        def adjust(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
            length, nothing = batch.sequences.length, jnp.zeros((len(logits), 0), jnp.int32)
            positions = jnp.broadcast_to(length[:, None] + depth + 1, logits.shape[:2])
            context = Context(self.state.history[batch.rows], length + 1, nothing, jnp.zeros((len(logits), 1, 0), bool))
            return adjust_logits(logits, positions, context, settings, self.state.bias[batch.rows], self.token_map)

        def filtered(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
            return apply_filters(logits, settings, rough=True)

        def unfiltered(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
            return logits / divisor(settings)

        def from_kind(first: SamplingKind, then: Step, otherwise: Step, logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
            if kind is None:
                return jax.lax.cond(self.needed >= first, then, otherwise, logits)
            return then(logits) if kind >= first else otherwise(logits)

        logits = from_kind(SamplingKind.ADJUSTED, adjust, lambda same: same, logits)
        scaled = from_kind(SamplingKind.FILTERED, filtered, unfiltered, logits)
        predicted = weights[2] * divisor(settings) * (scaled + self.noise(depth, logits.shape[-1]))
        return jnp.maximum(jnp.where(is_sampled, predicted, logits), LOWEST)


def calibrated(
    logits: Float[Array, "*rows v"], least: Float[Array, "*rows 1"], weights: Float[Array, " 3"]
) -> Float[Array, "*rows v"]:
    """The target's logits as the head's predict them."""
    of_unlikely, of_likely, of_noise = weights
    return (of_unlikely * jnp.minimum(logits, least) + of_likely * jnp.maximum(logits - least, 0)) / of_noise


def boundary(logits: Float[Array, "*rows v"]) -> Float[Array, "*rows 1"]:
    """The logit at which the probability is exp(LIKELY): likely tokens are above it.

    In:  -0.1 and -5, which are logarithms of chances, LIKELY -4
    Out: -4
    """
    return LIKELY + by_platform(log_total_in_one_pass, log_total, log_total)(logits)


def log_total(logits: Float[Array, "*rows v"]) -> Float[Array, "*rows 1"]:
    """The logarithm of the sum of exponentials."""
    return jax.nn.logsumexp(logits, -1, keepdims=True)


def log_total_in_one_pass(logits: Float[Array, "*rows v"]) -> Float[Array, "*rows 1"]:
    """`log_total` with half of the launches: when two parts of a row are joined, the sum of the one with smaller logits is scaled
    down to the other's."""

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        most = jnp.maximum(one[0], other[0])
        measure = jnp.where(jnp.isneginf(most), 0, most)
        return most, one[1] * jnp.exp(one[0] - measure) + other[1] * jnp.exp(other[0] - measure)

    nothing = np.float32(-np.inf), np.float32(0)
    most, total = jax.lax.reduce((logits, jnp.ones_like(logits)), nothing, join, [logits.ndim - 1])
    return (most + jnp.log(total))[..., None]


@jax.named_scope("learn")
def calibrate(prediction: Prediction, logits: Float[Array, "b v"], chosen: Int[Array, " b"]) -> Calibration:
    """Moves the weights towards the most likely ones, given the head's logits at the roots and the tokens that the target chose.

    A Newton move: the gradient of the log likelihood, divided by all information so far. Requests with adjusted logits, and tokens
    outside the head's vocabulary, are ignored. Filters are not modelled: with them the target is a little more confident than
    the head's logits suggest.
    """
    batch, ids = prediction.batch, prediction.token_map
    ids = jnp.arange(logits.shape[-1]) if ids is None else ids

    def observe(before: Calibration) -> Calibration:
        settings, from_boundary = batch.settings, logits - boundary(logits)
        noise = divisor(settings)[:, 0] * prediction.noise(0, logits.shape[-1])[:, 0]
        inputs = jnp.stack([jnp.minimum(from_boundary, 0), jnp.maximum(from_boundary, 0), noise], 1)  # [b, 3, v]
        scores = jnp.einsum("i,biv->bv", before.weights, inputs)
        chances = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))  # times a constant
        is_chosen = jnp.equal(ids, chosen[:, None])
        # All sums over the vocabulary at once: of chances, and of the chosen token, times 1, inputs, and products of two inputs.
        factors = jnp.concatenate([jnp.ones_like(noise)[:, None], inputs], 1)
        counted = jnp.concatenate([chances[:, None] * factors, is_chosen[:, None].astype(jnp.float32)], 1)
        sums = jnp.einsum("biv,bjv->bij", counted, factors, precision=jax.lax.Precision.HIGHEST)
        moments, of_chosen = sums[:, :4] / sums[:, :1, :1], sums[:, 4]
        mean = moments[:, 0, 1:]
        teaches = (settings.temperature > 0) & (settings.kind < SamplingKind.ADJUSTED) & ~batch.sequences.done
        counts = (of_chosen[:, 0] > 0) & teaches & jnp.all(jnp.isfinite(mean), -1)  # a model's NaN must not spoil other drafts
        surprise = jnp.sum(jnp.where(counts[:, None], of_chosen[:, 1:] - mean, 0), 0)
        spread = moments[:, 1:, 1:] - mean[:, :, None] * mean[:, None]
        seen = jnp.sum(jnp.where(counts[:, None, None], spread, 0), 0)
        information = jnp.where(jnp.any(counts), INFORMATION_MEMORY, 1) * before.information + seen
        a, b, c = information + INFORMATION_PRIOR * jnp.eye(3)
        adjugate = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])  # solvers are library calls on a GPU
        move = jnp.sum(adjugate * surprise, 1) / jnp.sum(a * adjugate[0])
        of_noise = jnp.clip(before.weights[2] + move[2], LEAST, MOST)
        of_logits = jnp.clip(before.weights[:2] + move[:2], LEAST * of_noise, MOST * of_noise)
        return Calibration(jnp.append(of_logits, of_noise), information)

    return jax.lax.cond(prediction.needed > SamplingKind.GREEDY, observe, lambda same: same, prediction.calibration)
