"""Layouts: which tensors of a checkpoint become which parameter. One table serves reading, checking and writing back.

Checkpoints store projections as [out, in] and q, k, v (gate, up) apart; the modules hold [in, out], fused.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.checkpoint import Checkpoint, Needed
from jaxspec.checkpoints.tensor_files import Tensor, transpose_into, transposed
from jaxspec.model_config import ModelConfig
from jaxspec.models.feed_forward import feed_forward_of
from jaxspec.models.head import HeadConfig

ReadTensor = Callable[[str], np.ndarray]
ViewTensor = Callable[[str], Tensor]
COPIED = 256
"""Rows that are copied at once."""
MIXABLE = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
"""If tensors of several of these become one parameter, all become float32, which changes none of their numbers."""


class Source(Protocol):
    """The tensors of one parameter."""

    def needed(self) -> dict[str, Needed]:
        """The tensors it needs."""

    def join(self, read: ReadTensor) -> np.ndarray:
        """The parameter, from its tensors, in C order."""

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors, from the parameter: the inverse of `join`."""


@dataclass(frozen=True)
class Stacked:
    """Tensors stacked along their rows, or the transpose of that stack, before they are joined. Accessing a part reads nothing else
    from the files.

    In:  [2, 3], [4, 3], is_transposed True; [:, 1:4]
    Out: [3, 3]
    """

    tensors: list[Tensor]
    is_transposed: bool = False

    @property
    def dtype(self) -> np.dtype:
        return self.tensors[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (sum(map(len, self.tensors)), *self.tensors[0].shape[1:])
        return shape[::-1] if self.is_transposed else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        (first, end), others = self._stretch(index)
        joined = self._rows(first, end, others)
        return joined.T if self.is_transposed else joined

    def copy_to(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        """Writes a part of it to an array, in the array's dtype. This takes little other memory."""
        (first, end), others = self._stretch(index)
        for start in range(first, end, COPIED):
            part = self._rows(start, min(start + COPIED, end), others).astype(out.dtype, copy=False)
            place = slice(start - first, start - first + len(part))
            if self.is_transposed:
                transpose_into(part, out[:, place])
            else:
                out[place] = part

    def _stretch(self, index: tuple[slice, ...]) -> tuple[tuple[int, int], list[slice]]:
        """The rows (first, end) and the columns of the stack that a part consists of."""
        every = (*index, *(slice(None),) * (self.ndim - len(index)))
        rows, *others = every[::-1] if self.is_transposed else every
        first, end, _ = rows.indices(sum(map(len, self.tensors)))
        return (first, end), others

    def _rows(self, first: int, end: int, others: list[slice]) -> np.ndarray:
        """These rows and columns of the stack."""
        parts, start = list[np.ndarray](), 0
        for tensor in self.tensors:
            part = tensor[max(first - start, 0) : max(end - start, 0), *others]
            parts, start = [*parts, part] if len(part) else parts, start + len(tensor)
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self.tensors[0][:0, *others]])

    def join(self) -> np.ndarray:
        """All of it, in C order."""
        return transposed(*self.tensors) if self.is_transposed else self[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """For np.asarray."""
        return self.join()


Keys = tuple[str | int, ...]
Layout = dict[Keys, Source]
"""A model's parameters by their keys in the nested dict, such as ("layers", 0, "mlp", "down_proj", "kernel")."""


class Stack(NamedTuple):
    """A parameter made of tensors [rows, *columns], stacked along their rows; a kernel is the transpose of the stack.

    In:  tensors (("q_proj.weight", 8), ("k_proj.weight", 4)), columns (6,), is_kernel True
    Out: a parameter [6, 12]
    """

    tensors: tuple[tuple[str, int], ...]
    """Name and rows of each."""
    columns: tuple[int, ...] = ()
    is_kernel: bool = False

    def needed(self) -> dict[str, Needed]:
        return {name: Needed((rows, *self.columns)) for name, rows in self.tensors}

    def join(self, read: ReadTensor) -> np.ndarray:
        return self.view(read).join()

    def view(self, read: ViewTensor) -> Stacked:
        """The parameter before its tensors are joined."""
        parts = [read(name) for name, _ in self.tensors]
        if len({part.dtype for part in parts}) > 1 and all(part.dtype in MIXABLE for part in parts):  # GGUF files mix them
            parts = [part if part.dtype == np.float32 else np.asarray(part).astype(np.float32) for part in parts]
        if len({part.dtype for part in parts}) > 1:
            names = ", ".join(f"{name} is {part.dtype}" for (name, _), part in zip(self.tensors, parts, strict=True))
            raise ValueError(f"tensors that become one parameter must have one dtype, but {names}")
        return Stacked(parts, self.is_kernel)

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum([rows for _, rows in self.tensors])[:-1]
        parts = [transposed(part) for part in np.split(parameter, ends, 1)] if self.is_kernel else np.split(parameter, ends)
        return {name: part for (name, _), part in zip(self.tensors, parts, strict=True)}


class CacheScale(NamedTuple):
    """The scale of a layer's keys or values in a cache of 8 bits, float32 [kv_heads]: one number for all heads, or one for each.

    In:  a tensor [0.5], kv_heads 4
    Out: [0.5, 0.5, 0.5, 0.5]
    """

    name: str
    kv_heads: int
    zeros: tuple[str, ...] = ()
    """The zero point beside it, which llm-compressor writes for symmetric caches too: it must be 0."""

    def needed(self) -> dict[str, Needed]:
        return dict.fromkeys([self.name, *self.zeros], Needed((1,), or_shapes=((), (self.kv_heads,), (self.kv_heads, 1, 1))))

    def join(self, read: ReadTensor) -> np.ndarray:
        if any(read(zero).any() for zero in self.zeros):
            raise ValueError(f"tensor {self.zeros[0]!r} must be 0: asymmetric caches are not supported")
        scale = np.ravel(read(self.name)).astype(np.float32)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"tensor {self.name!r} must be above 0, got {scale.min():g}: it was not calibrated")
        return np.array(np.broadcast_to(scale, self.kv_heads))

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        return {self.name: parameter[:1] if (parameter == parameter[0]).all() else parameter}


