"""Layouts of published quantised weights: in which tensors each projection lies, and how they become `Numbers`.

compressed-tensors, FP8 (`fp8`, `fbgemm_fp8`), AWQ and GPTQ. quantization.py reads which one a checkpoint has.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.checkpoints.checkpoint import Needed
from jaxspec.checkpoints.layout import ReadTensor
from jaxspec.checkpoints.tensor_files import TensorInfo, transposed
from pallas_kernels.quantized import BLOCK, GROUPS, Numbers, QuantizedAs

ALL = "Linear"
"""The class of all projections."""
AWQ_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""Which of a word's eight halves, from the lowest on, holds column 0, 1, ..."""


@dataclass(frozen=True)
class Scheme(ABC):
    """How projections are quantised."""

    name: str
    """For messages."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: their names, parts of them, or "re:" and a pattern."""
    targets: tuple[str, ...] = (ALL,)
    """Modules that are quantised unless they are ignored, named in the same way."""

    def covers(self, module: str) -> bool:
        """Whether the projection with this name is quantised. Raises ValueError for a wrong pattern."""

        def is_named(names: tuple[str, ...]) -> bool:
            return any(re.match(each[3:], module) if each.startswith("re:") else f".{each}." in f".{module}." for each in names)

        try:
            return (ALL in self.targets or is_named(self.targets)) and not is_named(self.ignored)
        except re.error as error:
            raise ValueError(f"config.json: quantization_config names modules by a wrong pattern: {error}") from None

    @abstractmethod
    def needed(self, module: str, n: int, k: int, infos: Mapping[str, TensorInfo]) -> dict[str, Needed]:
        """The tensors of a projection from k to n numbers. `infos` is empty if there are no files."""

    @abstractmethod
    def numbers(self, module: str, n: int, k: int, read: ReadTensor) -> Numbers:
        """The projection, from its tensors."""

    @abstractmethod
    def storage(self, rows: tuple[int, ...], k: int) -> QuantizedAs | None:
        """How the stack of projections with these rows is stored. None: it is dequantised, because its groups can't stay whole."""


