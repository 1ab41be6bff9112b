"""What each of several devices holds of a model's parameters. Plain Python: `jaxspec plan` needs it without devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxspec.config import ModelConfig


class Axis(NamedTuple):
    """A dimension of a parameter that is split between devices."""

    name: str
    """heads: query heads; qkv: [queries | keys | values]; gate_up: [gate | up]; ffn, vocab and columns: any numbers alike."""
    dimension: int


AXES: Mapping[tuple[str, ...], Axis] = {
    ("qkv_proj", "kernel"): Axis("qkv", 1),
    ("qkv_proj", "bias"): Axis("qkv", 0),
    ("o_proj", "kernel"): Axis("heads", 0),
    ("gate_up_proj", "kernel"): Axis("gate_up", 1),
    ("down_proj", "kernel"): Axis("ffn", 0),
    ("lm_head", "kernel"): Axis("vocab", 1),
    ("fc", "kernel"): Axis("columns", 1),
    ("fc", "bias"): Axis("columns", 0),
    ("input_proj", "kernel"): Axis("columns", 1),
    ("embed_tokens",): Axis("vocab", 0),
}
"""By the last keys of a parameter. All others are whole on every device."""


def axis_of(keys: Sequence[str | int]) -> Axis | None:
    """The axis of a parameter; None: it is whole.

    In:  ("layers", 0, "mlp", "down_proj", "kernel")
    Out: Axis("ffn", 0)
    """
    return AXES.get(tuple(map(str, keys[-2:]))) or AXES.get(tuple(map(str, keys[-1:])))


@dataclass(frozen=True)
class Shares:
    """How `tp` devices share a model's layers. Attention is whole on each if its heads can't be divided evenly."""

    config: ModelConfig
    tp: int

    @property
    def splits_heads(self) -> bool:
        """False: every device has all heads. KV heads are repeated where there are fewer than devices."""
        kv_heads = self.config.num_kv_heads
        return self.config.num_heads % self.tp == 0 and (kv_heads % self.tp == 0 or self.tp % kv_heads == 0)

    @property
    def heads(self) -> int:
        """Query heads of one device."""
        return self.config.num_heads // self.tp if self.splits_heads else self.config.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of one device."""
        return max(1, self.config.num_kv_heads // self.tp) if self.splits_heads else self.config.num_kv_heads

    def slices(self, axis: str, device: int, size: int) -> tuple[slice, ...]:
        """The stretches that a device holds of a dimension of this size, in order. Zeros follow stretches of padded axes that are
        shorter than their part of `width`.

        In:  "gate_up", device 1 of 2, size 12: gate 0-5, up 6-11
        Out: 3-5 and 9-11
        In:  "qkv", device 1 of 4, heads of one number, 4 of q (0-3), 2 of k (4, 5) and 2 of v (6, 7)
        Out: 1, 4 and 6
        """
        if axis in ("qkv", "heads") and not self.splits_heads:
            return (slice(0, size),)
        if axis == "heads":
            return self._of_heads((device * self.heads, self.heads))
        if axis == "qkv":
            queries, pairs = self.config.num_heads, self.config.num_kv_heads
            first = device * pairs // self.tp
            return self._of_heads(
                (device * self.heads, self.heads), (queries + first, self.kv_heads), (queries + pairs + first, self.kv_heads)
            )
        part = size // 2 if axis == "gate_up" else size
        share = -(-part // self.tp)
        ends = min(device * share, part), min((device + 1) * share, part)
        return tuple(slice(*(start + end for end in ends)) for start in range(0, size, part))

    def width(self, axis: str, size: int) -> int:
        """Size of the dimension on one device, padding included."""
        if axis in ("qkv", "heads"):
            return sum(each.stop - each.start for each in self.slices(axis, 0, size))
        return 2 * -(-(size // 2) // self.tp) if axis == "gate_up" else -(-size // self.tp)

    def _of_heads(self, *stretches: tuple[int, int]) -> tuple[slice, ...]:
        """Stretches of heads, (first, count), as stretches of numbers."""
        size = self.config.head_dim
        return tuple(slice(first * size, (first + count) * size) for first, count in stretches)
