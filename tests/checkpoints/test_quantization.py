"""Published quantised checkpoints, written here in each layout, against the same weights dequantised in NumPy."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.loading import load_target
from jaxspec.checkpoints.quantization import read_scheme
from jaxspec.checkpoints.schemes import EightBits, PackedRows
from jaxspec.checkpoints.storing import Storing
from jaxspec.models.layers import causal_metadata
from jaxspec.testing import tiny_target, write_target
from tests.checkpoints.test_targets import configured
from tests.sets import exhaustive

FP8 = ml_dtypes.float8_e4m3fn
SIZES = dict(hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
TOKENS = jnp.arange(40, 60)[None]
Layout = Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]
"""From a matrix [n, k] to the tensors of its projection, and what they mean in float32."""


def words(numbers: np.ndarray, axis: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> np.ndarray:
    """Eight numbers of 4 bits in a word of 32, along this axis. `order`: which of the eight each place has, from the lowest."""
    numbers = np.moveaxis(numbers, axis, -1)
    packed = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for place, number in enumerate(order):
        packed |= numbers[..., number::8].astype(np.uint32) << np.uint32(4 * place)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def in_groups(matrix: np.ndarray, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers from 0 to 15, scales and zero points [n, groups]; scales are float16 numbers. A row's last group may be short."""
    k = matrix.shape[1]
    parts = np.pad(matrix, ((0, 0), (0, -k % group)), "edge").reshape(len(matrix), -1, group)
    low, high = parts.min(-1), parts.max(-1)
    scales = np.where(symmetric, np.abs(parts).max(-1) / 7, (high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.full(low.shape, 8.0) if symmetric else np.clip(np.round(-low / scales), 1, 15)
    numbers = np.clip(np.round(parts / scales[..., None]) + zeros[..., None], 0, 15)
    return numbers.reshape(len(matrix), -1)[:, :k].astype(np.int64), scales, zeros.astype(np.int64)


def meant(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> np.ndarray:
    of_each, zero = (np.repeat(values, group, 1)[:, : numbers.shape[1]] for values in (scales, zeros))
    return ((numbers - zero) * of_each).astype(np.float32)


def eight_bits(kind: str, strategy: str, name: str = "weight_scale", **extra: np.ndarray) -> Layout:
    def layout(matrix):
        most = 127 if kind == "int8" else 448
        if strategy == "block":
            blocks = matrix.reshape(-(-len(matrix) // 128), min(128, len(matrix)), -1, 128)
            scales = np.abs(blocks).max((1, 3)) / most
            spread = np.kron(scales, np.ones((128, 128)))[: len(matrix)]
        else:
            scales = np.abs(matrix).max(1 if strategy == "channel" else None, keepdims=True) / most
            spread = scales
        scales, spread = scales.astype(np.float32), spread.astype(np.float32)
        values = np.round(matrix / spread).astype(np.int8) if kind == "int8" else (matrix / spread).astype(FP8)
        stored = scales.reshape(1) if strategy == "tensor" else scales
        return {"weight": values, name: stored, **extra}, values.astype(np.float32) * spread

    return layout


def packed_rows(group: int, symmetric: bool) -> Layout:
    def layout(matrix):
        size = group if group > 0 else matrix.shape[1]
        numbers, scales, zeros = in_groups(matrix, size, symmetric)
        tensors = {
            "weight_packed": words(numbers, 1), "weight_scale": scales, "weight_shape": np.array(matrix.shape),
        }  # fmt: skip
        return tensors | ({} if symmetric else {"weight_zero_point": words(zeros, 0)}), meant(numbers, scales, zeros, size)

    return layout


def awq(group: int) -> Layout:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def layout(matrix):
        numbers, scales, zeros = in_groups(matrix, group, symmetric=False)
        return {
            "qweight": words(numbers.T, 1, order), "qzeros": words(zeros.T, 1, order), "scales": scales.T.astype(np.float16),
        }, meant(numbers, scales, zeros, group)  # fmt: skip

    return layout


def gptq(group: int, *, second_format: bool = False, symmetric: bool = False) -> Layout:
    def layout(matrix):
        numbers, scales, zeros = in_groups(matrix, group, symmetric)
        written = zeros if second_format else zeros - 1
        return {
            "qweight": words(numbers.T, 0), "qzeros": words(written.T, 1), "scales": scales.T.astype(np.float16),
            "g_idx": np.arange(matrix.shape[1], dtype=np.int32) // group,
        }, meant(numbers, scales, zeros, group)  # fmt: skip

    return layout


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "config_groups": {"group_0": group}}


FLOATS = {"num_bits": 8, "type": "float"}
INTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
HALVES = {"num_bits": 4, "type": "int"}
FORMATS: dict[str, tuple[dict[str, Any], Layout]] = {
    "compressed-tensors FP8, channels": (
        compressed("float-quantized", **FLOATS, strategy="channel", activations={"num_bits": 8, "dynamic": True}),
        eight_bits("fp8", "channel"),
    ),
    "compressed-tensors FP8, tensor": (
        compressed("float-quantized", **FLOATS, strategy="tensor"), eight_bits("fp8", "tensor", input_scale=np.ones(1, np.float32)),
    ),
    "compressed-tensors FP8, blocks": (
        compressed("float-quantized", **FLOATS, strategy="block", block_structure=[128, 128]), eight_bits("fp8", "block"),
    ),
    "compressed-tensors int8": (compressed("int-quantized", **INTS, activations={"num_bits": 8}), eight_bits("int8", "channel")),
    "compressed-tensors int4": (
        compressed("pack-quantized", **HALVES, strategy="group", group_size=32), packed_rows(32, symmetric=True),
    ),
    "compressed-tensors int4, zero points": (
        compressed("pack-quantized", ("re:.*lm_head",), **HALVES, strategy="group", group_size=128, symmetric=False),
        packed_rows(128, symmetric=False),
    ),
    "compressed-tensors int4, channels": (
        compressed("pack-quantized", **HALVES, strategy="channel"), packed_rows(-1, symmetric=True),
    ),
    "FP8 in blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        eight_bits("fp8", "block", "weight_scale_inv"),
    ),
    "FP8, tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, eight_bits("fp8", "tensor"),
    ),
    "fbgemm FP8": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, eight_bits("fp8", "channel")),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, awq(64)),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq(128)),
    "GPTQ, symmetric": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(32, symmetric=True)),
    "GPTQ, second format": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, gptq(64, second_format=True),
    ),
}  # fmt: skip


