"""The shape of a model, from its config.json (ModelConfig), and how its weights may be stored."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxspec.config_json import checked, refuse_unsupported, require_size
from jaxspec.rope import RopeConfig

if TYPE_CHECKING:
    from jaxspec.models.feed_forward import FeedForward
    from jaxspec.models.linear import Storage

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights; "auto" chooses one of them."""
QUANTIZATIONS = ("int8", "fp8", "int4")
"""How matrices can be quantised while they are loaded: 8-bit numbers with a scale per row, or 4-bit ones with a scale per group."""
UNQUANTIZED = ("none", "None", "unquant")
"""Names of no quantisation."""
QUANTIZED = (*QUANTIZATIONS, *UNQUANTIZED)
QUANTIZE_BY = f"must be one of {', '.join(QUANTIZATIONS)} or none (a quantised checkpoint says itself how: leave the option out)"


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder, from the fields of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    """The longest sequence, prompt and output, that the model was trained for, in tokens."""
    tie_word_embeddings: bool = False
    """True: the transposed embedding is the output projection, and the checkpoint has no lm_head."""
    qkv_bias: bool = False
    """The query, key and value projections have biases (Qwen2, MiMo)."""
    qk_norm: bool = False
    """Queries and keys are normalized per head before RoPE (Qwen3)."""
    kv_scales: bool = False
    """The checkpoint has a scale for the keys and one for the values of each layer, for caches of 8 bits."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The dtype of the checkpoint; the engine may use another."""
    storage: "Storage | None" = None
    """How matrices are stored. None: as they are (pallas_kernels.weight.Dense)."""
    storages: "tuple[tuple[tuple[str | int, ...], Storage], ...]" = ()
    """Those of single layers, by their path in the module, where they differ; and the embedding's, which is stored transposed."""
    feed_forward: "FeedForward | None" = None
    """The kind of feed-forward. None: a SwiGLU MLP, `intermediate_size` wide."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if unknown := [token for token in self.eos_token_ids if token >= self.vocab_size]:
            raise ValueError(f"eos_token_id names token {unknown[0]}; the vocabulary has {self.vocab_size} tokens")

    @classmethod
    def from_hf(cls, config: dict, *, qkv_bias: bool = False, qk_norm: bool = False) -> "ModelConfig":
        """From a parsed config.json. The family or the file tells biases and norms, and `families.target_config` reads what ends a
        text: in heads' configs it may be another model's.

        Raises:
            ValueError: an attribute is missing or has a value that is not supported; the message names it.
        """
        refuse_unsupported(config := checked(config))
        heads, hidden_size = require_size(config, "num_attention_heads"), require_size(config, "hidden_size")
        longest = require_size(config, "max_position_embeddings", default=2048)
        if (chunks := config.get("dual_chunk_attention_config")) is not None:  # beyond one, attention is another one
            longest = min(longest, chunks.get("original_max_position_embeddings") or longest)
        return cls(
            vocab_size=require_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=require_size(config, "intermediate_size"),
            num_layers=require_size(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=require_size(config, "num_key_value_heads", default=heads),
            head_dim=require_size(config, "head_dim", default=hidden_size // heads),
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            rope=(rope := RopeConfig.from_hf(config)),
            max_position_embeddings=max(longest, rope.max_position),
            tie_word_embeddings=config.get("tie_word_embeddings") or False,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )
