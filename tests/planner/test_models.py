"""What models take: hand counts of real ones, the same numbers as loaded ones have, heads without their files."""

import jax
import jax.numpy as jnp
import pytest

from convert.converting import Options, convert_target
from jaxspec.checkpoints.loading import load_target
from jaxspec.defaults import own_head
from jaxspec.planner.estimate import Memory, cycle_cost, pair
from jaxspec.planner.gpus import GPUS
from jaxspec.planner.models import read_head, read_target, weights_of
from jaxspec.testing import (
    random_draft_model,
    random_eagle,
    random_head,
    random_mtp,
    tiny_config,
    tiny_engine,
    tiny_target,
    write_head,
    write_target,
)
from jaxspec.tree_shape import TreeShape
from tests.checkpoints.real_heads import eagle3_llama31, eagle_llama2, eagle_llama3, speculators
from tests.checkpoints.test_quantization import FORMATS, HALVES, compressed, published
from tests.checkpoints.test_targets import configured
from tests.planner.configs import DFLASH_QWEN3_8B, EAGLE3_LLAMA_8B, LLAMA_8B, QWEN3_8B, config_file


def test_llama_31_8b_by_hand(tmp_path):
    target = read_target(config_file(tmp_path / "config.json", LLAMA_8B).parent)
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024  # q and o; k and v have 8 heads of 128
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    by_hand = 32 * layer + 2 * 128256 * 4096 + 4096
    assert by_hand == 8_030_261_248  # what its model card calls 8B
    weights = weights_of(target, "bfloat16")
    assert weights.parameters == by_hand and weights.total == 2 * by_hand
    assert weights.embedding == weights.output == 2 * 128256 * 4096
    assert pair(target, None, "bfloat16").cache == 2 * 32 * 8 * 128 * 2 == 128 * 1024


def test_its_eagle3_head_by_hand(tmp_path):
    model = read_target(config_file(tmp_path / "target.json", LLAMA_8B))
    head = read_head(config_file(tmp_path / "config.json", EAGLE3_LLAMA_8B).parent, model)
    layer = (4096 + 2 * 1024) * 2 * 4096 + 4096 * 4096 + 3 * 4096 * 14336  # q, k, v read [embedding, feature]
    by_hand = 3 * 4096 * 4096 + layer + 32000 * 4096 + 4 * 4096  # fc, lm_head, norms
    weights = weights_of(head, "bfloat16")
    assert weights.parameters == by_hand == 424_689_664
    assert weights.total == pytest.approx(2 * by_hand, rel=0.03)  # and a token map of 32,000 int32
    assert weights.embedding == 4 * 32000 and weights.fusion == 2 * 3 * 4096 * 4096 and weights.output == 2 * 32000 * 4096
    together = pair(model, head, "bfloat16")
    assert together.cache == 128 * 1024 + 2 * 8 * 128 * 2 and together.weights == pytest.approx(16.06e9 + 0.85e9, rel=0.03)


@pytest.mark.parametrize("markov_rank", [None, 256])
def test_a_block_head_by_hand(tmp_path, markov_rank):
    """z-lab's for Qwen3-8B, and DeepSpec's: neither embedding nor output projection, and a table of biases per token."""
    config = DFLASH_QWEN3_8B
    if markov_rank is not None:
        of_dspark = {"markov_rank": markov_rank, "architectures": ["Qwen3DSparkModel"], "dflash_config": None}
        config = config | config["dflash_config"] | of_dspark
    model = read_target(config_file(tmp_path / "target.json", QWEN3_8B))
    found = read_head(config_file(tmp_path / "head.json", config), model)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    by_hand = 5 * 4096 * 4096 + 5 * layer + 2 * 4096 + 2 * 151936 * (markov_rank or 0)
    weights = weights_of(found, "bfloat16")
    assert weights.parameters == by_hand and weights.total == 2 * by_hand
    assert weights.output == 0 and weights.embedding == 2 * 151936 * (markov_rank or 0)
    together = pair(model, found, "bfloat16")
    assert together.cache - pair(model, None, "bfloat16").cache == 5 * 2 * 8 * 128 * 2
    # One forward whatever the depth, so a deeper tree reads no more of the head than the biases of further tokens.
    deep, flat = (cycle_cost(together, TreeShape(steps, 2, 4), 1, 1000).moved for steps in (7, 2))
    assert deep["head weights"] - flat["head weights"] == 5 * 2 * 151936 * (markov_rank or 0)
    assert deep["head cache"] == flat["head cache"] == 1000 * 5 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.51), ("fp8", 0.51), ("int4", 0.28)])