def published(directory: Path, name: str, part: str = "_proj", **changes: Any) -> tuple[Path, Path]:
    """A tiny target in this format, or what of it has this pattern in its name, and the same numbers in float32."""
    model = tiny_target(**SIZES | changes)
    stored, dense = (write_target(directory / kind, model) for kind in ("stored", "dense"))
    save_file(quantise(stored, name, part), dense / "model.safetensors")
    return stored, dense


def quantise(directory: Path, name: str, part: str = "_proj") -> dict[str, np.ndarray]:
    """Writes a model in this format, or what of it has this pattern in its name. Returns all tensors as they are meant, float32."""
    settings, layout = FORMATS[name]
    tensors, same = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for tensor, values in load_file(directory / "model.safetensors").items():
        if "_proj.weight" in tensor and re.search(part, tensor):
            parts, same[tensor] = layout(values)
            tensors |= {tensor.removesuffix("weight") + part: np.ascontiguousarray(each) for part, each in parts.items()}
        else:
            tensors[tensor] = same[tensor] = values
    save_file(tensors, directory / "model.safetensors")
    configured(directory, quantization_config=settings)
    return same


def logits(path: Path, **how: Any) -> tuple[np.ndarray, Any]:
    loaded = load_target(path, jnp.float32, **how)
    model = loaded.merge(loaded.params)
    return np.asarray(model.logits(model(TOKENS, causal_metadata(*TOKENS.shape)).hidden)), loaded


