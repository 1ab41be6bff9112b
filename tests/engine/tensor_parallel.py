"""One engine on one, two and four virtual devices: what it says, and what the devices exchange in a cycle.

`python -m tests.engine.tensor_parallel NAME...` prints a line per case; the tests read `--json`. It is a program because JAX makes
its devices when it starts. What was found is in tensor_parallel.jsonl beside this file (`--out`).
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoints.draft_models import as_draft
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import MATRIX, Storing, config_stored_as, restored_layer, with_storage
from jaxspec.config import EngineConfig
from jaxspec.decoding.programs import CycleProgram
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_TARGET, SMOLLM2, SMOLLM2_HEAD, model_directory
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest
from jaxspec.model_config import ModelConfig
from jaxspec.models.linear import Storage, parameters
from jaxspec.models.registry import LoadedHead, LoadedModel, LoadedTarget, layer_config
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
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.weight import Weight
from tests.engine.records import record, recorded
from tests.engine.served import served

DEVICES = 4
SHORT = TreeShape(3, 2, 5)
PARAMS = (
    SamplingParams(max_tokens=18, temperature=0, logprobs=2),
    SamplingParams(max_tokens=18, temperature=0.8, seed=3),
    SamplingParams(max_tokens=18, temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(max_tokens=18, temperature=0.7, frequency_penalty=0.5, logit_bias={3: 2.0}, seed=7, prompt_logprobs=1),
)


class Models(NamedTuple):
    """A target and its head."""

    target: LoadedTarget
    head: LoadedHead | None


def each_with(*changes: dict[str, Any]) -> tuple[SamplingParams, ...]:
    """PARAMS with these changes, in turn."""
    return tuple(replace(params, **changes[place % len(changes)]) for place, params in enumerate(PARAMS))


def of_one_kind(**fields: Any) -> tuple[SamplingParams, ...]:
    return tuple(SamplingParams(max_tokens=18, seed=seed, **fields) for seed in (3, 4))


type HeadOf = Callable[[ModelConfig], LoadedHead]


def models(head: HeadOf | None, **sizes: Any) -> Callable[[], Models]:
    """Makes a target of these sizes, and a head for it."""

    def make() -> Models:
        target = engine_target(**sizes)
        return Models(target, head and head(target.config))

    return make


def itself() -> Models:
    """It accepts nearly all drafts."""
    target = engine_target()
    return Models(target, as_draft(target, target.config))


def stored_so(model: LoadedModel, storing: Storing, quantization: str | None) -> Any:
    """The model with its matrices stored in another way, as they would be if it were loaded so."""
    config, params, layers = config_stored_as(model, storing, quantization), {}, defaultdict[Any, dict[str, Any]](dict)
    for (*path, name), array in flatten_dict(model.params).items():
        layers[tuple(path)][name] = array
    for path, layer in layers.items():
        made = restored_layer(path, layer, layer_config(model.config), layer_config(config))
        params |= {(*path, name): jnp.asarray(np.asarray(array)) for name, array in made.items()}
    return replace(model, config=config, params=unflatten_dict(params))


def quantised(quantization: str, storing: Storing) -> Models:
    """Both in 8 or 4 bits."""
    made = models(random_eagle, hidden_size=64, head_dim=64, intermediate_size=160)()
    return Models(*(stored_so(each, storing, quantization) for each in made))


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
    target, head = models(random_head, hidden_size=128, head_dim=64, intermediate_size=512, vocab_size=256)()
    storage = QuantizedAs("fp8", 128)
    return Models(stored_each(target, lambda array: (storage, storage(array))), head)


def built_in() -> Models:
    target = load_target(BUILT_IN_TARGET, jnp.float32)
    return Models(target, load_head(BUILT_IN_HEAD, target))


def smollm2(storing: Storing) -> Models:
    """9 heads, 3 KV heads, tied embeddings, a vocabulary of 49,152. AS_IN_FILE: its blocks stay, the head has 8 bits."""
    target = load_target(model_directory(SMOLLM2), jnp.float32, storing=storing)
    return Models(target, load_head(SMOLLM2_HEAD, target, storing=storing))


EAGLE3 = models(random_head)


@dataclass(frozen=True)
class Case:
    """Models, and how an engine runs them."""

    make: Callable[[], Models] = EAGLE3
    tree: TreeShape = SHORT
    options: dict[str, Any] = field(default_factory=dict)
    params: tuple[SamplingParams, ...] = PARAMS
    """Of requests that run together: their batch samples as the last of them needs."""
    trees: tuple[TreeShape | None, ...] = (None,)
    """What these requests ask for, in turn."""


CASES = {
    "EAGLE-3": Case(),
    "EAGLE-3, one layer": Case(models(random_head, num_layers=1), TreeShape(2, 2, 4)),
    "EAGLE-3, a chain": Case(tree=TreeShape(3, 1, 4)),
    "EAGLE-3, wider, biased and normed": Case(
        models(partial(random_head, layer={"hidden_size": 48, "num_layers": 2}, fc_bias=True, fc_norm=True, norm_output=True))
    ),
    "EAGLE-3, the whole vocabulary": Case(models(partial(random_head, draft_vocab_size=None, norm_before_residual=True))),
    "greedy": Case(params=of_one_kind(temperature=0)),
    "a temperature": Case(params=of_one_kind(temperature=0.8)),
    "filters": Case(params=of_one_kind(temperature=0.9, top_p=0.9, top_k=20, min_p=0.02)),
    "penalties and bans": Case(
        params=each_with(
            {"repetition_penalty": 1.3, "bad_token_ids": tuple(range(0, 128, 3))},
            {"presence_penalty": 0.7, "min_tokens": 9, "stop_token_ids": tuple(range(0, 120, 10))},
            {"allowed_token_ids": tuple(range(20, 90)), "top_k": 12},
        ),
    ),
    "a small model": Case(  # its KV heads can't be divided as the target's
        models(partial(random_draft_model, num_heads=2, num_kv_heads=1, tie_word_embeddings=True))
    ),
    "the target itself": Case(itself, TreeShape(4, 2, 8)),
    "plain": Case(models(None), PLAIN),
    "EAGLE, one KV head": Case(models(random_eagle, num_kv_heads=1)),
    "MTP, biases": Case(models(random_mtp, qkv_bias=True), TreeShape(2, 1, 3)),
    "odd vocabulary, feed-forward and draft vocabulary": Case(
        models(partial(random_head, draft_vocab_size=65), vocab_size=130, intermediate_size=50)
    ),
    "6 heads, 3 KV heads, normed": Case(models(random_head, num_heads=6, num_kv_heads=3, qk_norm=True)),
    "9 heads, 3 KV heads": Case(models(random_head, num_heads=9, num_kv_heads=3)),
    "8 heads, 4 KV heads, biased": Case(models(random_head, num_heads=8, num_kv_heads=4, qkv_bias=True)),
    "tied embeddings": Case(models(random_eagle, tie_word_embeddings=True, vocab_size=131)),
    "DFlash, windows": Case(models(partial(random_block, causal=(True, False), windows=(9, 7))), TreeShape(5, 3, 12)),
    "DFlash, causal": Case(models(partial(random_block, causal=(True, True)))),
    "DSpark": Case(models(partial(random_block, markov_rank=4))),
    "adaptive": Case(options={"adaptive": True}, params=each_with({"max_tokens": 70})),
    "adaptive, n-grams and a head": Case(options={"adaptive": True, "ngram": True}, params=each_with({"max_tokens": 70})),
    "trees of requests": Case(options={"request_trees": (PLAIN, TreeShape(2, 1, 3))}, trees=(PLAIN, None, TreeShape(2, 1, 3))),
    "one after another": Case(options={"overlap": False}),
    "a window of the draft head": Case(options={"draft_window_size": 6, "draft_sink_size": 3}),
    "thresholds": Case(options={"accept_threshold_single": 0.3, "accept_threshold_acc": 0.5}),
    "few pages": Case(options={"num_pages": 18}),
    "a cache of 8 bits": Case(options={"kv_cache_dtype": "fp8_e4m3"}),
    "int8 by rows": Case(lambda: quantised("int8", Storing.ROWS)),
    "int8": Case(lambda: quantised("int8", Storing.DENSE)),
    "fp8": Case(lambda: quantised("fp8", Storing.DENSE)),
    "int4": Case(lambda: quantised("int4", Storing.DENSE)),
    "int4 in blocks": Case(lambda: quantised("int4", Storing.ROWS)),
    "fp8 in blocks": Case(in_fp8_blocks),
    "n-grams": Case(models(None), options={"ngram": True, "ngram_share": 1}),
    "n-grams and a head": Case(options={"ngram": True}),
    "grammars": Case(
        params=each_with(
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


class Outcome(NamedTuple):
    """What an engine on some devices did."""

    texts: list[list[int]]
    accepted: list[list[int]]
    collectives: dict[str, int]
    """Of its cycle, by XLA's names."""
    weight_bytes: int
    cache_bytes: int
    """On each device."""
    counts: dict[str, int]