@dataclass(frozen=True)
class EightBits(Scheme):
    """int8 or FP8, `weight` [n, k], with scales per tensor, per row [n, 1] or [n], or per block of 128 x 128."""

    kind: str = "fp8"
    strategy: str = "tensor"
    """tensor, channel or block."""
    scale: str = "weight_scale"
    """The name of the scales' tensor."""

    def needed(self, module: str, n: int, k: int, infos: Mapping[str, TensorInfo]) -> dict[str, Needed]:
        scale, blocks = f"{module}.{self.scale}", (-(-n // BLOCK), -(-k // BLOCK))
        known: dict[str, list[tuple[int, ...]]] = {"tensor": [(1,), ()], "channel": [(n, 1), (n,)], "block": [blocks]}
        shapes = known[self.strategy]
        found = infos[scale].shape if scale in infos else None
        shape = found if found in shapes else shapes[0]
        return {f"{module}.weight": Needed((n, k), floating=self.kind == "fp8"), scale: Needed(shape)}

    def numbers(self, module: str, n: int, k: int, read: ReadTensor) -> Numbers:
        scales = read(f"{module}.{self.scale}").astype(np.float32)
        return Numbers(read(f"{module}.weight"), scales if self.strategy == "block" else np.broadcast_to(scales.reshape(-1), (n,)))

    def storage(self, rows: tuple[int, ...], k: int) -> QuantizedAs | None:
        if self.strategy != "block":
            return QuantizedAs(self.kind)
        return None if k % BLOCK or any(each % BLOCK for each in rows) else QuantizedAs(self.kind, BLOCK)


@dataclass(frozen=True)
class FourBits(Scheme):
    """Numbers of 4 bits, eight in a word of 32 bits."""

    group: int | None = None
    """Numbers of a row that share a scale; None: all."""
    has_zeros: bool = True

    def groups(self, k: int) -> int:
        """Groups in a row."""
        return 1 if self.group is None else -(-k // self.group)

    def storage(self, rows: tuple[int, ...], k: int) -> QuantizedAs | None:
        size = self.group or k
        group = next((each for each in GROUPS if size % each == 0 and k % size == 0), None)
        return None if group is None else QuantizedAs("int4", group, self.has_zeros)


@dataclass(frozen=True)
class PackedRows(FourBits):
    """compressed-tensors: `weight_packed` [n, k / 8] with 8 added to each number, `weight_scale` [n, groups] and
    `weight_zero_point` [n / 8, groups]."""

    def needed(self, module: str, n: int, k: int, infos: Mapping[str, TensorInfo]) -> dict[str, Needed]:
        groups = self.groups(k)
        needed = {
            f"{module}.weight_packed": Needed((n, -(-k // 8)), floating=False),
            f"{module}.weight_scale": Needed((n, groups)),
        }
        zeros = Needed((-(-n // 8), groups), floating=False)
        return needed | ({f"{module}.weight_zero_point": zeros} if self.has_zeros else {})

    def numbers(self, module: str, n: int, k: int, read: ReadTensor) -> Numbers:
        values = nibbles(read(f"{module}.weight_packed"))[:, :k]
        zeros = nibbles(read(f"{module}.weight_zero_point").T)[:, :n].T if self.has_zeros else None
        return Numbers(values, read(f"{module}.weight_scale").astype(np.float32), zeros)


@dataclass(frozen=True)
class Transposed(FourBits):
    """`qzeros` [groups, n / 8], `scales` [groups, n], and `qweight` packed as the subclass says."""

    def needed(self, module: str, n: int, k: int, infos: Mapping[str, TensorInfo]) -> dict[str, Needed]:
        groups = self.groups(k)
        return {
            f"{module}.qweight": Needed(self._packed_shape(n, k), floating=False),
            f"{module}.qzeros": Needed((groups, -(-n // 8)), floating=False),
            f"{module}.scales": Needed((groups, n)),
        }

    @abstractmethod
    def _packed_shape(self, n: int, k: int) -> tuple[int, int]:
        """Of `qweight`."""


@dataclass(frozen=True)
class Awq(Transposed):
    """`qweight` [k, n / 8]; a word's columns are in AWQ_ORDER."""

    def _packed_shape(self, n: int, k: int) -> tuple[int, int]:
        return k, n // 8

    def numbers(self, module: str, n: int, k: int, read: ReadTensor) -> Numbers:
        packed = (nibbles(read(f"{module}.{name}")) for name in ("qweight", "qzeros"))
        values, zeros = (each.reshape(len(each), -1, 8)[..., AWQ_ORDER].reshape(each.shape) for each in packed)
        scales = read(f"{module}.scales").astype(np.float32)
        return Numbers(transposed(values), transposed(scales), transposed(zeros))


@dataclass(frozen=True)
class Gptq(Transposed):
    """`qweight` [k / 8, n]: eight rows of k in a word. `g_idx` [k] names each row's group, which must be in order."""

    zeros_are_less: bool = True
    """The zero points in the file are one less than they should be, as in GPTQ's first format."""

    def _packed_shape(self, n: int, k: int) -> tuple[int, int]:
        return -(-k // 8), n

    def needed(self, module: str, n: int, k: int, infos: Mapping[str, TensorInfo]) -> dict[str, Needed]:
        order = f"{module}.g_idx"
        return super().needed(module, n, k, infos) | ({order: Needed((k,), floating=False)} if order in infos else {})

    def numbers(self, module: str, n: int, k: int, read: ReadTensor) -> Numbers:
        values = nibbles(read(f"{module}.qweight").T)[:, :k]
        zeros = nibbles(read(f"{module}.qzeros"))[:, :n]
        zeros = (zeros + 1) & 15 if self.zeros_are_less else zeros
        return Numbers(values, transposed(read(f"{module}.scales").astype(np.float32)), transposed(zeros))

    def check_order(self, module: str, k: int, read: ReadTensor) -> None:
        """Raises ValueError unless each group consists of consecutive numbers."""
        size = self.group or k
        if not np.array_equal(read(f"{module}.g_idx"), np.arange(k) // size):
            raise ValueError(
                f"tensor '{module}.g_idx' sorts rows by activation (desc_act), which is not supported: get a checkpoint without"
            )


def dequantised(numbers: Numbers, k: int, group: int) -> np.ndarray:
    """The matrix [n, k] in float32. `group`: numbers of 4 bits in a row that share a scale; the last ones may be fewer."""
    values, scales = np.asarray(numbers.values, np.float32), np.asarray(numbers.scales)
    if numbers.values.dtype == np.uint8:
        zeros = np.full(scales.shape, 8) if numbers.zeros is None else np.asarray(numbers.zeros)
        scales, zeros = (np.repeat(each, group, 1)[:, :k] for each in (scales, zeros.astype(np.float32)))
        return (values - zeros) * scales
    if scales.ndim == 1:
        return values * scales[:, None]
    return values * np.repeat(np.repeat(scales, BLOCK, 0)[: len(values)], BLOCK, 1)[:, :k]


def nibbles(words: np.ndarray) -> np.ndarray:
    """The eight 4-bit numbers in each word of 32 bits, lowest first, uint8 [n, 8 * words]."""
    as_bytes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return np.stack([as_bytes & 15, as_bytes >> 4], -1).reshape(len(words), -1)
