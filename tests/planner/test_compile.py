"""What the host side makes of the worker's answers and failures."""

import os
import subprocess
import sys

import pytest

from jaxspec.planner import compile as compile_module
from jaxspec.planner.compile import CompiledCycle, CompilerError, CycleShape, Launch, compile_cycles, why_not
from jaxspec.planner.worker import compile_all
from jaxspec.tree_shape import TreeShape
from tests.planner.configs import EAGLE3_LLAMA_8B, LLAMA_8B, config_file

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}
VERIFY, COMMIT = "jit(c)/verify/layer_{}/x", "jit(c)/commit/x"


def launch(scope: str, **changes) -> Launch:
    return Launch("kCustomKernel", "kernel", scope, in_graph=True)._replace(**changes)


def cycle_of(*launches: Launch, touches_host: bool = False, library: str | None = None) -> CompiledCycle:
    return CompiledCycle(1.0, 0, 0, 0, 0, touches_host, launches, {"rms_norm": 1}, (), {library: 1} if library else {})


def test_counting():
    layers = [launch(VERIFY.format(layer)) for layer in (0, 0, 0, 1, 1, 1)]
    extras = [launch(VERIFY.format(1), kinds=(2,)), launch("jit(c)/draft/y")]
    found = cycle_of(*layers, launch(COMMIT), *extras)
    assert found.per_layer(2) == 3.5 and found.stages == {"verify": 6, "commit": 1, "draft": 1}


def test_what_needs_the_host_is_no_graph():
    assert cycle_of(launch(COMMIT)).is_one_graph
    assert not cycle_of(launch(COMMIT, in_graph=False)).is_one_graph
    assert not cycle_of(launch(COMMIT, kind="kWhile")).is_one_graph
    assert not cycle_of(launch(COMMIT), touches_host=True).is_one_graph
    assert not cycle_of(launch(COMMIT), library="xla.gpu.ext.cub_sort_pairs").is_one_graph


def test_room_for_a_cycle_is_made():
    assert CycleShape(TreeShape(5, 4, 8), 1, context=122, page_size=64).pages == 2
    assert CycleShape(TreeShape(5, 4, 8), 1, context=123, page_size=64).pages == 3


def test_why_not(monkeypatch):
    assert "there is one of h200, h100, a100, l40s, rtx-4090" in str(why_not("l4"))
    monkeypatch.setattr(compile_module, "PLUGINS", ("jax_plugins.none", "no_such_package.plugin"))
    assert "pip install 'jaxspec-llm[aot]'" in str(why_not("h100"))
    with pytest.raises(ValueError, match="plugin for CUDA is not installed"):
        compile_cycles("config.json", None, [], gpu="h100", dtype="bfloat16")


def test_a_failure_shows_the_compilers_words(gpu_compiler, tmp_path):
    broken = config_file(tmp_path / "config.json", {**LLAMA_8B, "hidden_act": "tanh"})
    with pytest.raises(CompilerError, match="hidden_act"):
        compile_cycles(broken, None, [CycleShape(TreeShape(num_steps=0), 1, 64)], gpu="h100", dtype="bfloat16")


SORT = """
import sys, tempfile
from pathlib import Path
import jax, jax.numpy as jnp
from jaxspec.placement import GPU_COMPILER_OPTIONS
from jaxspec.planner.worker import gpus, libraries_called

gpu = gpus("h100", 1)
logits = jax.ShapeDtypeStruct((1, 128256), jnp.float32, sharding=gpu.whole)
sort = jax.jit(lambda x: jax.lax.sort((x, jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1))
with jax.set_mesh(gpu.mesh), tempfile.TemporaryDirectory() as dump:
    lowered = sort.trace(logits).lower(lowering_platforms=("cuda",))
    try:
        lowered.compile(compiler_options=(GPU_COMPILER_OPTIONS if "ours" in sys.argv else {}) | {"xla_dump_to": dump})
        print("compiled;", libraries_called(Path(dump)))
    except jax.errors.JaxRuntimeError:
        print("failed;", libraries_called(Path(dump)))
"""
"""Compiles a sort of one row of logits, with our compiler options or without, and prints what it calls."""


def test_a_sort_that_becomes_a_library_s_is_noticed(gpu_compiler):
    """Without our options XLA calls CUB, which it can't capture, and can't make here. The descriptions of GPUs must show that."""

    def said(*arguments: str) -> str:
        command = [sys.executable, "-c", SORT, *arguments]
        environment = os.environ | compile_module.WITHOUT_GPU
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    assert said("ours") == "compiled; the program calls no libraries"
    assert said() == "failed; the program calls xla.gpu.ext.cub_sort_pairs"


@pytest.mark.parametrize("gpu", ["h100", "a100", "l40s"])
def test_a_small_model_in_float16(gpu_compiler, tmp_path, gpu):
    """Other sizes than the proof's, on three generations of GPUs: 8 layers, 2 KV heads of size 64."""
    target = config_file(tmp_path / "config.json", {**LLAMA_8B, **SMALL, "num_hidden_layers": 8})
    head = config_file(tmp_path / "head.json", {**EAGLE3_LLAMA_8B, **SMALL, "draft_vocab_size": 512})
    shapes = [CycleShape(TreeShape(2, 2, 4), 3, 100)]
    (found,) = compile_cycles(target, head, shapes, gpu=gpu, dtype="float16", refuse_spills=True)
    assert found.is_one_graph and found.aliased_bytes >= found.cache_bytes
    assert set(found.kernel_calls) >= {"rms_norm", "rotate_qkv", "tree_attention_split", "cache_write"}
    assert found.per_layer(8) <= 14


def test_a_token_map_reaches_the_head(tmp_path):
    """It fails at the file, before any compiler is needed."""
    target = config_file(tmp_path / "config.json", LLAMA_8B)
    head = config_file(tmp_path / "head.json", {**LLAMA_8B, "num_hidden_layers": 1, "bias": False})
    request = {"model": str(target), "draft": str(head), "token_map": str(tmp_path / "none.pt"), "gpu": "h100", "dtype": "bfloat16"}
    request |= {"quantization": [None, None]}
    with pytest.raises((ValueError, OSError), match=r"none\.pt"):
        next(compile_all(request | {"cycles": [], "scratch": str(tmp_path), "refuse_spills": False}))


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("import sys; sys.exit('no luck')", "exit status 1, no luck"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
        ("import time; time.sleep(60)", "more than 0.5 s"),
    ],
)
def test_a_worker_that_fails_is_an_error_of_the_compiler(tmp_path, monkeypatch, worker, said):
    run = subprocess.run

    def other(command, **options):
        assert command[1:3] == ["-P", "-m"]  # nothing in the current directory is run
        return run([command[0], "-c", worker], **options)

    monkeypatch.setattr(compile_module, "why_not", lambda gpu: None)
    monkeypatch.setattr(compile_module, "SECONDS_PER_CYCLE", 0.5 if "sleep" in worker else 60)
    monkeypatch.setattr(compile_module.subprocess, "run", other)
    with pytest.raises(CompilerError, match=said):
        compile_cycles(tmp_path, None, [CycleShape(TreeShape(), 1, 64)], gpu="h100", dtype="bfloat16")
