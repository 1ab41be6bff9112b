"""From a checkpoint directory to a model: a graph definition and plain per-layer arrays in the model's own layout.

Checkpoints store projections as [out, in] and q, k, v (gate, up) apart; the modules hold [in, out], fused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import Eagle3Config, ModelConfig
from jaxspec.models.checkpoint import Checkpoint, read_config, read_end_of_sequence
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.head import DraftHead
from jaxspec.models.llama import Llama


@dataclass(frozen=True)
class LoadedModel[Config, Module]:
    """A model taken apart so that only plain dicts of arrays cross the jit boundary; `merge` inside puts it together."""

    config: Config
    graph: nnx.GraphDef
    params: dict

    def merge(self, params: dict) -> Module:
        """The module with these parameters (traced ones, inside a jitted function)."""
        return nnx.merge(self.graph, params)


LoadedTarget = LoadedModel[ModelConfig, Llama]
LoadedHead = LoadedModel[Eagle3Config, DraftHead]


def take_apart(model: nnx.Module, config: ModelConfig | Eagle3Config) -> LoadedModel:
    """A LoadedModel from a module built in Python, as tests and training do."""
    graph, state = nnx.split(model)
    return LoadedModel(config, graph, nnx.to_pure_dict(state))


def load_llama(directory: Path, dtype: DTypeLike, *, progress: bool = False) -> LoadedTarget:
    """A Hugging Face Llama directory. Raises ValueError naming what is missing, unknown, misshapen or unsupported."""
    config = ModelConfig.from_hf(read_config(directory) | read_end_of_sequence(directory))
    tensors = Checkpoint(directory, progress=progress)
    read = _Reader(tensors, dtype)
    params = {
        "embed_tokens": read.vector("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
        "layers": {i: _decoder_layer(read, f"model.layers.{i}.", config) for i in range(config.num_layers)},
        "norm": {"weight": read.vector("model.norm.weight", config.hidden_size)},
    }
    if config.tie_word_embeddings:
        tensors.ignore("lm_head.weight")
    else:
        params["lm_head"] = read.linear(config.hidden_size, ("lm_head.weight", config.vocab_size))
    tensors.ignore(*(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)))
    tensors.finish()
    return _checked(config, lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)), params)


def load_eagle3(
    directory: Path, target: ModelConfig, dtype: DTypeLike, *, progress: bool = False
) -> LoadedModel[Eagle3Config, Eagle3]:
    """An EAGLE-3 head in the SafeAILab / SGLang (`midlayer.*`) or speculators (`layers.0.*`) layout.

    Raises ValueError if the head does not fit the target, or as `load_llama` does.
    """
    config = Eagle3Config.from_hf(read_config(directory))
    layer, draft_vocab_size = config.layer, config.draft_vocab_size
    for name, found, expected in (
        ("target_hidden_size (or hidden_size)", config.target_hidden_size, target.hidden_size),
        ("hidden_size", layer.hidden_size, target.hidden_size),
        ("vocab_size", layer.vocab_size, target.vocab_size),
    ):
        if found != expected:
            raise ValueError(f"the draft head {directory} does not fit the target: its {name} is {found}, the target's {expected}")
    tensors = Checkpoint(directory, progress=progress)
    read = _Reader(tensors, dtype)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    params = {
        "fc": read.linear(config.num_features * config.target_hidden_size, ("fc.weight", layer.hidden_size)),
        "hidden_norm": {"weight": read.vector(prefix + "hidden_norm.weight", layer.hidden_size)},
        **_decoder_layer(read, prefix, layer, input_size=2 * layer.hidden_size),
        "norm": {"weight": read.vector("norm.weight", layer.hidden_size)},
    }
    if draft_vocab_size is not None:
        params["lm_head"] = read.linear(layer.hidden_size, ("lm_head.weight", draft_vocab_size))
        params["draft_to_target"] = _token_map(tensors, draft_vocab_size, target.vocab_size)
    tensors.ignore("t2d", "embed_tokens.weight")  # t2d repeats d2t; the embedding is the target's
    tensors.finish()
    return _checked(config, lambda: Eagle3(config, dtype=dtype, rngs=nnx.Rngs(0)), params)


class _Reader:
    """Takes tensors in the layout of the modules."""

    def __init__(self, tensors: Checkpoint, dtype: DTypeLike):
        self.tensors, self.dtype = tensors, dtype

    def vector(self, name: str, *shape: int) -> jax.Array:
        return jnp.asarray(self.tensors.take(name, shape).astype(self.dtype))

    def linear(self, inputs: int, *outputs: tuple[str, int]) -> dict:
        """One kernel [inputs, sum of outputs] from [out, in] tensors laid side by side."""
        parts = [self.tensors.take(name, (size, inputs)).astype(self.dtype).T for name, size in outputs]
        return {"kernel": jnp.asarray(np.concatenate(parts, 1))}


def _decoder_layer(read: _Reader, prefix: str, config: ModelConfig, input_size: int | None = None) -> dict:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    size, wide = config.hidden_size, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = ((attention + "q_proj.weight", q), (attention + "k_proj.weight", kv), (attention + "v_proj.weight", kv))
    return {
        "input_layernorm": {"weight": read.vector(prefix + "input_layernorm.weight", size)},
        "self_attn": {
            "qkv_proj": read.linear(input_size or size, *qkv),
            "o_proj": read.linear(q, (attention + "o_proj.weight", size)),
        },
        "post_attention_layernorm": {"weight": read.vector(prefix + "post_attention_layernorm.weight", size)},
        "mlp": {
            "gate_up_proj": read.linear(size, (mlp + "gate_proj.weight", wide), (mlp + "up_proj.weight", wide)),
            "down_proj": read.linear(wide, (mlp + "down_proj.weight", size)),
        },
    }


def _token_map(tensors: Checkpoint, draft_vocab_size: int, vocab_size: int) -> jax.Array:
    """Target ids of the draft vocabulary. `d2t` holds offsets: target id = draft id + d2t[draft id]; absent: the identity."""
    if "d2t" not in tensors:
        if draft_vocab_size != vocab_size:
            raise ValueError(f"draft_vocab_size is {draft_vocab_size}, the target's {vocab_size}, and there is no tensor 'd2t'")
        return jnp.arange(vocab_size, dtype=jnp.int32)
    ids = np.arange(draft_vocab_size) + tensors.take("d2t", (draft_vocab_size,))
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise ValueError(f"d2t must map to distinct target ids in [0, {vocab_size}); it reaches {ids.min()} to {ids.max()}")
    return jnp.asarray(ids, jnp.int32)


def _checked(config: ModelConfig | Eagle3Config, build: Callable[[], nnx.Module], params: dict) -> LoadedModel:
    """The loaded model; its parameters must be those that the module has, name by name and shape by shape."""
    graph, state = nnx.split(nnx.eval_shape(build))
    expected = jax.tree.map(lambda array: (array.shape, array.dtype), nnx.to_pure_dict(state))
    found = jax.tree.map(lambda array: (array.shape, array.dtype), params)
    if expected != found:
        raise AssertionError(f"loader and module disagree:\nexpected {expected}\nfound {found}")
    return LoadedModel(config, graph, params)
