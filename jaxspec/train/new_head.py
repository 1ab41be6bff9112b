"""The head that training starts from: an existing one, or a new one, as near to the target as its shapes allow."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpoints.block_layouts import default_layer_ids
from jaxspec.checkpoints.loading import load_head
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, BlockHead, DSparkConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config, default_captured_layers
from jaxspec.models.feed_forward import MLP
from jaxspec.models.head import HeadConfig
from jaxspec.models.layers import DecoderLayer
from jaxspec.models.registry import LoadedHead, LoadedTarget, split_model
from jaxspec.train.rows import Split, counts_of, draft_vocabulary
from jaxspec.train.settings import BLOCKS, TrainSettings
from jaxspec.typing import Array, Float
from pallas_kernels.weight import Dense


def first_head(settings: TrainSettings, target: LoadedTarget, directory: Path, parts: Split) -> LoadedHead:
    """The head to train: one that is there already, or a new one. Raises ValueError if it is of another algorithm."""
    if settings.begin is None:
        return new_head(settings, target, directory, parts)
    head = trainable(load_head(Path(settings.begin), target), settings.begin)
    if isinstance(head.config, DSparkConfig):
        raise ValueError(f"{settings.begin} is a {head.config.algorithm} head, which can't be trained here")
    if settings.algorithm not in (names := names_of(head.config)):
        raise ValueError(f"{settings.begin} is of the algorithm {names[0]}, not {settings.algorithm}: give --algorithm {names[0]}")
    if isinstance(head.config, BlockConfig) and settings.depth not in (None, head.config.max_steps):
        raise ValueError(
            f"a block of {settings.begin} drafts {head.config.max_steps} tokens, not {settings.depth}: leave depth out"
        )
    return head


def trainable(head: LoadedHead, where: str | Path) -> LoadedHead:
    """The head from `where`. Raises ValueError if it can't be trained, or not be written afterwards."""
    if head.config.layer.storage or head.config.layer.storages:
        raise ValueError(f"{where} is quantised, which can't be trained: give the head in 16 bits")
    if head.config.draft_vocab_size is not None and head.config.algorithm != "EAGLE3":
        raise ValueError(f"{where} has a token map, which its format has no place for: give the head without it")
    return head


def names_of(config: HeadConfig) -> tuple[str, ...]:
    """What `--algorithm` calls a head; an EAGLE-3 head with the norms of EAGLE-3.1 has two names."""
    if isinstance(config, BlockConfig) and all(config.causal):
        return ("jetspec",)
    has_norms = isinstance(config, Eagle3Config) and config.fc_norm and config.norm_output
    return (*(["eagle3.1"] if has_norms else []), config.algorithm.lower())


def new_head(settings: TrainSettings, target: LoadedTarget, directory: Path, parts: Split) -> LoadedHead:
    """An untrained head. EAGLE-3 starts near the target: `fc` mostly passes the last captured layer's feature on to a copy of the
    target's last layer; the final norm and the output projection are the target's. MTP: the target's own layer, to be finetuned."""
    if settings.algorithm == "mtp":
        head = load_head(directory, target)
        if head.config.algorithm != "MTP":
            raise ValueError(f"{directory} has no MTP layer to finetune: give another algorithm")
        return trainable(head, directory)
    layer = replace(
        target.config,
        num_layers=1,
        intermediate_size=settings.intermediate_size or target.config.intermediate_size,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        storage=None,
        storages=(),
        kv_scales=False,
        feed_forward=None,
    )
    size, rngs = target.config.hidden_size, nnx.Rngs(settings.seed)
    if settings.algorithm == "eagle":
        return split_model(Eagle(EagleConfig(layer=layer, target_hidden_size=size), rngs=rngs))
    if settings.algorithm in BLOCKS:
        return new_block_head(settings, target, layer, parts)
    ids = draft_vocabulary(parts.learnt, settings.draft_vocab_size, target.config.vocab_size)
    config = Eagle3Config(
        layer=layer,
        target_hidden_size=size,
        captured_layers=default_captured_layers(target.config.num_layers),
        draft_vocab_size=len(ids),
        fc_norm=settings.algorithm == "eagle3.1",
        norm_output=settings.algorithm == "eagle3.1",
    )
    model, origin = Eagle3(config, rngs=rngs), target.merge(target.params)
    begin_as(model, origin.layers[-1])
    model.fc.assign(Dense(passing_on(size, 3) + 0.1 * model.fc.weight.dense(jnp.float32)))
    model.norm.weight[...] = origin.norm.weight[...].astype(jnp.float32)
    model.draft_to_target[...] = jnp.asarray(ids, jnp.int32)
    model.lm_head.assign(Dense(origin.output_columns(model.draft_to_target[...]).dense(jnp.float32)))
    return split_model(model)


def new_block_head(settings: TrainSettings, target: LoadedTarget, layer: ModelConfig, parts: Split) -> LoadedHead:
    """A block head. Its mask token is the one that the text uses least, the last of several. `fc` mostly passes on the last
    captured layer's feature. (Copies of the target's layers learn no faster: docs/experiments.md.)"""
    layers = settings.num_layers or -(-target.config.num_layers // 8)
    counts, size = counts_of(parts.learnt, target.config.vocab_size), target.config.hidden_size
    config = BlockConfig(
        layer=replace(layer, num_layers=layers, qk_norm=True),
        target_hidden_size=size,
        captured_layers=tuple(sorted({1 + each for each in default_layer_ids(max(3, layers), target.config.num_layers)})),
        target_layers=target.config.num_layers,
        block_size=1 + settings.levels,
        mask_token_id=int(len(counts) - 1 - np.argmin(counts[::-1])),
        causal=(settings.algorithm == "jetspec",) * layers,
        windows=(None,) * layers,
    )
    model = BlockHead(config, rngs=nnx.Rngs(settings.seed))
    model.fc.assign(Dense(passing_on(size, len(config.captured_layers)) + 0.1 * model.fc.weight.dense(jnp.float32)))
    return split_model(model)


def passing_on(size: int, count: int) -> Float[Array, "count*size size"]:
    """Passes on the last of `count` features."""
    return jnp.concatenate([jnp.zeros(((count - 1) * size, size)), jnp.eye(size)])


def begin_as(model: Eagle3, layer: DecoderLayer) -> None:
    """Copies a target layer into the head where their shapes match. Its QKV weights go to the rows that read the features; the rows
    that read the embeddings keep their random values. This saves a quarter of the steps or more (docs/experiments.md)."""
    size = layer.input_layernorm.weight[...].shape[0]
    qkv, origin = model.self_attn.qkv_proj, layer.self_attn.qkv_proj
    qkv.assign(Dense(qkv.weight.dense(jnp.float32).at[size:].set(origin.weight.dense(jnp.float32))))
    norms = (model.hidden_norm, layer.input_layernorm), (model.post_attention_layernorm, layer.post_attention_layernorm)
    for norm, copied in norms:
        if norm.weight[...].shape == copied.weight[...].shape:
            norm.weight[...] = copied.weight[...].astype(jnp.float32)
    pairs = [(model.self_attn.o_proj, layer.self_attn.o_proj)]
    if isinstance(model.mlp, MLP) and isinstance(layer.mlp, MLP):
        pairs += [(model.mlp.gate_up_proj, layer.mlp.gate_up_proj), (model.mlp.down_proj, layer.mlp.down_proj)]
    for own, origin in pairs:
        if own.weight.shape == origin.weight.shape:
            own.assign(Dense(origin.weight.dense(jnp.float32)))