def test_quantised_layers_by_their_bytes(tmp_path, quantization, share):
    target, head = (config_file(tmp_path / f"{each['architectures'][0]}.json", each) for each in (LLAMA_8B, EAGLE3_LLAMA_8B))
    model = read_target(target, quantization)
    together = pair(model, read_head(head, model, quantization=quantization), "bfloat16")
    dense = pair(read_target(target), read_head(head, model), "bfloat16")
    for mine, other in ((together.target, dense.target), (together.head, dense.head)):
        assert 0.25 * other.weights.layers < mine.weights.layers <= share * other.weights.layers
        assert mine.weights.parameters == other.weights.parameters and mine.dense == other.weights == other.dense
        assert mine.weights.embedding == other.weights.embedding
    costs = [cycle_cost(each, TreeShape(3, 2, 6), 1, 1000) for each in (together, dense)]
    assert costs[0].operations == costs[1].operations
    assert costs[0].moved["target weights"] < 0.52 * costs[1].moved["target weights"]


@pytest.mark.variants
def test_a_published_quantised_model_from_its_config_alone(tmp_path):
    """Llama-3.3-70B in FP8 as vLLM's people publish it: with its head and 32 thousand tokens of 8-bit cache it fits one H200."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    scheme = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
    }  # fmt: skip
    target = read_target(config_file(tmp_path / "config.json", LLAMA_8B | sizes | {"quantization_config": scheme}))
    head = config_file(tmp_path / "head.json", EAGLE3_LLAMA_8B | sizes | {"num_hidden_layers": 1})
    models = pair(target, read_head(head, target), "bfloat16")
    tables = 2 * 128256 * 8192
    assert models.target.weights.embedding == models.target.weights.output == tables
    assert models.target.weights.parameters == 70_553_706_496
    assert models.target.weights.total == pytest.approx(70_553_706_496 + tables, rel=0.001)  # a byte each, but for tables
    assert Memory(GPUS["h200"].memory, 0.9, 0.9, models.weights, models.cache // 2, 16).tokens > 32768


GROUP = compressed("pack-quantized", **HALVES, strategy="group", group_size=32)["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("compressed-tensors int4", {"config_groups": {"group_0": GROUP | {"targets": ["re:.*mlp.*"]}}}),
        ("GPTQ", {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]}),
    ],
)
def test_layers_that_are_not_quantised_count_whole(tmp_path, name, said):
    """The files tell which these are; of a config.json alone its lists do."""
    stored, _ = published(tmp_path, name, ".mlp.")
    expected = sum(array.nbytes for array in jax.tree.leaves(load_target(stored, jnp.bfloat16).params))
    assert weights_of(read_target(stored), "bfloat16").total == expected
    alone = configured(stored, quantization_config=FORMATS[name][0] | said) / "config.json"
    assert weights_of(read_target(alone), "bfloat16").total == expected


@pytest.mark.parametrize("kind", ["EAGLE3", "EAGLE", "STANDALONE", "tied"])
def test_counts_are_those_of_loaded_models(kind):
    target = tiny_target(num_layers=8, tie_word_embeddings=kind == "tied")
    head = {"EAGLE": random_eagle, "STANDALONE": random_draft_model}.get(kind, random_head)(target.config)
    engine = tiny_engine(target=target, head=head, num_pages=3)
    together = pair(target.config, head.config, "float32")
    assert together.weights == sum(array.nbytes for array in jax.tree.leaves(engine.runner.params))
    pools = sum(array.nbytes for array in jax.tree.leaves((engine.runner.state.cache, engine.runner.state.draft.cache)))
    assert together.cache * engine.config.page_size * 3 == pools


@pytest.mark.parametrize(
    "head", [eagle3_llama31(), eagle_llama2(), eagle_llama3(), speculators()], ids=["3", "1", "1 no bias", "s"]
)
def test_a_config_alone_tells_as_much_as_the_files(head, tmp_path):
    target = tiny_config()
    whole, alone = head.write(tmp_path / "whole"), tmp_path / "alone"
    alone.mkdir()
    config_file(alone / "config.json", head.config)
    from_files, from_config = read_head(whole, target), read_head(alone, target)
    assert type(from_files) is type(from_config)
    assert weights_of(from_config, "bfloat16") == weights_of(from_files, "bfloat16")
    assert read_head(alone / "config.json", target) == from_config


def test_a_mimo_brings_its_head(tmp_path):
    target = tiny_target(qkv_bias=True)
    whole = write_target(tmp_path / "whole", target, head=random_mtp(target.config))
    alone = tmp_path / "alone.json"
    alone.write_text((whole / "config.json").read_text())
    for path in (whole, alone):
        where = own_head(path)
        assert where == path
        assert read_head(where, read_target(path)).algorithm == "MTP"
    assert own_head(write_target(tmp_path / "plain", tiny_target())) is None


def test_a_small_model_reads_its_own_output(tmp_path):
    """From its files and from its config.json alone."""
    target, small = tiny_target(), tiny_target(num_layers=2, hidden_size=16, tie_word_embeddings=True)
    path = write_target(tmp_path / "small", small)
    (alone := tmp_path / "alone.json").write_text((path / "config.json").read_text())
    head = read_head(path, target.config)
    assert head.algorithm == "STANDALONE" and weights_of(head, "float32") == weights_of(small.config, "float32")
    assert weights_of(read_head(alone, target.config), "float32") == weights_of(head, "float32")
    assert pair(target.config, head, "float32").head_logits_from.weights.projection == 4 * 128 * 16


def test_a_token_map_gives_a_head_an_output_of_its_own(tmp_path):
    target = tiny_target()
    path = write_head(tmp_path / "head", random_eagle(target.config))
    (tmp_path / "map.json").write_text("[5, 9, 2]")
    head = read_head(path, target.config, tmp_path / "map.json")
    assert head.draft_vocab_size == 3 and weights_of(head, "float32").output == 4 * 3 * target.config.hidden_size


def test_a_converted_checkpoint_is_what_loading_makes_of_it(tmp_path):
    """With the token map that it was converted with, and quantised as it is, or as it will be."""
    target = tiny_target(hidden_size=128, intermediate_size=64, num_layers=2)
    original = write_target(tmp_path / "original", target)
    (tmp_path / "map.json").write_text("[5, 9, 2]")
    (tmp_path / "other.json").write_text("[5, 9]")
    draft = write_head(tmp_path / "head", random_eagle(target.config))
    convert_target(original, tmp_path / "dense", Options(), draft=draft, token_map=tmp_path / "map.json")
    convert_target(original, tmp_path / "int8", Options(quantization="int8"), draft=draft)
    head = read_head(tmp_path / "dense", target.config, quantization="int8")
    quantised = read_target(tmp_path / "int8", "int8"), read_head(tmp_path / "int8", target.config).layer
    for found, expected in zip((read_target(tmp_path / "dense", "int8"), head.layer), quantised, strict=True):
        assert len(found.storages) > 1 and dict(found.storages) == dict(expected.storages)
    assert head.draft_vocab_size == 3
    assert read_head(tmp_path / "dense", target.config, tmp_path / "other.json").draft_vocab_size == 2
    with pytest.raises(ValueError, match="is quantised already: leave out quantization, which is int4"):
        read_target(tmp_path / "int8", "int4")


def test_what_is_no_head_for_this_target_is_refused(tmp_path):
    wide = eagle3_llama31(hidden=32, target=64).config | {"target_hidden_size": 64}
    whole = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "vocab_size": 96, "eos_token_id": 2}
    for head, message in (
        (wide, r"target_hidden_size \(or hidden_size\) is 64, the target's 32"),
        (eagle_llama3().config | whole, "the draft model's vocabulary has 96 tokens, the target's 128"),
    ):
        with pytest.raises(ValueError, match=message):
            read_head(config_file(tmp_path / "config.json", head), tiny_config())
    with pytest.raises(ValueError, match="does not exist"):
        read_target(tmp_path / "nowhere")
