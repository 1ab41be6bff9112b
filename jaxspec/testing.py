"""Tiny models, heads and a tokenizer for tests, of this project and of others. All random, all deterministic."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import Eagle3Config, EngineConfig, ModelConfig, SpecConfig
from jaxspec.engine.engine import Engine
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.head import DraftHead, HeadOutput
from jaxspec.models.layers import Rows
from jaxspec.models.llama import Llama
from jaxspec.models.loading import LoadedHead, LoadedModel, LoadedTarget, take_apart
from jaxspec.models.saving import eagle3_tensors, llama_tensors, token_map_tensors, write_checkpoint
from jaxspec.typing import Array, Float, Int, KeysValues


def tiny_config(**changes) -> ModelConfig:
    """A Llama of 8 layers and a vocabulary of 128; it is small enough to compile in seconds."""
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8)
    return ModelConfig(**{**sizes, "max_position_embeddings": 256, **changes})


def tiny_target(seed: int = 0, **changes) -> LoadedTarget:
    """A random target. Its weights are scaled up so that logits are far apart and text depends on the whole context."""
    config = tiny_config(**changes)
    return scaled_up(take_apart(Llama(config, rngs=nnx.Rngs(seed)), config))


def random_head(target: ModelConfig, seed: int = 1, draft_vocab_size: int | None = 64) -> LoadedHead:
    """An EAGLE-3 head that knows nothing; its draft vocabulary is every other token of the target's."""
    layer = tiny_config(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=1,
        num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
    )  # fmt: skip
    config = Eagle3Config(layer, target.hidden_size, draft_vocab_size=draft_vocab_size)
    head = scaled_up(take_apart(Eagle3(config, rngs=nnx.Rngs(seed)), config))
    if draft_vocab_size is not None:
        stride = target.vocab_size // draft_vocab_size
        head.params["draft_to_target"] = jnp.arange(draft_vocab_size, dtype=jnp.int32) * stride
    return head


def scaled_up[Model: LoadedModel](model: Model, factor: float = 12.0) -> Model:
    """The model with larger matrices."""
    return dataclasses.replace(model, params=jax.tree.map(lambda array: array * factor if array.ndim == 2 else array, model.params))


class OracleHead(DraftHead):
    """A head that knows the text: at slot i it proposes the token of position i + 1.

    It is fully accepted exactly if every slot, position and feedback in drafting is right.
    """

    def __init__(self, config: Eagle3Config, text: list[int]):
        self.config = config
        self.text = nnx.Variable(jnp.asarray(text, jnp.int32))

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        return features[..., : features.shape[-1] // 3]

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        slots = (rows.positions + 1).astype(jnp.float32)  # a pair's position is its slot - 1
        layer = self.config.layer
        empty = jnp.zeros((*rows.mask.shape[::2], layer.num_kv_heads, layer.head_dim), embeddings.dtype)
        return HeadOutput(jnp.broadcast_to(slots[..., None], embeddings.shape), (KeysValues(empty, empty),))

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        slots = jnp.minimum(hidden[..., 0].astype(jnp.int32) + 1, self.text.shape[0] - 1)
        return 10.0 * jax.nn.one_hot(self.text[...][slots], self.config.layer.vocab_size)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        return draft_ids


def oracle_head(target: ModelConfig, text: list[int]) -> LoadedHead:
    """A perfect head for the one sequence `text` (prompt and continuation)."""
    config = Eagle3Config(tiny_config(vocab_size=target.vocab_size, num_layers=1), target.hidden_size)
    return take_apart(OracleHead(config, text), config)


class TinyTokenizer:
    """Token i is the byte i, for vocabularies up to 256; the Decoder that engine tests need."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def tiny_engine(
    spec: SpecConfig | None = None,
    *,
    target: LoadedTarget | None = None,
    head: LoadedHead | None = None,
    tokenizer: TinyTokenizer | None = None,
    **options,
) -> Engine:
    """An engine over the tiny target and a random head (none for plain decoding)."""
    target = target or tiny_target()
    spec = spec or SpecConfig(3, 2, 5)
    if head is None and spec.num_steps:
        head = random_head(target.config)
    config = EngineConfig(**{"max_running_requests": 2, "prefill_chunk": 16, "page_size": 4, **options})
    return Engine(target, head, tokenizer or TinyTokenizer(), spec, config)


def write_target(directory: Path, model: LoadedTarget, dtype: str = "float32") -> Path:
    """Writes a tiny target as a Hugging Face directory (config.json, model.safetensors); returns it."""
    write_checkpoint(directory, hf_config(model.config), llama_tensors(model.merge(model.params)), dtype)
    return directory


def write_head(directory: Path, model: LoadedHead, dtype: str = "float32") -> Path:
    """Writes a tiny EAGLE-3 head in SafeAILab's layout; returns the directory."""
    module, config = model.merge(model.params), model.config
    assert isinstance(module, Eagle3)
    tensors: dict = eagle3_tensors(module)
    if config.draft_vocab_size is not None:
        tensors |= token_map_tensors(np.asarray(model.params["draft_to_target"]), config.layer.vocab_size)
    sizes = {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
    write_checkpoint(directory, hf_config(config.layer) | sizes, tensors, dtype)
    return directory


def hf_config(config: ModelConfig) -> dict:
    """The contents of a config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads, "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": config.tie_word_embeddings,
    }  # fmt: skip
