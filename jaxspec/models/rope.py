"""Rotary position embedding: plain, linear, Llama 3.1's scaling and YaRN, in the rotate-half layout of Hugging Face checkpoints."""

import math

import numpy as np

from jaxspec.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each of the head_dim / 2 rotated pairs, float32 [head_dim / 2]."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kept = 0.0 if rope.kind == "linear" else _kept(rope, inverse)
    return (kept * inverse + (1 - kept) * inverse / rope.factor).astype(np.float32)


def _kept(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """How far each frequency is kept: 1 as it is, 0 divided by the factor, with a linear ramp between."""
    if rope.kind == "llama3":  # wavelengths below original / high stay, those above original / low are stretched
        wavelength = 2 * math.pi / inverse
        ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return np.clip(ramp, 0.0, 1.0)
    if rope.kind == "yarn":  # pairs that turn often within the original length stay, the ramp is linear in the pair's number
        pairs = len(inverse)

        def pair(turns: float) -> float:
            return pairs * math.log(rope.original_max_position / (turns * 2 * math.pi)) / math.log(rope.theta)

        first, last = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), 2 * pairs - 1)
        return 1 - np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0.0, 1.0)
    return np.ones_like(inverse)
