"""What a checkpoint directory holds, without loading its weights."""

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from jaxspec.models.checkpoint import read_config
from jaxspec.models.loading import load_eagle3

from jaxspec.config import Eagle3Config, ModelConfig

MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensors(directory: Path) -> list[Tensor]:
    """All tensors of the directory's safetensors files. Raises ValueError naming a file that can't be read."""
    found = [tensor for file in sorted(directory.glob("*.safetensors")) for tensor in read_header(file)]
    if not found:
        raise ValueError(f"{directory} has no .safetensors files")
    return found


def read_header(file: Path) -> list[Tensor]:
    """The entries of one file's header: 8 bytes of length, then JSON (the safetensors format)."""
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= MAX_HEADER_BYTES or size > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file: its header says {size} bytes")
        try:
            header = json.loads(stream.read(size))
            return [Tensor(name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is not a safetensors file: its header can't be parsed") from None


def describe(directory: Path) -> str:
    """A few lines: kind and layout, sizes from config.json, parameters and bytes, the tensors' dtypes."""
    config, found = read_config(directory), tensors(directory)
    names = {tensor.name for tensor in found}
    parameters = Counter[str]()
    for tensor in found:
        parameters[tensor.dtype] += math.prod(tensor.shape)
    is_head = "fc.weight" in names
    sizes = Eagle3Config.from_hf(config).layer if is_head else ModelConfig.from_hf(config)
    lines = {
        "kind": kind(names),
        "layers": f"{sizes.num_layers} x hidden {sizes.hidden_size}, intermediate {sizes.intermediate_size}",
        "attention": f"{sizes.num_heads} heads, {sizes.num_kv_heads} KV heads of {sizes.head_dim}",
        "vocabulary": f"{sizes.vocab_size}" + (f", draft {config.get('draft_vocab_size') or 'shared'}" if is_head else ""),
        "rope": f"{sizes.rope.kind}, theta {sizes.rope.theta:g}",
        "parameters": f"{sum(parameters.values()):,} in {len(found)} tensors",
        "dtypes": ", ".join(f"{dtype} {count:,}" for dtype, count in parameters.most_common()),
    }
    return "\n".join(f"{name:>11}  {value}" for name, value in lines.items())


def kind(names: set[str]) -> str:
    """Target or head, told by the tensors (config.json's `architectures` is not to be trusted)."""
    if "fc.weight" not in names:
        return "target (Llama layout)" if "model.embed_tokens.weight" in names else "unknown: no model.embed_tokens, no fc"
    if "midlayer.hidden_norm.weight" in names:
        return "EAGLE-3 head, SafeAILab / SGLang layout (midlayer.*)"
    if "layers.0.hidden_norm.weight" in names:
        return "EAGLE-3 head, speculators layout (layers.0.*)"
    return "a head with fc.weight but no hidden_norm: not EAGLE-3, not supported yet"


def fits(head: Path, target: Path) -> str:
    """Loads the head against the target's sizes. Raises ValueError saying what does not fit."""
    load_eagle3(head, ModelConfig.from_hf(read_config(target)), jnp.float32)
    return f"{'fits':>11}  yes: every tensor of the head has its place beside {target.name}"