def run(case: Case, devices: int) -> Outcome:
    """The requests of a case, and one that comes later and shares most of its prompt."""
    target, head = case.make()
    options = {"max_running_requests": 4, "prefill_chunk": 16, "context_length": 128, "page_size": 4, **case.options}
    tokenizer = TinyTokenizer() if any(each.constraint for each in case.params) else None
    engine = Engine(target, head, tokenizer, case.tree, EngineConfig(tp_size=devices, **options))
    largest_sizes_only(engine)
    asked = (
        GenerationRequest(tuple(range(10 + i, 34 + i)), params, tree=case.trees[i % len(case.trees)])
        for i, params in enumerate(case.params)
    )
    requests = served(engine, *asked) + served(engine, GenerationRequest(tuple(range(10, 38)), case.params[1]))
    programs, runner = engine.runner.programs, engine.runner
    cycle = next(each for each in programs.compilations if isinstance(each, CycleProgram) and each.tree == case.tree)
    counts = engine.stats()
    found = [each.kind for each in read_collectives(programs[cycle].as_text())]
    return Outcome(
        [list(request.output) for request in requests],
        [list(request.speculation.accept_lengths) for request in requests],
        {kind: found.count(kind) for kind in sorted(set(found))},
        runner.placement.nbytes(runner.params),
        runner.cache_bytes,
        {
            "drafted": counts.draft_tokens, "accepted": counts.accepted_tokens, "preemptions": counts.preemptions,
            "prefix_hit_tokens": counts.prefix_hit_tokens, "switches": counts.adaptive.switches if counts.adaptive else 0,
        },
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="NAME", help="default: all")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, DEVICES])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="add a line per case to this file; those that it has do not run again")
    chosen = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    enable_compilation_cache()
    outcomes: dict[str, dict[int, Outcome]] = {}
    known = {line["case"]: line for line in recorded(chosen.out) if line["devices"] == chosen.devices}
    for name in chosen.cases or CASES:
        if name in known:
            print(f"{name}: {'equal' if known[name]['equal'] else 'DIFFERENT'}, recorded")
            continue
        outcomes[name] = found = {devices: run(CASES[name], devices) for devices in chosen.devices}
        if not chosen.json:
            one, *others = found.values()
            is_equal = all(each.texts == one.texts for each in others)
            print(f"{name}: {'equal' if is_equal else 'DIFFERENT'}", flush=True)
            counts, collectives = [each.counts for each in found.values()], [each.collectives for each in found.values()]
            served = {"equal": is_equal, "requests": len(one.texts), "tokens": sum(map(len, one.texts))}
            record(chosen.out, case=name, devices=chosen.devices, **served, counts=counts, collectives=collectives)
    if chosen.json:
        found = {name: {devices: one._asdict() for devices, one in each.items()} for name, each in outcomes.items()}
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