def table(name: str, rows: int, columns: int) -> Stack:
    """A matrix that keeps its orientation, such as an embedding."""
    return Stack(((name, rows),), (columns,))


def linear(inputs: int, *outputs: tuple[str, int], bias: bool = False) -> Layout:
    """A projection fused of several; each is given by its name (without `.weight`) and its output size."""
    kernel = Stack(tuple((f"{name}.weight", size) for name, size in outputs), (inputs,), is_kernel=True)
    layout: Layout = {("kernel",): kernel}
    if bias:
        layout["bias",] = Stack(tuple((f"{name}.bias", size) for name, size in outputs))
    return layout


def norm(name: str, size: int) -> Layout:
    """An RMSNorm, given by its name without `.weight`."""
    return {("weight",): Stack(((f"{name}.weight", size),))}


def nested(*path: str | int, layout: Layout) -> Layout:
    """The layout one level deeper."""
    return {(*path, *inner): source for inner, source in layout.items()}


CACHE_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)
"""The names of a layer's cache scales after `self_attn.`: compressed-tensors', ModelOpt's, and old compressed-tensors'."""


def decoder_layer(
    prefix: str,
    config: ModelConfig,
    *,
    input_size: int | None = None,
    input_norm: str | None = "input_layernorm",
    names: Collection[str] = (),
) -> Layout:
    """A decoder layer's layout; the names of its tensors begin with `prefix`.

    Args:
        input_size: width of what its attention reads; None: the hidden size.
        input_norm: the name of the norm before attention; None: it has none.
        names: the files' tensors, which show what they call the cache's scales, if config.kv_scales.
    """
    size, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = prefix + "self_attn."
    qkv = ((attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv))
    layout: Layout = {
        **nested("self_attn", "qkv_proj", layout=linear(input_size or size, *qkv, bias=config.qkv_bias)),
        **nested("self_attn", "o_proj", layout=linear(q, (attention + "o_proj", size))),
        **nested("post_attention_layernorm", layout=norm(prefix + "post_attention_layernorm", size)),
    }
    for path, (inputs, outputs) in feed_forward_of(config).projections(config).items():
        named = [(f"{prefix}mlp.{name}", width) for name, width in outputs]
        layout |= nested("mlp", *path, layout=linear(inputs, *named))
    if input_norm:
        layout |= nested("input_layernorm", layout=norm(prefix + input_norm, size))
    if config.qk_norm:
        layout |= nested("self_attn", "q_norm", layout=norm(attention + "q_norm", head_dim))
        layout |= nested("self_attn", "k_norm", layout=norm(attention + "k_norm", head_dim))
    if config.kv_scales:
        scales = next((pair for pair in CACHE_SCALES if attention + pair[0] in names), CACHE_SCALES[0])
        for key, name in zip(("k_scale", "v_scale"), scales, strict=True):
            zeros = {attention + name.replace("scale", "zero_point")}.intersection(names)
            layout["self_attn", key] = CacheScale(attention + name, config.num_kv_heads, tuple(zeros))
    return layout


