"""One engine on one, two and four virtual devices: what it says, and what the devices exchange in a cycle.

`python -m tests.engine.tensor_parallel NAME...` prints a line per case; the tests read `--json`. It is a program because JAX makes
its devices when it starts.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import MATRIX, Storing, config_so, layer_so, with_storage
from jaxspec.config import PLAIN, EngineConfig, TreeShape
from jaxspec.decoding.programs import CycleProgram
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_TARGET, SMOLLM2, SMOLLM2_HEAD, model_directory
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest
from jaxspec.models.linear import Storage, parameters
from jaxspec.models.registry import LoadedHead, LoadedModel, LoadedTarget, layer_config
from jaxspec.placement import layers_of
from jaxspec.planner.compile import read_collectives
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import (
    TinyTokenizer,
    engine_target,
    largest_sizes_only,
    random_block,
    random_draft_model,
    random_eagle,
    random_head,
    random_mtp,
)
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.weight import Weight

DEVICES = 4
SHORT = TreeShape(3, 2, 5)


class Models(NamedTuple):
    """A target and its head."""

    target: LoadedTarget
    head: LoadedHead | None


@dataclass(frozen=True)
class Case:
    """Models, and how an engine runs them."""

    make: Callable[[], Models]
    tree: TreeShape = SHORT
    options: dict[str, Any] = field(default_factory=dict)
    constraints: tuple[dict[str, Any], ...] = ({},) * 4
    """What each of PARAMS must follow besides."""


def eagle3(layers: int = 2, **sizes) -> Models:
    target = engine_target(num_layers=layers, **sizes)
    return Models(target, random_head(target.config))


def eagle(**sizes) -> Models:
    target = engine_target(num_layers=2, **sizes)
    return Models(target, random_eagle(target.config))


def mtp(**sizes) -> Models:
    target = engine_target(num_layers=2, **sizes)
    return Models(target, random_mtp(target.config))


def block(**changes) -> Models:
    target = engine_target()
    return Models(target, random_block(target.config, **changes))


def small_model() -> Models:
    """Its KV heads can't be divided as the target's."""
    target = engine_target(num_layers=2)
    return Models(target, random_draft_model(target.config, num_heads=2, num_kv_heads=1, tie_word_embeddings=True))


def odd() -> Models:
    target = engine_target(num_layers=2, vocab_size=130, intermediate_size=50)
    return Models(target, random_head(target.config, draft_vocab_size=65))


def stored_so(model: LoadedModel, storing: Storing, quantization: str | None) -> Any:
    """The model with its matrices stored in another way, as they would be if it were loaded so."""
    config, params = config_so(model, storing, quantization), {}
    for path, layer in layers_of(flatten_dict(model.params)).items():
        made = layer_so(path, layer, layer_config(model.config), layer_config(config))
        params |= {(*path, name) if name else path: jnp.asarray(np.asarray(array)) for name, array in made.items()}
    return replace(model, config=config, params=unflatten_dict(params))


def quantised(quantization: str, storing: Storing) -> Models:
    """Both in 8 or 4 bits."""
    models = eagle(hidden_size=64, head_dim=64, num_heads=4, intermediate_size=160)
    return Models(*(stored_so(each, storing, quantization) for each in models))


def stored_each(model: LoadedModel, store: Callable[[Any], tuple[Storage, Weight] | None]) -> Any:
    """The model with each matrix stored as `store` says; None: as it is."""
    storages, params = list[tuple[Any, Storage]](), dict[Any, Any]()
    for (*path, name), array in flatten_dict(model.params).items():
        made = store(array) if name == MATRIX else None
        if made is None:
            params[*path, name] = array
        else:
            storages.append((tuple(path), made[0]))
            params |= {(*path, each): values for each, values in parameters(made[1]).items()}
    return replace(model, config=with_storage(model.config, None, tuple(storages)), params=unflatten_dict(params))


def in_fp8_blocks() -> Models:
    """Blocks of 128 x 128 share a scale, so heads of 64 can't be divided."""
    target, head = eagle3(hidden_size=128, head_dim=64, intermediate_size=512, vocab_size=256)
    storage = QuantizedAs("fp8", 128)
    return Models(stored_each(target, lambda array: (storage, storage(array))), head)


def built_in() -> Models:
    target = load_target(BUILT_IN_TARGET, jnp.float32)
    return Models(target, load_head(BUILT_IN_HEAD, target))


def smollm2(storing: Storing) -> Models:
    """9 heads, 3 KV heads, tied embeddings, a vocabulary of 49,152. AS_IN_FILE: its blocks stay, the head has 8 bits."""
    target = load_target(model_directory(SMOLLM2), jnp.float32, storing=storing)
    return Models(target, load_head(SMOLLM2_HEAD, target, storing=storing))


