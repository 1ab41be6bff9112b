"""Rotary position embedding: plain, linear and Llama 3.1's scaling, in the rotate-half layout of Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation angles."""

    theta: float = 10000.0
    kind: str = "default"
    """"default", "linear" (angles divided by factor) or "llama3" (low frequencies divided by factor, smoothly)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.kind not in ("default", "linear", "llama3"):
            raise ValueError(f"rope type {self.kind[:80]!r} is not supported; supported: default, linear, llama3")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})")

    @classmethod
    def from_hf(cls, config: dict) -> "RopeConfig":
        """From config.json: rope_theta + rope_scaling (transformers 4) or rope_parameters (transformers 5)."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=scaling.get("rope_type") or scaling.get("type") or "default",
            factor=float(scaling.get("factor") or 1.0),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            original_max_position=scaling.get("original_max_position_embeddings") or 8192,
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each of the head_dim / 2 rotated pairs, float32 [head_dim / 2]."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        # Wavelengths below original / high stay, those above original / low are stretched, with a linear ramp between.
        wavelength = 2 * math.pi / inverse
        ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
        inverse = keep * inverse + (1 - keep) * inverse / rope.factor
    return inverse.astype(np.float32)
