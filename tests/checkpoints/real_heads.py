"""Tiny heads with the exact tensor names, shapes and config fields of the ones people have, written down name by name.

Sizes: vocabulary 128, target hidden 32 and 8 layers (jaxspec.testing.tiny_target), 4 heads and 2 KV heads of 8.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.writing import write_checkpoint

VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM = 128, 32, 48, 4, 2, 8
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "max_position_embeddings": 2048, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 151645, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
    "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip
"""The end of texts is another model's, as in SpecForge's configs for DeepSeek-V3 and Ling."""


class Head(NamedTuple):
    """A checkpoint before it is written."""

    config: dict
    tensors: dict[str, np.ndarray]

    def write(self, directory: Path, dtype: str = "float32") -> Path:
        write_checkpoint(directory, self.config, self.tensors.items(), dtype=dtype)
        return directory

    def but(self, *without: str, config: dict | None = None, **shapes: tuple[int, ...]) -> "Head":
        """Without some tensors, with other settings, and with further random tensors (`__` in their names is a dot)."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in without}
        added = random_tensors({name.replace("__", "."): shape for name, shape in shapes.items()}, seed=7)
        return Head(self.config | (config or {}), tensors | added)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Matrices that keep the scale of what they multiply, norms around 1, biases and embeddings around 0."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        scale = 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        tensors[name] = (generator.normal(size=shape) * scale + (1.0 if "norm" in name else 0.0)).astype(np.float32)
    return tensors