CASES = {
    "EAGLE-3": Case(eagle3),
    "EAGLE-3, one layer": Case(lambda: eagle3(1), TreeShape(2, 2, 4)),
    "EAGLE-3, a chain": Case(eagle3, TreeShape(3, 1, 4)),
    "a small model": Case(small_model),
    "plain": Case(lambda: Models(engine_target(num_layers=2), None), PLAIN),
    "EAGLE, one KV head": Case(lambda: eagle(num_kv_heads=1)),
    "MTP, biases": Case(lambda: mtp(qkv_bias=True), TreeShape(2, 1, 3)),
    "odd vocabulary, feed-forward and draft vocabulary": Case(odd),
    "6 heads, 3 KV heads, normed": Case(lambda: eagle3(num_heads=6, num_kv_heads=3, qk_norm=True)),
    "9 heads, 3 KV heads": Case(lambda: eagle3(num_heads=9, num_kv_heads=3)),
    "tied embeddings": Case(lambda: eagle(tie_word_embeddings=True, vocab_size=131)),
    "DFlash, windows": Case(lambda: block(causal=(True, False), windows=(9, 7)), TreeShape(5, 3, 12)),
    "DSpark": Case(lambda: block(markov_rank=4), TreeShape(3, 2, 5)),
    "adaptive": Case(eagle3, SHORT, {"adaptive": True}),
    "a window of the draft head": Case(eagle3, SHORT, {"draft_window_size": 6, "draft_sink_size": 3}),
    "thresholds": Case(eagle3, SHORT, {"accept_threshold_single": 0.3, "accept_threshold_acc": 0.5}),
    "few pages": Case(eagle3, SHORT, {"num_pages": 22}),
    "a cache of 8 bits": Case(eagle3, SHORT, {"kv_cache_dtype": "fp8_e4m3"}),
    "int8 by rows": Case(lambda: quantised("int8", Storing.ROWS)),
    "int8": Case(lambda: quantised("int8", Storing.DENSE)),
    "fp8": Case(lambda: quantised("fp8", Storing.DENSE)),
    "int4": Case(lambda: quantised("int4", Storing.DENSE)),
    "int4 in blocks": Case(lambda: quantised("int4", Storing.ROWS)),
    "fp8 in blocks": Case(in_fp8_blocks),
    "n-grams": Case(lambda: Models(engine_target(num_layers=2), None), TreeShape(3, 2, 5), {"ngram": True, "ngram_share": 1}),
    "n-grams and a head": Case(eagle3, SHORT, {"ngram": True}),
    "grammars": Case(
        eagle3,
        SHORT,
        constraints=(
            {},
            {"json_schema": {"type": "object", "properties": {"a": {"enum": ["xyz", "xz"]}}, "required": ["a"]}},
            {"regex": "(ab[0-9]|[c-z]){6,9}"},
            {"choice": ["on and on", "off", "onto"]},
        ),
    ),
    "the built-in model": Case(built_in, TreeShape(5, 4, 8)),
    "SmolLM2": Case(lambda: smollm2(Storing.DENSE)),
    "SmolLM2, its file's blocks": Case(lambda: smollm2(Storing.AS_IN_FILE)),
}
PARAMS = (
    SamplingParams(max_tokens=18, temperature=0, logprobs=2),
    SamplingParams(max_tokens=18, temperature=0.8, seed=3),
    SamplingParams(max_tokens=18, temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(max_tokens=18, temperature=0.7, frequency_penalty=0.5, logit_bias={3: 2.0}, seed=7, prompt_logprobs=1),
)


class Outcome(NamedTuple):
    """What an engine on some devices did."""

    texts: list[list[int]]
    accepted: list[list[int]]
    collectives: dict[str, int]
    """Of its cycle, by XLA's names."""
    weight_bytes: int
    cache_bytes: int
    """On each device."""


def run(case: Case, devices: int) -> Outcome:
    """The requests of PARAMS, and one that comes later and shares most of its prompt."""
    target, head = case.make()
    options = {"max_running_requests": 4, "prefill_chunk": 16, "context_length": 128, "page_size": 4, **case.options}
    tokenizer = TinyTokenizer() if any(case.constraints) else None
    params = [replace(each, **more) for each, more in zip(PARAMS, case.constraints, strict=True)]
    engine = Engine(target, head, tokenizer, case.tree, EngineConfig(tp_size=devices, **options))
    largest_sizes_only(engine)
    requests = [engine.add(GenerationRequest(tuple(range(10 + i, 34 + i)), params)) for i, params in enumerate(params)]
    while engine.has_work:
        engine.step()
    requests.append(engine.add(GenerationRequest(tuple(range(10, 38)), params[1])))
    while engine.has_work:
        engine.step()
    programs, runner = engine.runner.programs, engine.runner
    cycle = next(each for each in programs.compilations if isinstance(each, CycleProgram) and each.tree == case.tree)
    found = [each.kind for each in read_collectives(programs[cycle].as_text())]
    return Outcome(
        [list(request.output) for request in requests],
        [list(request.speculation.accept_lengths) for request in requests],
        {kind: found.count(kind) for kind in sorted(set(found))},
        runner.placement.nbytes(runner.params),
        runner.cache_bytes,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="NAME", help="default: all")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, DEVICES])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    enable_compilation_cache()
    outcomes: dict[str, dict[int, Outcome]] = {}
    for name in chosen.cases or CASES:
        outcomes[name] = found = {devices: run(CASES[name], devices) for devices in chosen.devices}
        if not chosen.json:
            one, *others = found.values()
            print(f"{name}: {'equal' if all(each.texts == one.texts for each in others) else 'DIFFERENT'}", flush=True)
    if chosen.json:
        json.dump(
            {name: {devices: each._asdict() for devices, each in found.items()} for name, found in outcomes.items()}, sys.stdout
        )


if __name__ == "__main__":
    main()
