"""The layout of the fused projection's output."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QkvLayout:
    """A row of the fused projection: the query heads, then the key heads, then the value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float | None = None
    """Queries and keys are normed head by head (Qwen3) with this epsilon; None: they are not."""
    rope_length: float = 1.0
    """YaRN: rotated queries and keys are multiplied by it."""
