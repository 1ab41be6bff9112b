"""config.json of models that people have."""

import json
from pathlib import Path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""meta-llama/Llama-3.1-8B-Instruct."""
EAGLE3_LLAMA_8B = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 128256,
    "draft_vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip
"""yuhuili/EAGLE3-LLaMA3.1-Instruct-8B."""
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05, "rope_theta": 640000, "tie_word_embeddings": False,
    "vocab_size": 151680, "attention_bias": True, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
"""XiaomiMiMo/MiMo-7B-RL, with its MTP layer."""
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": False,
    "vocab_size": 151936, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Qwen/Qwen3-8B."""
DFLASH_QWEN3_8B = {
    **QWEN3_8B, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "num_target_layers": 36, "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
"""z-lab/Qwen3-8B-DFlash-b16."""
EAGLE3_QWEN3_8B = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": 151936,
    "draft_vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Tengyunw/qwen3_8b_eagle3."""
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip
"""meta-llama/Llama-2-7b-chat-hf."""
EAGLE_LLAMA_2_7B = {**LLAMA_2_7B, "num_hidden_layers": 1}
"""yuhuili/EAGLE-llama2-chat-7B."""


def config_file(path: Path, config: dict) -> Path:
    """Writes a config.json under any name; returns it."""
    path.write_text(json.dumps(config))
    return path