def layer_shapes(prefix: str, width: int = HIDDEN, hidden: int = HIDDEN, head_dim: int = HEAD_DIM) -> dict[str, tuple[int, ...]]:
    """Attention and MLP of a Llama layer whose attention reads `width`."""
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return {
        attention + "q_proj.weight": (HEADS * head_dim, width), attention + "k_proj.weight": (KV_HEADS * head_dim, width),
        attention + "v_proj.weight": (KV_HEADS * head_dim, width), attention + "o_proj.weight": (hidden, HEADS * head_dim),
        mlp + "gate_proj.weight": (WIDE, hidden), mlp + "up_proj.weight": (WIDE, hidden), mlp + "down_proj.weight": (hidden, WIDE),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip


def qkv_bias(prefix: str) -> dict[str, tuple[int, ...]]:
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {f"{prefix}self_attn.{name}_proj.bias": (heads * HEAD_DIM,) for name, heads in sizes.items()}


def eagle_llama2() -> Head:
    """yuhuili/EAGLE-llama2-chat-7B: no `bias` in the config, a bias in the file, its own copy of the embedding."""
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    return Head(LLAMA, random_tensors(shapes | layer_shapes("layers.0.")))


def eagle_llama3() -> Head:
    """yuhuili/EAGLE-LLaMA3-Instruct-8B and SGLang's copy: `bias` false, none in the file."""
    head = eagle_llama2().but("fc.bias", config={"bias": False, "rope_theta": 500000.0})
    return Head(head.config | {"architectures": ["LlamaForCausalLMEagle"]}, head.tensors)


def eagle_qwen2() -> Head:
    """yuhuili/EAGLE-Qwen2-7B-Instruct: q, k and v have biases."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "qkv_bias": True,
        "bias": False,
        "rope_theta": 1000000.0,
    }
    return eagle_llama2().but("fc.bias", config=config, **qkv_bias("layers.0."))


def eagle3_llama31(draft_vocab: int = 64, first: str = "midlayer.", hidden: int = HIDDEN, target: int = HIDDEN) -> Head:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: draft vocabulary with maps, no embedding, and neither rope_theta nor head_dim."""
    shapes = {"fc.weight": (hidden, 3 * target), "norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}
    shapes |= {first + "hidden_norm.weight": (hidden,), first + "input_layernorm.weight": (hidden,)}
    tensors = random_tensors(shapes | layer_shapes(first, 2 * hidden, hidden, hidden // HEADS))
    return Head(LLAMA | {"draft_vocab_size": draft_vocab, "hidden_size": hidden}, tensors | token_map(draft_vocab))


def deepspec_eagle3() -> Head:
    """deepseek-ai/eagle3_qwen3_8b_ttt7: five layers of the target, q/k norms, copies of embedding and lm_head, and no maps."""
    shapes = {"fc.weight": (HIDDEN, 5 * HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"layers.0.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    settings = {
        "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "head_dim": HEAD_DIM, "layer_types": ["full_attention"],
        "num_target_layers": 8, "target_layer_ids": [0, 1, 3, 4, 6], "ttt_length": 7, "draft_vocab_size": None,
    }  # fmt: skip
    named = {name.replace(".", "__"): shape for name, shape in shapes.items()}
    return eagle3_llama31(VOCAB, first="layers.0.").but("d2t", "t2d", config=settings, **named)


def token_map(draft_vocab: int) -> dict[str, np.ndarray]:
    """d2t and t2d of every other token."""
    ids = np.arange(draft_vocab) * (VOCAB // draft_vocab)
    members = np.zeros(VOCAB, np.bool_)
    members[ids] = True
    return {"d2t": ids - np.arange(draft_vocab), "t2d": members}


def speculators(**settings: Any) -> Head:
    """RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3: `layers.0`, its own embedding, layers named by their input."""
    head = eagle3_llama31(first="layers.0.").but(embed_tokens__weight=(VOCAB, HIDDEN))
    layer = {key: value for key, value in LLAMA.items() if key not in ("transformers_version", "torch_dtype")}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1.0.dev42",
        "draft_vocab_size": 64, "norm_before_residual": True, "target_hidden_size": None, "torch_dtype": "float16",
        "transformer_layer_config": layer | {"rope_theta": 10000.0, "head_dim": HEAD_DIM, "attention_bias": False},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    return Head(config | settings, head.tensors)


def dflash(block: int = 6, **settings: Any) -> Head:
    """z-lab/Qwen3-8B-DFlash-b16: neither embedding nor lm_head, q/k norms, settings in dflash_config, where `settings` go."""
    layers = [f"layers.{index}." for index in range(2)]
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for prefix in layers:
        shapes |= layer_shapes(prefix) | {prefix + "input_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    config = LLAMA | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": 2, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_target_layers": 8,
        "block_size": block, "dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 3, 5], **settings},
    }  # fmt: skip
    return Head(config, random_tensors(shapes))


def dspark() -> Head:
    """deepseek-ai/dspark_qwen3_8b_block7: everything at the top level, copies of embedding and lm_head, two more heads."""
    of_block = {"mask_token_id": 127, "target_layer_ids": [1, 3, 5], "num_anchors": 512, "dflash_config": None}
    of_heads = {
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {"markov_head.markov_w1.weight": (VOCAB, 4), "markov_head.markov_w2.weight": (VOCAB, 4)}
    shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 4), "confidence_head.proj.bias": (1,)}
    added = {name.replace(".", "__"): shape for name, shape in shapes.items()}
    return dflash(7).but(config={"architectures": ["Qwen3DSparkModel"], **of_block, **of_heads}, **added)


def deepspec_dflash() -> Head:
    """deepseek-ai/dflash_qwen3_8b_block7: as its DSpark, without the two more heads."""
    settings = {"markov_rank": 0, "enable_confidence_head": False, "markov_head_type": None, "confidence_head_with_markov": None}
    return dspark().but(*(name for name in dspark().tensors if name.startswith(("markov", "confidence"))), config=settings)


def mimo_mtp() -> dict[str, np.ndarray]:
    """The MTP tensors inside XiaomiMiMo/MiMo-7B-RL."""
    prefix = "model.mtp_layers.0."
    shapes = {prefix + "input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    shapes |= {f"{prefix}{name}.weight": (HIDDEN,) for name in norms}
    return random_tensors(shapes | layer_shapes(prefix) | qkv_bias(prefix))
