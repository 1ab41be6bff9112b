"""Rotary position embedding: plain, linear, Llama 3.1's scaling and YaRN, as config.json gives it, in the rotate-half layout of
Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import numpy as np

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
EXTENDING = ("linear", "yarn")
"""Kinds with which max_position_embeddings is the length before the scaling, as in transformers' documentation and vLLM."""


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation angles."""

    theta: float = 10000.0
    kind: str = "default"
    """"default", "linear" (angles divided by factor), "llama3" (low frequencies divided by factor, smoothly) or "yarn" (the same
    with another ramp, and longer queries and keys; arXiv 2309.00071)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    """YaRN: pairs that turn more often than this within original_max_position keep their frequency."""
    beta_slow: float = 1.0
    """YaRN: pairs that turn less often than this have their frequency divided by factor."""
    attention_factor: float = 1.0
    """YaRN: what rotated queries and keys are multiplied by."""

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind[:80]!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow ({self.beta_slow}) must be below beta_fast ({self.beta_fast})")
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"rope_theta must be above 1 for YaRN, got {self.theta}")

    @classmethod
    def from_hf(cls, config: dict) -> "RopeConfig":
        """From config.json: rope_theta + rope_scaling (transformers 4) or rope_parameters (transformers 5). If it has both, as
        where a model's card says to add rope_scaling, that comes first. Raises ValueError, naming it, for what is not supported."""
        scaling: dict = {}
        for given in (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
            kinds = [given[key] for key in ("rope_type", "type") if given.get(key)]
            scaling |= {key: each for key, each in given.items() if each is not None} | ({"rope_type": kinds[0]} if kinds else {})
        kind = scaling.get("rope_type", "default")
        if apart := [key for key, each in scaling.items() if isinstance(each, dict)]:
            raise ValueError(
                f"rope parameters of their own for {apart[0]!r:.80} are not supported: expected one set for all layers"
            )
        if kind in ("linear", "llama3", "yarn") and not scaling.get("factor"):
            raise ValueError(f"the rope type {kind!r} needs a factor, and config.json has none")
        for key, neutral in {"partial_rotary_factor": 1.0, "truncate": True, "extrapolation_factor": 1.0}.items():
            if scaling.get(key) not in (None, neutral):
                raise ValueError(f"{key}={scaling[key]!r:.80} of the rope parameters is not supported: expected {neutral}")
        trained = config.get("max_position_embeddings") if kind in EXTENDING else None
        settings = {"attention_factor": yarn_factor(scaling)} if kind == "yarn" else {}
        named_alike = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"]
        named_alike += ["attention_factor"] if kind == "yarn" else []
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            original_max_position=scaling.get("original_max_position_embeddings") or trained or 8192,
            **settings | {name: float(scaling[name]) for name in named_alike if scaling.get(name)},
        )

    @property
    def max_position(self) -> int:
        """Tokens that the scaling reaches; 0: it does not say."""
        return int(self.original_max_position * self.factor) if self.kind in EXTENDING else 0


def yarn_factor(scaling: dict) -> float:
    """The attention factor of YaRN where config.json has none: 0.1 ln(factor) + 1. With mscale and mscale_all_dim (DeepSeek's),
    each of which scales the logarithm, the quotient of the two sums. attn_factor multiplies it, as in vLLM and SGLang (for
    DeepSeek-R1-0528-Qwen3-8B this gives 1; transformers ignores it)."""
    logarithm = math.log(max(1.0, float(scaling.get("factor") or 1.0)))
    above, below = (float(scaling.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    quotient = (0.1 * above * logarithm + 1.0) / (0.1 * below * logarithm + 1.0) if above and below else 0.1 * logarithm + 1.0
    return quotient * float(scaling.get("attn_factor") or 1.0)


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
