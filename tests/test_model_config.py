"""The configuration of a model, from files of both generations."""

import pytest

from jaxspec.model_config import ModelConfig
from jaxspec.models.families import target_config

LLAMA = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}


def test_model_config_reads_both_generations_of_config_files():
    both = LLAMA | {"model_type": "llama", "eos_token_id": [1, 2]}
    old = target_config(both | {"rope_theta": 5e5, "torch_dtype": "bfloat16"})
    new = target_config(both | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"})
    assert old == new
    assert (old.head_dim, old.num_kv_heads, old.rope.theta, old.eos_token_ids, old.dtype) == (16, 4, 5e5, (1, 2), "bfloat16")
    assert ModelConfig.from_hf(LLAMA | {"head_dim": 48}).head_dim == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            "rope type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to 2147483647, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 10000, got 0"),
        ({"head_dim": 8.0}, "head_dim must be a whole number from 1 to 2147483647, got 8.0"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_missing_attributes_are_named():
    with pytest.raises(ValueError, match="no 'hidden_size'"):
        ModelConfig.from_hf({key: value for key, value in LLAMA.items() if key != "hidden_size"})