@pytest.mark.parametrize(
    "name", [each if each in ("FP8 in blocks", "AWQ", "GPTQ") else exhaustive(each, id=each) for each in FORMATS]
)
@pytest.mark.parametrize("storing", [Storing.ROWS, exhaustive(Storing.DENSE)])
def test_logits_are_those_of_the_dequantised_weights(tmp_path, name, storing):
    stored, dense = published(tmp_path, name)
    expected, _ = logits(dense)
    found, loaded = logits(stored, storing=storing)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    arrays = jax.tree.leaves(loaded.params["layers"][0]["mlp"])
    sizes = {array.dtype.itemsize for array in arrays if array.ndim == 2 and len(array) > 2}
    assert 1 in sizes, "nothing is kept in 8 or 4 bits"


@pytest.mark.parametrize("name", list(FORMATS))
def test_numbers_are_read_exactly(tmp_path, name):
    """Every format, without a model: what the loader makes of a projection is what NumPy says."""
    stored, dense = published(tmp_path, name, num_layers=1)
    expected = load_target(dense, jnp.float32).params["layers"][0]
    for storing in Storing:
        model = load_target(stored, jnp.float32, storing=storing)
        layer = model.merge(model.params).layers[0]
        for name in ("gate_up_proj", "down_proj"):
            found, kernel = vars(layer.mlp)[name], expected["mlp"][name]
            np.testing.assert_allclose(found.weight.dense(jnp.float32), kernel["kernel"], rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("storing", Storing)
@pytest.mark.parametrize("group", [96, 16])
def test_groups_that_do_not_fit_are_dequantised(tmp_path, monkeypatch, group, storing):
    """Rows of 128 and 256 numbers in groups of 96, the last ones shorter, or in groups that no kernel has."""
    monkeypatch.setitem(FORMATS, "GPTQ", ({"quant_method": "gptq", "bits": 4, "group_size": group}, gptq(group)))
    stored, dense = published(tmp_path, "GPTQ", num_layers=1)
    expected, found = (load_target(path, jnp.float32, storing=storing).params["layers"][0]["mlp"] for path in (dense, stored))
    for name, arrays in expected.items():
        np.testing.assert_allclose(*(next(iter(each.values())) for each in (found[name], arrays)), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("storing", Storing)
def test_blocks_that_do_not_fit_are_dequantised(tmp_path, storing):
    """Two KV heads: keys and values have 64 rows each, half a block."""
    stored, dense = published(tmp_path, "FP8 in blocks", num_kv_heads=2, num_layers=1)
    expected, _ = logits(dense)
    found, loaded = logits(stored, storing=storing)
    attention, dense_name = loaded.params["layers"][0]["self_attn"], "kernel" if storing is Storing.DENSE else "rows"
    assert set(attention["qkv_proj"]) == {dense_name} and dense_name not in attention["o_proj"]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is not supported; supported are"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"), "format 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), "format 'pack-quantized' of 8 bits"),
        (compressed("pack-quantized", **HALVES, strategy="group", group_size=128, actorder="group"), "actorder 'group'"),
        (compressed("float-quantized", **FLOATS, strategy="channel") | {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme"),
        (compressed("int-quantized", **INTS) | {"transform_config": {"config_groups": {}}}, "with a transform_config is not"),
        ({"quant_method": 7}, "quant_method must be a string"),
        ([4], r"quantization_config must be an object, got \[4\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, settings, message):
    directory = configured(write_target(tmp_path / "target", tiny_target()), quantization_config=settings)
    with pytest.raises(ValueError, match=message):
        load_target(directory, jnp.float32)


def test_quantised_weights_without_a_quantization_config_are_told(tmp_path):
    """As ModelOpt publishes them, whose settings are in hf_quant_config.json."""
    stored, _ = published(tmp_path, "FP8, tensor", num_layers=1)
    configured(stored, quantization_config=None)
    with pytest.raises(ValueError, match=r"quantised weights \(.*\.weight_scale\), and config\.json has no quantization_config"):
        load_target(stored, jnp.float32)


@pytest.mark.parametrize(
    ("weights", "scheme"),
    [
        ({"num_bits": 8, "type": "float"}, EightBits),
        ({"num_bits": 8, "type": "float", "group_size": -1}, EightBits),
        ({"num_bits": 4, "type": "int", "group_size": 128}, PackedRows),
    ],
)
def test_a_strategy_that_is_not_said_follows_from_the_group_size(weights, scheme):
    form = "pack-quantized" if scheme is PackedRows else "float-quantized"
    said = {None: "tensor", -1: "channel", 128: "group"}[weights.get("group_size")]
    found = read_scheme({"quantization_config": compressed(form, **weights)})
    assert isinstance(found, scheme) and found == read_scheme({"quantization_config": compressed(form, **weights, strategy=said)})


@pytest.mark.parametrize("group", [128, 16])
def test_groups_sorted_by_activation_are_refused(tmp_path, monkeypatch, group):
    """Those of 16, too, which are too small to stay quantised."""
    monkeypatch.setitem(FORMATS, "GPTQ", ({"quant_method": "gptq", "bits": 4, "group_size": group}, gptq(group)))
    stored, _ = published(tmp_path, "GPTQ", num_layers=1)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    save_file(tensors | {name: tensors[name][::-1].copy()}, stored / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{name}' sorts rows by activation \(desc_act\), which is not supported"):
        load_target(stored, jnp.float32)


def test_missing_tensors_and_another_quantisation_are_named(tmp_path, caplog):
    stored, _ = published(tmp_path, "compressed-tensors int8", num_layers=1)
    with pytest.raises(ValueError, match=r"is quantised already \(compressed-tensors int-quantized\): leave out quantization"):
        load_target(stored, jnp.float32, quantization="int4")
    with caplog.at_level(logging.INFO, "jaxspec.checkpoints.quantization"):
        load_target(stored, jnp.float32, quantization="int8")
    assert "asks for quantised activations too" in caplog.text
    tensors = load_file(stored / "model.safetensors")
    tensors.pop("model.layers.0.mlp.down_proj.weight_scale")
    tensors.pop("model.layers.0.mlp.up_proj.weight_scale")
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.gate_proj are quantised, but not what is computed with them"):
        load_target(stored, jnp.float32)


def test_biases_of_gptq_are_zeros_or_refused(tmp_path):
    """AutoGPTQ writes one for every layer."""
    stored, _ = published(tmp_path, "GPTQ", num_layers=1)
    tensors, name = load_file(stored / "model.safetensors"), "model.layers.0.mlp.down_proj.bias"
    for bias, message in (
        (np.zeros(128), None),
        (np.ones(128), f"'{name}' is not zero, and the model"),
        (np.zeros(8), "has shape"),
    ):
        save_file(tensors | {name: bias.astype(np.float16)}, stored / "model.safetensors")
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            load_target(stored, jnp.float32)


def test_a_missing_scale_of_fp8_weights_is_named(tmp_path):
    """Without it they would be read as numbers of the scale 1."""
    stored, _ = published(tmp_path, "FP8 in blocks", num_layers=1)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    with Checkpoint(stored) as checkpoint:
        tensors = {each: checkpoint.read(each) for each in checkpoint.infos if each != name}
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        load_target(stored, jnp.float32)


def test_the_tied_embedding_of_a_cpu_model_is_kept_in_blocks(tmp_path):
    """It is the output projection, which is read whole for every token."""
    directory = write_target(tmp_path / "target", tiny_target(**SIZES, tie_word_embeddings=True))
    embedding = load_target(directory, jnp.float32, storing=Storing.ROWS, quantization="int8").params["embed_tokens"]
    assert embedding.dtype == jnp.uint8 and embedding.shape == (128, 128 // 32 * 34)
    assert load_target(directory, jnp.float32, quantization="int8").params["embed_tokens"].dtype == jnp.float32
