"""Writes models as standard Hugging Face and EAGLE-3 checkpoints: the inverse of `loading`.

Modules keep projections as [in, out] with q, k, v fused and gate, up fused; checkpoints keep them as [out, in], apart.
"""

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.flax import save_file

from jaxspec.config import ModelConfig
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.layers import MLP, Attention
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Int


def llama_tensors(model: Llama) -> dict[str, Array]:
    """The target's tensors under their Hugging Face names."""
    tensors = {"model.embed_tokens.weight": model.embed_tokens[...], "model.norm.weight": model.norm.weight[...]}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        tensors |= _attention_tensors(prefix + "self_attn.", layer.self_attn, model.config)
        tensors |= _mlp_tensors(prefix + "mlp.", layer.mlp)
        tensors[prefix + "input_layernorm.weight"] = layer.input_layernorm.weight[...]
        tensors[prefix + "post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight[...]
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.kernel[...].T
    return tensors


def eagle3_tensors(head: Eagle3) -> dict[str, Array]:
    """The head's tensors under SafeAILab's EAGLE-3 names, without its token map (see `token_map_tensors`)."""
    tensors = {"fc.weight": head.fc.kernel[...].T}
    tensors |= _attention_tensors("midlayer.self_attn.", head.self_attn, head.config.layer)
    tensors |= _mlp_tensors("midlayer.mlp.", head.mlp)
    tensors["midlayer.hidden_norm.weight"] = head.hidden_norm.weight[...]
    tensors["midlayer.input_layernorm.weight"] = head.input_layernorm.weight[...]
    tensors["midlayer.post_attention_layernorm.weight"] = head.post_attention_layernorm.weight[...]
    tensors["norm.weight"] = head.norm.weight[...]
    if head.config.draft_vocab_size is not None:
        tensors["lm_head.weight"] = head.lm_head.kernel[...].T
    return tensors


def token_map_tensors(target_ids: Int[np.ndarray, " v"], target_vocab: int) -> dict[str, np.ndarray]:
    """EAGLE-3's token map: draft id i stands for target id i + d2t[i]; t2d marks the target ids that have a draft id."""
    offsets = target_ids.astype(np.int64) - np.arange(len(target_ids))
    members = np.zeros(target_vocab, np.bool_)
    members[target_ids] = True
    return {"d2t": offsets, "t2d": members}


def write_checkpoint(directory: Path, config: dict, tensors: dict, dtype: DTypeLike = jnp.bfloat16, copy: tuple[Path, ...] = ()):
    """Writes config.json, model.safetensors and copies of other files, all at once: readers see the old or the new one.

    Args:
        directory: replaced if it exists.
        config: the contents of config.json; `torch_dtype` is filled in.
        tensors: by name; floating-point ones are cast to `dtype`.
        copy: further files, such as the tokenizer's.
    """
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    cast = {name: jnp.asarray(t, dtype) if jnp.issubdtype(t.dtype, jnp.floating) else t for name, t in tensors.items()}
    save_file(cast, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "model.safetensors").chmod(0o644)  # save_file makes it private
    settings = {**config, "torch_dtype": jnp.dtype(dtype).name}
    (fresh / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for file in copy:
        shutil.copy(file, fresh / file.name)
    shutil.rmtree(directory, ignore_errors=True)
    os.rename(fresh, directory)


def _attention_tensors(prefix: str, attention: Attention, config: ModelConfig) -> dict[str, Array]:
    widths = [config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim]
    q, k, v = jnp.split(attention.qkv_proj.kernel[...], widths, 1)
    parts = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": attention.o_proj.kernel[...]}
    return {f"{prefix}{name}.weight": part.T for name, part in parts.items()}


def _mlp_tensors(prefix: str, mlp: MLP) -> dict[str, Array]:
    gate, up = jnp.split(mlp.gate_up_proj.kernel[...], 2, 1)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down_proj.kernel[...]}
    return {f"{prefix}{name}.weight": part.T for name, part in parts.items()}
