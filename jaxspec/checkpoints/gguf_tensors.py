"""The tensors of a GGUF file, under Hugging Face's names: dequantised, or as the blocks that they are stored in.

Next to config and tokenizer, `gguf_file.py` writes a link to the file, LINK, and an index of its tensors, because reading the whole
header takes seconds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.json_files import read_object
from jaxspec.checkpoints.tensor_files import TensorInfo
from pallas_kernels.row_matmul import FORMATS

SUFFIX = ".gguf-index"
INDEX, LINK = "model" + SUFFIX, "model.gguf"
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""GGUF's names of a layer's tensors, and Hugging Face's."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"
PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""GGUF's types that are numbers; all others are blocks."""
DECODED = 64
"""Rows that are decoded at once."""


def index_of(file: Path, tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What `GgufTensors` reads: the file's size, and each tensor's type, shape, offset and size in bytes, and its number of heads
    if RoPE rotates neighbours in it, else 0. `tensors`: the library's, by name. Raises ValueError for an unknown name."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        *place, kind, part = name.split(".")
        if place[:1] == ["blk"] and kind in LAYER and len(place) == 2:
            renamed = f"model.layers.{place[1]}.{LAYER[kind]}.{part}"
        elif not place and kind in OUTSIDE:
            renamed = f"{OUTSIDE[kind]}.{part}"
        else:
            raise ValueError(f"the tensor {name[:200]!r} is unknown")
        heads = 0
        if config["model_type"] == "llama" and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        shape = [int(size) for size in reversed(tensor.shape)]
        found[renamed] = [tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes), heads]
    return {"size": file.stat().st_size, "tensors": found}


def is_entry(entry: Any, file_size: int) -> bool:
    """Whether this is a possible entry of an index for a file of this size."""
    match entry:
        case [str(kind), [*shape], int(offset), int(size), int(heads)] if all(type(each) is int and each > 0 for each in shape):
            inside = min(offset, size, heads) >= 0 and offset + size <= file_size
            return (
                inside and len(shape) in (1, 2) and size == _bytes_of(kind, shape, size) and not (heads and shape[0] % (2 * heads))
            )
    return False


def _bytes_of(kind: str, shape: list[int], otherwise: int) -> int:
    """Bytes of a tensor; `otherwise` if only the library knows."""
    if kind in PLAIN:
        return math.prod(shape) * PLAIN[kind].itemsize
    if kind.lower() not in FORMATS:
        return otherwise
    weights, size = FORMATS[kind.lower()]
    return -1 if shape[-1] % weights else math.prod(shape) // weights * size


class GgufTensors:
    """A GGUF file by its index, as a TensorFile. Raises ValueError if the index is damaged, or the file is gone or was replaced."""

    def __init__(self, path: Path):
        index = read_object(path)
        self.file, size, tensors = path.parent / LINK, index.get("size"), index.get("tensors")
        if type(size) is not int or not self.file.is_file() or self.file.stat().st_size != size:
            raise ValueError(f"{self.file} is gone, or not the file that {path.name} was written for: remove {path.parent}")
        if not isinstance(tensors, dict) or not all(is_entry(entry, size) for entry in tensors.values()):
            raise ValueError(f"{path} is damaged: remove {path.parent}")
        self._tensors: dict[str, Any] = tensors
        self._bytes = np.memmap(self.file, np.uint8, "r")
        self.infos = {
            name: TensorInfo(PLAIN.get(kind, PLAIN["F32"]), tuple(shape), kind.lower() if kind.lower() in FORMATS else None)
            for name, (kind, shape, *_) in self._tensors.items()
        }
        """Blocks in no format of row_matmul's are always dequantised."""

    def read(self, name: str) -> np.ndarray:
        """The tensor's values; those of blocks in float32."""
        return np.asarray(self.view(name))

    def view(self, name: str) -> "StoredRows":
        """The tensor, whose rows are read on access; rows in blocks become float32."""
        kind, shape, _, _, heads = self._tensors[name]
        if kind in PLAIN:
            return StoredRows(self._stored(name).view(PLAIN[kind]).reshape(shape), heads)

        def dequantised(rows: np.ndarray) -> np.ndarray:
            from gguf import GGMLQuantizationType, dequantize

            try:
                return dequantize(rows, GGMLQuantizationType[kind])
            except (KeyError, ValueError, NotImplementedError) as error:
                what = f"tensor {name!r} of kind {kind[:40]} can't be dequantised: {str(error)[:200]}"
                raise ValueError(f"{self.file}: {what}") from None

        if len(shape) == 1:
            return StoredRows(dequantised(self._stored(name)))
        return StoredRows(self._stored(name), heads, Decoding(shape[1], dequantised))

    def blocks(self, name: str) -> "StoredRows":
        """The rows of a tensor in blocks, uint8 [rows, bytes]."""
        return StoredRows(self._stored(name), self._tensors[name][-1])

    def close(self) -> None:
        """Nothing to do: the mapping ends with the last array that views it."""

    def _stored(self, name: str) -> np.ndarray:
        _, shape, offset, size, _ = self._tensors[name]
        return self._bytes[offset : offset + size].reshape(*shape[:-1], -1)


class Decoding(NamedTuple):
    """What the rows of a tensor in blocks become."""

    columns: int
    decode: Callable[[np.ndarray], np.ndarray]
    """The values of some rows, float32, from uint8 [rows, bytes]."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a tensor in a file, which are put in order and decoded when they are asked for."""

    rows: np.ndarray
    """As they are stored, a view of the file: numbers, or uint8 [rows, bytes]."""
    heads: int = 0
    """The number of heads, if their rows are ordered for RoPE on neighbours; 0: the rows need no reordering."""
    decoding: Decoding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape if self.decoding is None else (len(self.rows), self.decoding.columns)

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype if self.decoding is None else np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """A part of it: rows, or rows and columns."""
        own, *others = index if isinstance(index, tuple) else (index,)
        if self.decoding is None:
            return self._in_order(own)[:, *others] if others else self._in_order(own)
        first, end, _ = own.indices(len(self))
        columns = range(self.decoding.columns)[others[0]] if others else range(self.decoding.columns)
        out = np.empty((max(0, end - first), len(columns)), np.float32)
        for start in range(first, end, DECODED):  # so that little more is in memory than is asked for
            some = slice(start, min(start + DECODED, end))
            out[some.start - first : some.stop - first] = self.decoding.decode(self._in_order(some))[:, *others]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """For np.asarray."""
        return self[:]

    def _in_order(self, own: slice) -> np.ndarray:
        """Some rows, not yet decoded, in the order for RoPE on the two halves of each head.

        In:  one head, the rows 0 1 2 3 in the file; all of them
        Out: 0 2 1 3
        """
        if not self.heads:
            return self.rows[own]
        size = len(self.rows) // self.heads
        head, place = np.divmod(np.arange(*own.indices(len(self.rows))), size)
        return self.rows[head * size + place % (size // 2) * 2 + place // (size // 2)]
