"""Generated requests through every source of drafts and their mixtures: each gets what plain decoding says in the same storage.

python -m tests.engine.sources --count 1000 serves so many in groups, each by an engine of its own, drawn with its source, trees,
storage of weights and cache, batch, pages and loop. It says per source how many requests were unequal, and of how many drafts. What
was found is in sources.jsonl beside this file (`--out`).
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.record import environment
from jaxspec.checkpoints.draft_models import as_draft
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import Storing
from jaxspec.config import FP8, PLAIN, QUANTIZATIONS, EngineConfig, TreeShape
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_TARGET, UNASKED
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.models.registry import LoadedHead, LoadedModel, LoadedTarget
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
from jaxspec.text.tokenizer import load_tokenizer
from tests.engine.tensor_parallel import stored_so
from tests.grammar.cases import random_schema

GROUP = 40
"""Requests of one engine; a quarter comes twice, to meet what the first time left in the prefix cache and the store."""
CONTEXT, PAGE_SIZES = 200, (1, 4, 7, 16)
TOKENS = range(1, 128)
"""Of prompts and options: those of the tiny models, and some of the built-in one's."""
STORAGES: dict[str, tuple[Storing, str | None]] = {
    "as it is": (Storing.DENSE, None),
    "rows": (Storing.ROWS, None),
    **{f"{kind}{by}": (how, kind) for kind in QUANTIZATIONS for by, how in ((", dense", Storing.DENSE), ("", Storing.ROWS))},
}


GRAMMARS = (
    {"regex": "[0-9]{1,3}(,[0-9]{3})*"},
    {"regex": "(ab[0-9]){8}"},
    {"grammar": 'root ::= "(" root ")" | [a-z]'},
    {"choice": ["on", "off", "onto"]},
)


class Case(NamedTuple):
    """One request."""

    asked: GenerationRequest
    at_once: int
    """The number of requests that come together with it."""


class Source(NamedTuple):
    """Drafts from somewhere: what an engine is given for them."""

    trees: str
    head: Callable[[LoadedTarget], LoadedHead] | None = None
    options: Mapping[str, Any] = MappingProxyType({})


def itself(target: LoadedTarget) -> LoadedHead:
    """Nearly all drafts are accepted; in another storage than the target's, most."""
    return as_draft(target, target.config)


def eagle3(target: LoadedTarget) -> LoadedHead:
    return random_head(target.config)


NGRAMS, SHARED, ADAPTIVE = {"ngram": True}, {"ngram": True, "ngram_share": 1}, {"adaptive": True}
SOURCES = {
    "n-grams": Source("7/4/8 4/1/5 5/4/16", None, NGRAMS),
    "n-grams, shared": Source("7/4/8 3/2/5", None, SHARED),
    "n-grams, adaptive": Source("7/4/8", None, NGRAMS | ADAPTIVE),
    "n-grams beside plain decoding": Source("plain", None, {**NGRAMS, **ADAPTIVE, "adaptive_trees": UNASKED}),
    "EAGLE": Source("3/2/5 2/1/3", lambda target: random_eagle(target.config)),
    "EAGLE-3": Source("3/2/5 4/1/5 5/4/16", eagle3),
    "EAGLE-3, adaptive": Source("3/2/5", eagle3, ADAPTIVE),
    "EAGLE-3 and n-grams": Source("3/2/5 5/4/12", eagle3, NGRAMS),
    "EAGLE-3 for some levels and n-grams": Source("7/4/8/3 5/2/8/1 4/2/6/0", eagle3, NGRAMS),
    "EAGLE-3 and shared n-grams, adaptive": Source("5/4/8", eagle3, SHARED | ADAPTIVE),
    "MTP and n-grams": Source("1/1/2 5/2/8/1", lambda target: random_mtp(target.config), NGRAMS),
    "DFlash": Source("5/1/6 4/3/12", lambda target: random_block(target.config)),
    "DFlash and n-grams": Source("5/3/12 7/3/12/2", lambda target: random_block(target.config, windows=(9, 7)), NGRAMS),
    "DSpark": Source("4/2/7", lambda target: random_block(target.config, markov_rank=4)),
    "a small model": Source("3/1/4 3/2/7", lambda target: random_draft_model(target.config)),
    "the target itself": Source("3/1/4 4/2/8", itself),
    "the target itself and n-grams": Source("3/2/7 7/4/8/3", itself, NGRAMS | ADAPTIVE),
    "the built-in head": Source("5/4/8 3/1/4", lambda target: load_head(BUILT_IN_HEAD, target)),
    "the built-in head and n-grams": Source("5/4/8 7/4/8/3", lambda target: load_head(BUILT_IN_HEAD, target), SHARED | ADAPTIVE),
}


