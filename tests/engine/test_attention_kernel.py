"""EngineConfig.attention_kernel and .matmul reach every layer of target and head, and are refused where they can't run."""

from types import SimpleNamespace

import jax
import pytest
from flax import nnx

from jaxspec.config import ATTENTION_KERNELS, EngineConfig
from jaxspec.engine.device import check_kernel
from jaxspec.engine.models import drafter_of, kernels_of
from jaxspec.models.layers import Attention, causal_metadata
from jaxspec.models.linear import Kernels, Linear
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.testing import engine_target, random_head, tiny_engine
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS


def kernels(model: nnx.Module) -> list[str | None]:
    return [module.kernels.attention for _, module in nnx.iter_modules(model) if isinstance(module, Attention)]


def models_for(target: LoadedTarget, head: LoadedHead, **options) -> tuple[nnx.Module, nnx.Module]:
    """Target and head as an engine with these options has them. The attention kernel of another platform is not refused here."""
    config = EngineConfig(**options)
    return target.merge(target.params, kernels_of(config)), drafter_of(head, config).head


def test_names_are_those_of_the_implementations():
    assert set(ATTENTION_KERNELS) == set(IMPLEMENTATIONS)
    with pytest.raises(ValueError, match="attention_kernel must be one of reference, pallas_triton, mosaic, got 'cuda'"):
        EngineConfig(attention_kernel="cuda")
    with pytest.raises(ValueError, match="matmul must be one of auto, xla, skinny, got 'cuda'"):
        EngineConfig(matmul="cuda")


@pytest.mark.parametrize("name", [None, "reference", "mosaic"])
def test_every_attention_of_target_and_head_has_it(name):
    target = engine_target()
    head = random_head(target.config)
    models = models_for(target, head, attention_kernel=name)
    assert kernels(models[0]) == [name] * target.config.num_layers
    assert kernels(models[1]) == [name] * head.config.layer.num_layers


def test_every_linear_layer_of_target_and_head_has_the_matmul():
    target = engine_target()
    models = models_for(target, random_head(target.config), matmul="skinny")
    for model, projections in zip(models, (4 * target.config.num_layers + 1, 4 + 2), strict=True):  # lm_head, and fc
        layers = [module.matmul for _, module in nnx.iter_modules(model) if isinstance(module, Linear)]
        assert layers == ["skinny"] * projections


def test_a_kernel_for_gpus_is_refused_without_one():
    with pytest.raises(ValueError, match="attention_kernel='mosaic' needs an NVIDIA GPU, and JAX runs on the cpu: leave it out"):
        tiny_engine(attention_kernel="mosaic")
    a100 = SimpleNamespace(platform="gpu", compute_capability="8.0")
    with pytest.raises(ValueError, match=r"'mosaic' is for Hopper, compute capability 9.0, and this is 8.0"):
        check_kernel("mosaic", a100)
    check_kernel("pallas_triton", a100)


def test_attention_runs_what_was_chosen():
    """On a CPU, JAX refuses a kernel that is meant for GPUs, as soon as it is asked for."""
    target = engine_target()
    tokens, rows = jax.numpy.zeros((1, 2), int), causal_metadata(1, 2)
    expected = target.merge(target.params)(tokens, rows).hidden
    assert (target.merge(target.params, Kernels("reference"))(tokens, rows).hidden == expected).all()
    model = target.merge(target.params, Kernels("pallas_triton"))
    with pytest.raises(ValueError, match="interpret mode"):
        model(tokens, rows)