class DraftVocabulary(NamedTuple):
    """The parameter `draft_to_target`, int32 [draft_vocab_size]: target id = draft id + d2t[draft id].

    In:  d2t [0, 2, 2]
    Out: [0, 3, 4]
    """

    draft_vocab_size: int
    vocab_size: int
    has_offsets: bool = True
    """The checkpoint has `d2t`. False: draft ids are target ids."""
    has_members: bool = True
    """The checkpoint has `t2d`, which repeats the information of `d2t` and must agree with it."""

    def needed(self) -> dict[str, Needed]:
        needed = {}
        if self.has_offsets:
            needed["d2t"] = Needed((self.draft_vocab_size,), floating=False)
        if self.has_members:
            needed["t2d"] = Needed((self.vocab_size,), floating=False)
        return needed

    def join(self, read: ReadTensor) -> np.ndarray:
        ids = np.arange(self.draft_vocab_size)
        if self.has_offsets:
            ids = ids + read("d2t")
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(np.unique(ids)) != len(ids):
            raise ValueError(
                f"d2t must map to distinct target ids in [0, {self.vocab_size}); it reaches {ids.min()} to {ids.max()}, "
                f"{len(np.unique(ids))} of {len(ids)} distinct"
            )
        if self.has_members and not np.array_equal(np.flatnonzero(read("t2d")), np.sort(ids)):
            raise ValueError("tensors d2t and t2d disagree about which tokens are in the draft vocabulary: one of them is wrong")
        return ids.astype(np.int32)

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """d2t and t2d; nothing if draft ids are target ids and the checkpoint has no `d2t`."""
        offsets = parameter.astype(np.int64) - np.arange(self.draft_vocab_size)
        members = np.zeros(self.vocab_size, np.bool_)
        members[parameter] = True
        return {"d2t": offsets, "t2d": members} if self.has_offsets or offsets.any() else {}


@dataclass(frozen=True)
class TensorPlan[Config: ModelConfig | HeadConfig]:
    """What a checkpoint contains and how its tensors become parameters, from names, shapes and config alone; no value is read."""

    dialect: str
    """The producer whose names and config fields these are, for messages."""
    config: Config
    layout: Layout
    ignored: frozenset[str] = frozenset()
    """Tensors that the checkpoint may contain and the model does not need."""

    def needed(self) -> dict[str, Needed]:
        return {name: needed for source in self.layout.values() for name, needed in source.needed().items()}

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError naming every tensor that is missing, misshapen or unknown."""
        checkpoint.check(self.needed(), self.ignored)
