"""Compiles a training step for an H100 that is not there: `python -m tests.train.gpu_step`, one line of JSON.

Llama-3.1-8B in bfloat16 and its EAGLE-3 head, 7 unroll steps, 4 rows of 2,048 tokens.
"""

import json
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model_config import ModelConfig
from jaxspec.models.eagle3 import Eagle3Config, default_captured_layers
from jaxspec.models.registry import abstract_model
from jaxspec.planner.worker import gpus
from jaxspec.train.head import TOKEN_MAP, TrainPrograms
from jaxspec.train.optimizer import muon
from jaxspec.train.settings import TrainSettings
from jaxspec.train.ttt import Rows
from tests.planner.configs import LLAMA_8B

SETTINGS = TrainSettings(rows=4, length=2048, depth=7, draft_vocab_size=32000)


def main() -> None:
    """Prints the memory of a step, in bytes: what its two programs are given, and the larger one's temporaries."""
    gpu = gpus("h100", 1)

    def placed(shapes: Any) -> Any:
        return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=gpu.whole), shapes)

    target_config = ModelConfig.from_hf(LLAMA_8B)
    config = Eagle3Config(
        layer=replace(target_config, num_layers=1),
        target_hidden_size=target_config.hidden_size,
        captured_layers=default_captured_layers(target_config.num_layers),
        draft_vocab_size=SETTINGS.draft_vocab_size,
    )
    target = abstract_model(target_config, jnp.bfloat16)
    head = abstract_model(config, jnp.float32)
    params = {name: value for name, value in head.params.items() if name != TOKEN_MAP}
    state = jax.eval_shape(muon(SETTINGS.matrix_rate, SETTINGS.other_rate).init, params)
    frozen = {"target": target.params, "head": {TOKEN_MAP: head.params[TOKEN_MAP]}}
    sizes = SETTINGS.rows, SETTINGS.length
    rows = Rows(*(jax.ShapeDtypeStruct(sizes, kind) for kind in (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)))
    programs = TrainPrograms.of(SETTINGS, target, head)
    numbers = tuple(jax.ShapeDtypeStruct((), kind) for kind in (jnp.int32, jnp.float32))
    params, state, frozen, rows, numbers = placed((params, state, frozen, rows, numbers))
    started = time.perf_counter()
    with jax.set_mesh(gpu.mesh):
        lesson = placed(jax.eval_shape(programs.teach, frozen, rows))
        traced = [programs.teach.trace(frozen, rows), programs.learn.trace(params, state, frozen, rows, lesson, *numbers)]
        teach, learn = (each.lower(lowering_platforms=("cuda",)).compile().memory_analysis() for each in traced)
    found = {
        "learnt_parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "argument_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state, frozen, rows, lesson))),
        "aliased_bytes": learn.alias_size_in_bytes,
        "temporary_bytes": max(teach.temp_size_in_bytes, learn.temp_size_in_bytes),
        "compile_seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
