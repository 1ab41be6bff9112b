"""Draft heads: the kind that a checkpoint holds, recognized by its tensors, and attaching a head to its target."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.block_layouts import dflash_plan, dspark_plan
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.kinds import algorithm_of, is_target
from jaxspec.checkpoints.layout import TensorPlan
from jaxspec.checkpoints.layouts import eagle3_plan, eagle_plan, mtp_plan
from jaxspec.checkpoints.quantization import quantised_plan
from jaxspec.checkpoints.token_map import read_token_map
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.linear import parameters, storage_of
from jaxspec.models.registry import LoadedHead, LoadedTarget, build_model
from jaxspec.placement import ONE_DEVICE, Placement
from pallas_kernels.weight import Weight

PACKAGE = str(Path(__file__).parents[1])
"""Warnings point at the first line outside of this package."""
ROUNDING = 2.0**-24
"""Two copies of an embedding may differ by this: bfloat16 values too small for float16 are rounded to its smallest steps."""
PLANS: dict[str, Callable[[dict, Collection[str], ModelConfig], TensorPlan]] = {
    "EAGLE": eagle_plan, "EAGLE3": eagle3_plan, "MTP": mtp_plan, "DFLASH": dflash_plan, "DSPARK": dspark_plan,
}  # fmt: skip


def head_plan(checkpoint: Checkpoint, config: dict, target: ModelConfig) -> TensorPlan:
    """The plan for a head beside this target. Raises ValueError if it is not a head, does not fit or is not supported.

    The tensors decide, never `architectures`: producers publish the same tensors under several names.
    """
    names = checkpoint.infos
    algorithm = algorithm_of(names)
    if algorithm is None and is_target(names):
        raise ValueError("this is a whole model without an MTP layer, not a draft head")
    if algorithm is None:
        raise ValueError(
            "this is not a draft head: EAGLE-3 has midlayer.hidden_norm or layers.0.hidden_norm, EAGLE-1/2 fc and layers.0 without "
            f"input_layernorm, MTP model.mtp_layers.0; found {', '.join(sorted(names)[:6])}, ..."
        )
    plan = quantised_plan(PLANS[algorithm](config, names, target), config, checkpoint.infos)
    check_sizes(head := plan.config, target)
    if not head.own_embedding and head.layer.hidden_size != target.hidden_size:
        shape = (head.layer.vocab_size, head.layer.hidden_size)
        raise ValueError(
            f"tensor 'embed_tokens.weight' is missing (expected with shape {shape}): the head is {shape[1]} wide, so the target's "
            f"embedding, {target.hidden_size} wide, can't replace it"
        )
    return plan


def check_sizes(head: HeadConfig, target: ModelConfig) -> None:
    """Raises ValueError if the head is for a target of another hidden size or vocabulary."""
    for name, found, expected in (
        ("target_hidden_size (or hidden_size)", head.target_hidden_size, target.hidden_size),
        ("vocab_size", head.layer.vocab_size, target.vocab_size),
    ):
        if found != expected:
            raise ValueError(f"the draft head does not fit the target: its {name} is {found}, the target's {expected}")


def attach_head(
    config: HeadConfig, params: dict, target: LoadedTarget, hot_tokens: np.ndarray | None, placement: Placement = ONE_DEVICE
) -> LoadedHead:
    """The head for its target: an embedding equal to the target's is dropped, and a token map (int32 ids) is applied. The devices
    of both are the placement's."""
    if config.own_embedding and repeats(params["embed_tokens"], target):
        params.pop("embed_tokens")
        config = replace(config, own_embedding=False)
    if hot_tokens is not None:
        ids = jnp.asarray(hot_tokens)
        kernel = target.merge(target.params).output_columns(ids).dense(target.dtype)
        added = {"lm_head": parameters(storage_of(config.layer, "lm_head")(placement.put(kernel))), "draft_to_target": ids}
        params |= placement.weights(added, config.layer)
        config = replace(config, draft_vocab_size=len(hot_tokens))
    return build_model(config, params, target.dtype, placement.weights)


def usable_token_map(config: HeadConfig, path: Path | None) -> np.ndarray | None:
    """The token map at a path, int32 target ids; None, with a warning, if the head has a draft vocabulary of its own.

    Raises ValueError for a kind of head that takes none.
    """
    if path is None:
        return None
    if isinstance(config, BlockConfig):
        raise ValueError(f"a token map is not supported for a {config.algorithm} head: leave out {path}")
    if config.draft_vocab_size is not None:
        message = f"the token map {path} is not used: this {config.algorithm} head has its own draft vocabulary"
        warnings.warn(message, skip_file_prefixes=(PACKAGE,))
        return None
    return read_token_map(path, config.layer.vocab_size)


def repeats(own: jax.Array, target: LoadedTarget) -> bool:
    """True if a head's embedding equals the target's. Heads are trained with it frozen, and most checkpoints contain a copy."""
    embedding = target.merge(target.params).embedding
    return own.shape == embedding.shape[::-1] and bool(_largest_difference(own, embedding) <= ROUNDING)


@jax.jit  # one pass without copies in float32
def _largest_difference(own: jax.Array, embedding: Weight) -> jax.Array:
    return jnp.max(jnp.abs(own.astype(jnp.float32) - embedding.dense(jnp.float32).T))