@dataclass(frozen=True)
class Setting:
    """What serves a group."""

    source: str
    tree: TreeShape
    storage: str
    """Of the target's weights."""
    head_storage: str
    kv_cache_dtype: str
    options: dict[str, Any]

    @property
    def built_in(self) -> bool:
        return "built-in" in self.source

    @classmethod
    def random(cls, rng: random.Random, source: str, devices: int) -> "Setting":
        """`devices`: half of the settings use so many."""
        tree, batch, page = TreeShape.of(rng.choice(SOURCES[source].trees.split())), rng.randint(1, 8), rng.choice(PAGE_SIZES)
        storage = rng.choice(list(STORAGES)) if rng.random() < 0.6 else "as it is"
        whole = -(-CONTEXT // page)
        options = {
            "max_running_requests": batch,
            "page_size": page,
            "num_pages": whole + rng.randint(0, whole * (batch - 1) // 4),
            "prefill_chunk": rng.choice([5, 16, 64]),
            "overlap": rng.random() < 0.8,
            "request_trees": (PLAIN,) if rng.random() < 0.3 else (),
            "tp_size": rng.choice([1, devices]),
        }
        head_storage, kv_cache_dtype = rng.choice([storage, "as it is"]), rng.choice(["auto", "auto", FP8])
        return cls(source, tree, storage, head_storage, kv_cache_dtype, {**options, **SOURCES[source].options})


@cache
def target_of(built_in: bool) -> LoadedTarget:
    """In float32. Groups of quantised numbers fill the parts of two devices."""
    if built_in:
        return load_target(BUILT_IN_TARGET, jnp.float32)
    return engine_target(hidden_size=64, head_dim=64, intermediate_size=128, eos_token_ids=(0,))


def stored(model: LoadedModel, storage: str) -> Any:
    return stored_so(model, *STORAGES[storage])


@cache
def tokenizer_of(built_in: bool) -> Any:
    return load_tokenizer(BUILT_IN_TARGET) if built_in else TinyTokenizer()


def engine_of(setting: Setting) -> Engine:
    """The engine of a group."""
    target, source = target_of(setting.built_in), SOURCES[setting.source]
    head = None if source.head is None else stored(source.head(target), setting.head_storage)
    config = EngineConfig(context_length=CONTEXT, kv_cache_dtype=setting.kv_cache_dtype, **setting.options)
    engine = Engine(stored(target, setting.storage), head, tokenizer_of(setting.built_in), setting.tree, config)
    largest_sizes_only(engine)
    return engine


@cache
def plain_engine(built_in: bool, storage: str, kv_cache_dtype: str) -> Engine:
    """The simplest that there is."""
    config = EngineConfig(
        max_running_requests=1, context_length=CONTEXT, kv_cache_dtype=kv_cache_dtype, page_size=64, prefill_chunk=64,
        prefix_cache=False, overlap=False,
    )  # fmt: skip
    engine = Engine(stored(target_of(built_in), storage), None, tokenizer_of(built_in), PLAIN, config)
    largest_sizes_only(engine)
    return engine


def random_prompt(rng: random.Random, common: list[int]) -> tuple[int, ...]:
    """One that repeats itself or not, and may begin as others do."""
    own = [rng.choice(TOKENS) for _ in range(rng.choice([1, 3, 8, 20]))]
    return (*common[: rng.choice([0, 0, len(common), rng.randint(0, len(common))])], *own * rng.choice([1, 1, 2, 4]))


def random_params(rng: random.Random) -> SamplingParams:
    """Any that may change what is drawn or where it ends; a third is under grammars. A text of few tokens, or under a penalty below
    zero, repeats."""
    few = rng.sample(TOKENS, rng.randint(2, 6))
    drawn = [{"top_p": 0.9}, {"top_k": rng.randint(1, 20)}, {"min_p": 0.05}, {"top_p": 0.7, "top_k": 30, "min_p": 0.01}]
    moved = [
        {"frequency_penalty": round(rng.uniform(-1.5, 1.5), 1)},
        {"presence_penalty": round(rng.uniform(-1.5, 1.5), 1)},
        {"repetition_penalty": rng.choice([0.7, 1.2])},
        {"logit_bias": {token: rng.choice([-5.0, 3.0]) for token in few}},
        {"bad_token_ids": few},
    ]
    letters = [bytes([token]).decode() for token in rng.sample(range(32, 127), 6)]
    ends = [{"stop": letters}, {"stop": letters[:3], "include_stop_str_in_output": True}, {"stop_token_ids": rng.sample(TOKENS, 4)}]
    repeats = rng.random() < 0.4
    if repeats:
        pair = [bytes(rng.choices(few, k=2)).decode() for _ in range(2)]
        ends = [{"stop": pair}, {"stop": pair[0], "min_tokens": 5}, {"stop_token_ids": few[:1], "min_tokens": 3}]
    chosen: dict[str, Any] = {"allowed_token_ids": few} if repeats else {}
    shares = [(drawn, 0.4), (moved, 0.5), (ends, 0.4)]
    if rng.random() < 0.33:
        chosen, shares = {"json_schema": random_schema(rng)} if rng.random() < 0.7 else dict(rng.choice(GRAMMARS)), shares[:1]
    for kinds, share in shares:
        chosen |= rng.choice(kinds) if rng.random() < share else {}
    if "bad_token_ids" in chosen and repeats:
        chosen["bad_token_ids"] = few[:1]
    temperature = rng.choice([0, 0, round(rng.uniform(0.2, 1.4), 2)])
    return SamplingParams(max_tokens=rng.randint(8, 72), temperature=temperature, seed=rng.randrange(2**32), **chosen)


def random_cases(rng: random.Random, count: int, trees: list[TreeShape | None]) -> list[Case]:
    """Of one group. `trees`: what a request may ask for."""
    common = [rng.choice(TOKENS) for _ in range(40)]
    cases = []
    for _ in range(count):
        prompt = random_prompt(rng, common)
        params = random_params(rng)
        asked = GenerationRequest(
            prompt, params, rng.choice([0, 0, 1]), tree=rng.choice(trees), cache_salt=rng.choice([None, None, "a"]),
            wants_trees=rng.random() < 0.15,
        )  # fmt: skip
        cases.append(Case(asked, rng.randint(1, 8)))
    return cases


def run(engine: Engine, cases: Sequence[Case]) -> list[GenerationOutput]:
    """Adds the cases in groups, each when at most four requests run."""
    requests, left = [], list(cases)
    while left or engine.has_work:
        if left and sum(request.finish_reason is None for request in requests) <= 4:
            group, left = left[: left[0].at_once], left[left[0].at_once :]
            requests += [engine.add(case.asked) for case in group]
        engine.step()
    return [request.result() for request in requests]


def said(output: GenerationOutput) -> tuple[tuple[int, ...], str, str, int | str | None, str | None]:
    """All of a result that its drafts must not change."""
    return output.token_ids, output.text, output.finish_reason, output.matched_stop, output.error


class Outcome(NamedTuple):
    """What became of a group."""

    setting: Setting
    requests: int
    unequal: list[tuple[Case, GenerationOutput, GenerationOutput]]
    """With what plain decoding says, and what was said instead."""
    counts: Counter[str]


def check(number: int, seed: int, *, count: int = GROUP, source: str | None = None, devices: int = 1) -> Outcome:
    """Group `number`: it depends on nothing but the arguments, so that it can be repeated alone."""
    rng = random.Random(f"{seed} {number}")
    names = list(SOURCES)
    setting = Setting.random(rng, source or names[number % len(names)], devices)
    trees = [None, None, setting.tree, PLAIN] if setting.options["request_trees"] else [None]
    cases = random_cases(rng, count, trees)
    plain = plain_engine(setting.built_in, setting.storage, setting.kv_cache_dtype)
    expected = run(plain, [Case(replace(case.asked, tree=None), case.at_once) for case in cases])
    engine = engine_of(setting)
    again = [*range(len(cases)), *range(0, len(cases), 4)]
    outputs = run(engine, [cases[place] for place in again])
    engine.prefix_cache.check([])
    engine.grammars.close()
    unequal = [
        (cases[place], expected[place], output)
        for place, output in zip(again, outputs, strict=True)
        if said(output) != said(expected[place])
    ]
    stats = engine.stats()
    counts = Counter(
        engines=1, requests=len(again), unequal=len(unequal), tokens=sum(len(output.token_ids) for output in outputs),
        drafted=stats.draft_tokens, accepted=stats.accepted_tokens, preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens, lent=stats.lent_texts, forced=stats.forced_tokens,
        stopped=sum(output.finish_reason == "stop" for output in outputs),
    )  # fmt: skip
    return Outcome(setting, len(again), unequal, counts)


def recorded(out: Path | None, seed: int, devices: int) -> dict[int, dict[str, Any]]:
    """The lines of a file that other runs with this seed have added, by group."""
    lines = map(json.loads, out.read_text().splitlines()) if out is not None and out.exists() else ()
    return {line["group"]: line for line in lines if (line["seed"], line["devices"]) == (seed, devices)}


def serve(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Serves a group, says what became of it, and records that."""
    started = time.perf_counter()
    outcome = check(number, options.seed, devices=options.devices)
    seconds, equal = time.perf_counter() - started, outcome.requests - len(outcome.unequal)
    print(f"{number}: {equal} of {outcome.requests} equal, {seconds:.0f} s, {outcome.setting}", flush=True)
    for case, plainly, output in outcome.unequal[:3]:
        print(f"  {case}\n    plain {said(plainly)}\n    drafts {said(output)}", flush=True)
    known = environment(os.getloadavg()[0])
    line = {name: known[name] for name in ("date", "jaxspec", "jax", "python", "cpu", "xla_flags")}
    line |= {"seed": options.seed, "devices": options.devices, "group": number}
    line |= {"setting": repr(outcome.setting), "source": outcome.setting.source, "counts": outcome.counts}
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.engine.sources", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--group", type=int, nargs="+", help="these only, by their numbers")
    parser.add_argument("--devices", type=int, default=1, help="virtual devices that share the models of every other group")
    parser.add_argument("--out", type=Path, help="add a line per group to this file; those that it has are not served again")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    enable_compilation_cache()
    before, by_source = recorded(options.out, options.seed, options.devices), dict[str, Counter[str]]()
    for number in options.group or range(-(-options.count // GROUP)):
        line = before.get(number) or serve(number, options)
        by_source.setdefault(line["source"], Counter()).update(line["counts"])
    for source, counts in by_source.items():
        print(f"{source}: {dict(counts)}")
    total = sum(by_source.values(), Counter[str]())
    print(f"{total['requests']} requests: {total['unequal']} differ from plain decoding")


if __name__ == "__main__":
    main()
