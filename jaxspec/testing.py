"""Tiny models, heads and a tokenizer for tests, of this project and of others; all random, all deterministic. Also what notebooks
need to run a server."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.checkpoints.draft_models import as_draft
from jaxspec.checkpoints.exporting import OWN_DIALECTS, head_checkpoint, hf_config
from jaxspec.checkpoints.layouts import mtp_layout, target_layout
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.config import EngineConfig
from jaxspec.decoding.drafter import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import DEFAULT_START, Start
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, BlockHead, DSparkConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config, default_captured_layers
from jaxspec.models.head import DraftHead
from jaxspec.models.layers import LayerInputs, LayerOutput
from jaxspec.models.linear import Builder
from jaxspec.models.llama import Llama
from jaxspec.models.mtp import MTP, MTPConfig
from jaxspec.models.registry import LoadedHead, LoadedModel, LoadedTarget, split_model
from jaxspec.server_process import launch_server_cmd as launch_server_cmd
from jaxspec.server_process import print_highlight as print_highlight
from jaxspec.server_process import terminate_process as terminate_process
from jaxspec.server_process import wait_for_server as wait_for_server
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Float, KeysValues


def tiny_config(**changes) -> ModelConfig:
    """A Llama of 8 layers and a vocabulary of 128; it is small enough to compile in seconds."""
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8)
    return ModelConfig(**{**sizes, "max_position_embeddings": 256, **changes})


def tiny_target(seed: int = 0, **changes) -> LoadedTarget:
    """A random target. Its weights are scaled up so that logits are far apart and text depends on the whole context."""
    made = _made_target(seed, tuple(sorted(changes.items())))
    return dataclasses.replace(made, params=jax.tree.map(lambda array: array, made.params))  # the dicts are the caller's own


@functools.cache
def _made_target(seed: int, changes: tuple[tuple[str, Any], ...]) -> LoadedTarget:
    """Making one takes half a second, and tests ask for the same few again and again."""
    config = tiny_config(**dict(changes))
    return scaled_up(split_model(Llama(config, rngs=nnx.Rngs(seed))))


def engine_target(seed: int = 4, **changes) -> LoadedTarget:
    """A `tiny_target` of 2 layers, as engines compile several programs in a time that grows with the layers. With this seed its
    texts hardly repeat themselves."""
    return tiny_target(seed, **{"num_layers": 2, **changes})


def random_head(target: ModelConfig, seed: int = 1, draft_vocab_size: int | None = 64, **switches) -> LoadedHead:
    """A random EAGLE-3 head; its draft vocabulary is every other token of the target's.

    `switches` are fields of Eagle3Config or, for `layer`, of ModelConfig.
    """
    layer, layers = head_layer(target, **switches.pop("layer", {})), target.num_layers
    config = Eagle3Config(
        **{
            "layer": layer,
            "target_hidden_size": target.hidden_size,
            "captured_layers": default_captured_layers(layers) if layers >= 7 else tuple(sorted({0, layers // 2, layers - 1})),
            "draft_vocab_size": draft_vocab_size,
            "own_embedding": layer.hidden_size != target.hidden_size,
            **switches,
        }
    )
    head = scaled_up(split_model(Eagle3(config, rngs=nnx.Rngs(seed))))
    if draft_vocab_size is not None:
        stride = target.vocab_size // draft_vocab_size
        head.params["draft_to_target"] = jnp.arange(draft_vocab_size, dtype=jnp.int32) * stride
    return head


def random_eagle(target: ModelConfig, seed: int = 1, fc_bias: bool = True, **layer) -> LoadedHead:
    """A random EAGLE-1/2 head. `layer` are fields of ModelConfig."""
    config = EagleConfig(layer=head_layer(target, **layer), target_hidden_size=target.hidden_size, fc_bias=fc_bias)
    return scaled_up(split_model(Eagle(config, rngs=nnx.Rngs(seed))))


def random_mtp(target: ModelConfig, seed: int = 1) -> LoadedHead:
    """A random MTP layer."""
    config = MTPConfig(layer=head_layer(target, qkv_bias=target.qkv_bias), target_hidden_size=target.hidden_size)
    return scaled_up(split_model(MTP(config, rngs=nnx.Rngs(seed))))


def random_block(target: ModelConfig, seed: int = 1, *, markov_rank: int | None = None, **changes) -> LoadedHead:
    """A random DFlash head of two layers and a block of 6, or a DSpark head if it has a rank.

    `changes` are fields of BlockConfig or, for `layer`, of ModelConfig.
    """
    layer = head_layer(target, **{"num_layers": 2, "qk_norm": True, **changes.pop("layer", {})})
    fields = {
        "layer": layer,
        "target_hidden_size": target.hidden_size,
        "captured_layers": tuple(range(target.num_layers))[-2:],
        "target_layers": target.num_layers,
        "block_size": 6,
        "mask_token_id": target.vocab_size - 1,
        "causal": (False,) * layer.num_layers,
        "windows": (None,) * layer.num_layers,
        **changes,
    }
    config = BlockConfig(**fields) if markov_rank is None else DSparkConfig(**fields, predicts_next=True, markov_rank=markov_rank)
    return scaled_up(split_model(BlockHead(config, rngs=nnx.Rngs(seed))))


def random_draft_model(target: ModelConfig, seed: int = 1, **changes) -> LoadedHead:
    """A random model of two layers as the draft. `changes` are fields of ModelConfig."""
    return as_draft(tiny_target(seed, **{"num_layers": 2, "vocab_size": target.vocab_size, **changes}), target)


def head_layer(target: ModelConfig, **changes) -> ModelConfig:
    """One layer with the target's sizes."""
    sizes = {name: getattr(target, name) for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim")}
    return tiny_config(**{**sizes, "num_layers": 1, **changes})


def scaled_up[Model: LoadedModel](model: Model, factor: float = 12.0) -> Model:
    """The model with larger matrices."""
    return dataclasses.replace(model, params=jax.tree.map(lambda array: array * factor if array.ndim == 2 else array, model.params))


class OracleHead(DraftHead):
    """A head that knows the text: at slot i it proposes the token of position i + 1.

    All of its drafts are accepted if and only if every slot, position and feedback in drafting is right.
    """

    def build(self, builder: Builder) -> None:
        self.text = nnx.Variable(jnp.zeros(256, jnp.int32))

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        slots = (inputs.metadata.positions + 1).astype(jnp.float32)  # a pair's position is its slot - 1
        layer = self.config.layer
        stored = embeddings.dtype if inputs.cache is None else inputs.cache.k.dtype
        empty = jnp.zeros((*inputs.metadata.mask.shape[::2], layer.num_kv_heads, layer.head_dim), stored)
        x = jnp.broadcast_to(slots[..., None], embeddings.shape)
        return LayerOutput(x, x, KeysValues(empty, empty))

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        slots = jnp.minimum(hidden[..., 0].astype(jnp.int32) + 1, self.text.shape[0] - 1)
        return 10.0 * jax.nn.one_hot(self.text[...][slots], self.config.layer.vocab_size)


def oracle_head(target: ModelConfig, text: list[int]) -> LoadedHead:
    """A perfect head for the one sequence `text` (prompt and continuation)."""
    config = EagleConfig(layer=tiny_config(vocab_size=target.vocab_size, num_layers=1), target_hidden_size=target.hidden_size)
    # One length for all texts, so that engines with different ones share their programs. Past its end a text repeats its last
    # token.
    padded = jnp.asarray([*text, *[text[-1]] * max(0, 256 - len(text))], jnp.int32)
    return LoadedHead(config, {"text": padded}, jnp.dtype(jnp.float32), OracleHead)


class TinyTokenizer:
    """Token i is the byte i, for vocabularies up to 256; the Decoder that engine tests need."""

    backend_tokenizer = SimpleNamespace(to_str=lambda: "byte")
    """What grammars need."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def tiny_engine(
    tree: TreeShape | None = None,
    *,
    target: LoadedTarget | None = None,
    head: LoadedHead | Drafter | None = None,
    tokenizer: TinyTokenizer | None = None,
    clock: Callable[[], float] = time.monotonic,
    every_size: bool = False,
    start: Start = DEFAULT_START,
    **options,
) -> Engine:
    """An engine over `engine_target` and a random head (none for plain decoding).

    It has programs for its largest batch and chunk only, unless `every_size`: three to compile instead of seven.
    """
    target = target or engine_target()
    tree = tree or TreeShape(3, 2, 5)
    if head is None and tree.num_steps:
        head = random_head(target.config)
    config = EngineConfig(**{"max_running_requests": 2, "prefill_chunk": 16, "page_size": 4, **options})
    engine = Engine(target, head, tokenizer or TinyTokenizer(), tree, config, clock, start)
    if not every_size:
        largest_sizes_only(engine)
    return engine


def largest_sizes_only(engine: Engine) -> None:
    """Keeps only its largest batch and chunk, so that few programs are compiled."""
    table = engine.runner.table
    engine.runner.table = dataclasses.replace(table, batches=table.batches[-1:], chunks=table.chunks[-1:], prompts=(1,))


def write_target(directory: Path, model: LoadedTarget, dtype: DTypeLike = jnp.float32, *, head: LoadedHead | None = None) -> Path:
    """Writes a tiny target as a Hugging Face directory, with an MTP head inside if one is given; returns it."""
    tensors = dict(tensors_of(target_layout(model.config), model.params))
    config = hf_config(model.config)
    if head is not None:
        assert isinstance(head.config, MTPConfig)
        tensors |= tensors_of(mtp_layout(head.config), head.params)
        config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    write_checkpoint(directory, config, tensors.items(), dtype=dtype)
    return directory


def write_head(directory: Path, model: LoadedHead, dtype: DTypeLike = jnp.float32) -> Path:
    """Writes a tiny head in its authors' layout (no MTP layer: that is written with its target); returns the directory."""
    exported = head_checkpoint(model.config, OWN_DIALECTS[model.config.algorithm])
    write_checkpoint(directory, exported.config, tensors_of(exported.layout, model.params), dtype=dtype)
    return directory
