"""What a head would have to accept: cycle costs with a head of random weights, and speed-ups for accept lengths that are assumed.

A cycle takes as long whatever it accepts, so its cost needs no trained head. What follows from an assumed accept length is called
simulated wherever it is shown.
"""

from collections.abc import Sequence
from statistics import median

import jax.numpy as jnp
from flax import nnx

from benchmarks.gpu.sizes import head_of
from benchmarks.speculative.tuning import Timed, describe
from jaxspec.models.eagle3 import Eagle3, default_captured_layers
from jaxspec.models.registry import LoadedHead, LoadedTarget, split_model

USUAL_DRAFT_VOCABULARY = 32_000


def simulated_speed_ups(each: Timed, accept_lengths: Sequence[float]) -> dict[str, float | None]:
    """Speed-up of decoding by assumed accept length; None where the tree can't emit so many tokens."""
    possible = each.tree.num_steps + 1
    return {str(length): length / median(each.cost) if length <= possible else None for length in accept_lengths}


def describe_simulated(each: Timed, accept_lengths: Sequence[float]) -> dict:
    """For JSON."""
    return {**describe(each, None), "simulated_speed_up": simulated_speed_ups(each, accept_lengths)}


def random_head(target: LoadedTarget) -> LoadedHead:
    """An EAGLE-3 head of the usual size (one layer, at most 32,000 draft tokens) that knows nothing."""
    vocabulary = target.config.vocab_size
    drafts = min(USUAL_DRAFT_VOCABULARY, vocabulary)
    config = head_of(target.config, default_captured_layers(target.config.num_layers), drafts)
    head = split_model(Eagle3(config, dtype=target.params["embed_tokens"].dtype, rngs=nnx.Rngs(0)), config)
    head.params["draft_to_target"] = jnp.arange(drafts, dtype=jnp.int32) * (vocabulary // drafts)
    return head
