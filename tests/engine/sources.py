"""Generated requests through every source of drafts and their mixtures: each gets what plain decoding says in the same storage.

python -m tests.engine.sources --count 1000 serves so many in groups, each by an engine of its own, drawn with its source, trees,
storage of weights and cache, placement, batch, pages and loop; requests may have penalties, grammars and tools. It says per source
how many requests were unequal, and of how many drafts. Results go to sources.jsonl beside this file (`--out`). `tests.engine.pairs`
draws what is missing there.
"""

import argparse
import pickle
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from jaxspec.checkpoints.draft_models import as_draft
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import Storing
from jaxspec.config import FP8, EngineConfig
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_TARGET, SMOLLM2_HEAD, UNASKED
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.engine.runner import DEFAULT_START, Start
from jaxspec.models.draft_model import DraftModelConfig
from jaxspec.models.linear import Storage
from jaxspec.models.registry import LoadedHead, LoadedModel, LoadedTarget
from jaxspec.placement import Placement
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.structured import Given
from jaxspec.server.tools import Function, ToolUse, constraint_for
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
from jaxspec.text.answer_parser import AnswerFormat, AnswerParser, Thinking
from jaxspec.text.answer_reader import CallStart, Event, merged
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.text.tool_formats import TOOL_FORMATS
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.rows import AsInFile
from pallas_kernels.weight import Weight
from tests.engine.group_counts import group
from tests.engine.records import record, recorded
from tests.engine.served import lose_halves_now_and_then
from tests.engine.tensor_parallel import stored_each, stored_so
from tests.grammar.cases import random_schema

GROUP = 40
"""Requests of one engine; a quarter comes twice, to meet what the first time left in the prefix cache and the store."""
CONTEXT, PAGE_SIZES = 200, (1, 4, 7, 16)
TOKENS = range(1, 128)
"""Of prompts and options: those of the tiny models, and some of the built-in one's."""


def as_numbers(dtype: str, matrix: Any) -> tuple[Storage, Weight]:
    """The matrix in 16 bits, as in a file."""
    storage = AsInFile(((matrix.shape[1], dtype),))
    return storage, storage.of([matrix.T.astype(dtype)])


def as_gguf(format: str, matrix: Any) -> tuple[Storage, Weight] | None:
    """The matrix in GGUF's blocks, if its rows have whole ones."""
    if matrix.shape[0] % 32:
        return None
    storage = AsInFile(((matrix.shape[1], format),))
    blocks = quantize(np.asarray(matrix, np.float32).T, GGMLQuantizationType[format.upper()])
    return storage, storage.of([jnp.asarray(blocks)])


def as_fp8_blocks(for_cpu: bool, matrix: Any) -> tuple[Storage, Weight] | None:
    """The matrix in blocks of 128 x 128, if it has whole ones."""
    storage = QuantizedAs("fp8", 128, for_cpu=for_cpu)
    return None if any(size % 128 for size in matrix.shape) else (storage, storage(matrix))


STORAGES: dict[str, tuple[str | None, Callable[[LoadedModel], Any]]] = {
    "as it is": (None, lambda model: model),
    "rows": (None, lambda model: stored_so(model, Storing.ROWS, None)),
    **{name: ("16 bits", partial(stored_each, store=partial(as_numbers, name))) for name in ("bfloat16", "float16")},
    "int8": ("int8", lambda model: stored_so(model, Storing.ROWS, "int8")),
    "int8, dense": ("int8", lambda model: stored_so(model, Storing.DENSE, "int8")),
    "fp8": ("FP8 rows", lambda model: stored_so(model, Storing.ROWS, "fp8")),
    "fp8, dense": ("FP8 rows", lambda model: stored_so(model, Storing.DENSE, "fp8")),
    "fp8 blocks": ("FP8 blocks", partial(stored_each, store=partial(as_fp8_blocks, True))),
    "fp8 blocks, dense": ("FP8 blocks", partial(stored_each, store=partial(as_fp8_blocks, False))),
    "int4": ("int4", lambda model: stored_so(model, Storing.ROWS, "int4")),
    "int4, dense": ("int4", lambda model: stored_so(model, Storing.DENSE, "int4")),
    **{name: ("GGUF blocks", partial(stored_each, store=partial(as_gguf, name))) for name in ("q8_0", "q4_0", "q4_1")},
}
"""What docs/pairs.md calls them, and how a model is stored so."""
PLACEMENTS = ("one device", "tp 2", "two processes")


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
    has: frozenset[str] = frozenset()
    """Its constraints, as docs/pairs.md calls them."""
    tools: tuple[str, dict[str, Any]] | None = None
    """The name of a format of calls, and the schemas of tools that its text may call."""


class Source(NamedTuple):
    """Drafts from somewhere: what an engine is given for them."""

    kind: str
    """What docs/pairs.md calls it."""
    trees: str
    head: Callable[[LoadedTarget], LoadedHead] | None = None
    options: Mapping[str, Any] = MappingProxyType({})


def itself(target: LoadedTarget) -> LoadedHead:
    """Nearly all drafts are accepted; in another storage than the target's, most."""
    return as_draft(target, target.config)


def eagle3(target: LoadedTarget) -> LoadedHead:
    return random_head(target.config)


def own_device() -> Placement:
    """The first device of this process, whatever others there are."""
    return Placement((jax.devices().index(jax.local_devices()[0]),))


def built_in_head(target: LoadedTarget) -> LoadedHead:
    return load_head(BUILT_IN_HEAD, target, placement=own_device())


NGRAMS, SHARED, ADAPTIVE = {"ngram": True}, {"ngram": True, "ngram_share": 1}, {"adaptive": True}
SOURCES = {
    "n-grams": Source("n-grams", "7/4/8 4/1/5 5/4/16", None, NGRAMS),
    "n-grams, shared": Source("n-grams", "7/4/8 3/2/5", None, SHARED),
    "n-grams, adaptive": Source("n-grams", "7/4/8", None, NGRAMS | ADAPTIVE),
    "n-grams beside plain decoding": Source("n-grams", "plain", None, {**NGRAMS, **ADAPTIVE, "adaptive_trees": UNASKED[None]}),
    "nothing": Source("none", "plain"),
    "EAGLE": Source("EAGLE", "3/2/5 2/1/3", lambda target: random_eagle(target.config)),
    "EAGLE-3": Source("EAGLE-3", "3/2/5 4/1/5 5/4/16", eagle3),
    "EAGLE-3, adaptive": Source("EAGLE-3", "3/2/5", eagle3, ADAPTIVE),
    "EAGLE-3 and n-grams": Source("merged", "3/2/5 5/4/12", eagle3, NGRAMS),
    "EAGLE-3 for some levels and n-grams": Source("merged", "7/4/8/3 5/2/8/1 4/2/6/0", eagle3, NGRAMS),
    "EAGLE-3 and shared n-grams, adaptive": Source("merged", "5/4/8", eagle3, SHARED | ADAPTIVE),
    "EAGLE-3 and n-grams beside plain decoding": Source(
        "merged", "plain", eagle3, {**NGRAMS, **ADAPTIVE, "adaptive_trees": UNASKED[SMOLLM2_HEAD]}
    ),
    "MTP": Source("MTP", "1/1/2 3/2/5", lambda target: random_mtp(target.config)),
    "MTP and n-grams": Source("merged", "1/1/2 5/2/8/1", lambda target: random_mtp(target.config), NGRAMS),
    "DFlash": Source("block head", "5/1/6 4/3/12", lambda target: random_block(target.config)),
    "DFlash and n-grams": Source("merged", "5/3/12 7/3/12/2", lambda target: random_block(target.config, windows=(9, 7)), NGRAMS),
    "DSpark": Source("block head", "4/2/7", lambda target: random_block(target.config, markov_rank=4)),
    "a small model": Source("draft model", "3/1/4 3/2/7", lambda target: random_draft_model(target.config)),
    "the target itself": Source("draft model", "3/1/4 4/2/8", itself),
    "the target itself and n-grams": Source("merged", "3/2/7 7/4/8/3", itself, NGRAMS | ADAPTIVE),
    "the built-in head": Source("EAGLE-3", "5/4/8 3/1/4", built_in_head),
    "the built-in head and n-grams": Source("merged", "5/4/8 7/4/8/3", built_in_head, SHARED | ADAPTIVE),
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
    placement: str
    options: dict[str, Any]

    @property
    def built_in(self) -> bool:
        return "built-in" in self.source

    def plain_engine(self) -> Engine:
        """In the same storage. In a cache of 8 bits a product's last bit may become a sixteenth of a key: prefills of other shapes
        have other products."""
        chunk = {"chunk": self.options["prefill_chunk"]} if self.kv_cache_dtype == FP8 else {}
        return plain_engine(self.built_in, self.storage, self.kv_cache_dtype, **chunk)

    @property
    def features(self) -> frozenset[str]:
        """As docs/pairs.md calls them, of every request of the group."""
        loop = "overlapped" if self.options["overlap"] else "serial"
        cache = "8-bit cache" if self.kv_cache_dtype == FP8 else None
        return frozenset({STORAGES[self.storage][0], cache, SOURCES[self.source].kind, self.placement, loop} - {None})

    @classmethod
    def random(cls, rng: random.Random, source: str, wanted: frozenset[str] = frozenset(), **fixed: str) -> "Setting":
        """`wanted`: features that it has. `fixed`: the placement, if it is not drawn."""
        tree, page = TreeShape.of(rng.choice(SOURCES[source].trees.split())), rng.choice(PAGE_SIZES)
        storages = [name for name, (feature, _) in STORAGES.items() if feature in wanted] or list(STORAGES)
        storage = rng.choice(storages) if wanted or rng.random() < 0.6 else "as it is"
        batch, whole = rng.randint(4 if "preemption" in wanted else 1, 8), -(-CONTEXT // page)
        placement = fixed.get("placement") or rng.choice([each for each in PLACEMENTS if each in wanted] or PLACEMENTS[:2])
        loops = [name == "overlapped" for name in ("overlapped", "serial") if name in wanted]
        options = {
            "max_running_requests": batch,
            "page_size": page,
            "num_pages": whole + (0 if "preemption" in wanted else rng.randint(0, whole * (batch - 1) // 4)),
            "prefill_chunk": rng.choice([5, 16, 64]),
            "overlap": rng.choice(loops or [True, True, True, False]),
            "request_trees": (PLAIN,) if rng.random() < 0.3 else (),
            "tp_size": 1 if placement == "one device" else 2,
            "prefix_cache": "prefix cache" in wanted or rng.random() < 0.8,
        }
        options["row_cost"] = random.Random(repr(options)).choice([None, 0.005, 0.05])  # the others stay as they were drawn before
        head_storage = rng.choice([storage, "as it is", rng.choice(list(STORAGES))])
        kv_cache_dtype = FP8 if "8-bit cache" in wanted else "auto" if wanted else rng.choice(["auto", "auto", FP8])
        if kv_cache_dtype == FP8:  # only the row kernels' products have the same bits in every program: see `plain_engine`
            storage = {"as it is": "rows"}.get(storage, storage.removesuffix(", dense"))
        return cls(source, tree, storage, head_storage, kv_cache_dtype, placement, {**options, **SOURCES[source].options})


@cache
def target_of(built_in: bool, storage: str) -> LoadedTarget:
    """In float32, on this process's device. Groups of quantised numbers fill the parts of two devices."""
    if built_in:
        return load_target(BUILT_IN_TARGET, jnp.float32, placement=own_device())
    sizes = (128, 512) if "blocks" in storage else (64, 128)
    return engine_target(hidden_size=sizes[0], head_dim=64, intermediate_size=sizes[1], eos_token_ids=(0,))


def stored(model: LoadedModel, storage: str) -> Any:
    """So stored. A small model that drafts is stored as the target that it is."""
    store = STORAGES[storage][1]
    if not isinstance(model.config, DraftModelConfig):
        return store(model)
    inner = store(replace(model, config=model.config.layer, params=model.params["model"]))
    return replace(model, config=replace(model.config, layer=inner.config), params={"model": inner.params})


@cache
def tokenizer_of(built_in: bool) -> Any:
    return load_tokenizer(BUILT_IN_TARGET) if built_in else TinyTokenizer()


def engine_of(setting: Setting, start: Start = DEFAULT_START) -> Engine:
    """The engine of a group."""
    target, source = target_of(setting.built_in, setting.storage), SOURCES[setting.source]
    head = None if source.head is None else stored(source.head(target), setting.head_storage)
    config = EngineConfig(context_length=CONTEXT, kv_cache_dtype=setting.kv_cache_dtype, **setting.options)
    target, tokenizer = stored(target, setting.storage), tokenizer_of(setting.built_in)
    engine = Engine(target, head, tokenizer, setting.tree, config, start=start)
    largest_sizes_only(engine)
    lose_halves_now_and_then(engine)
    return engine


@cache
def plain_engine(built_in: bool, storage: str, kv_cache_dtype: str, chunk: int = 64) -> Engine:
    """The simplest that there is, with prefills of up to `chunk` tokens."""
    config = EngineConfig(
        max_running_requests=1, context_length=CONTEXT, kv_cache_dtype=kv_cache_dtype, page_size=64, prefill_chunk=chunk,
        prefix_cache=False, overlap=False,
    )  # fmt: skip
    target = stored(target_of(built_in, storage), storage)
    engine = Engine(target, None, tokenizer_of(built_in), PLAIN, config)
    largest_sizes_only(engine)
    return engine


def random_prompt(rng: random.Random, common: list[int]) -> tuple[int, ...]:
    """One that repeats itself or not, and may begin as others do."""
    own = [rng.choice(TOKENS) for _ in range(rng.choice([1, 3, 8, 20]))]
    return (*common[: rng.choice([0, 0, len(common), rng.randint(0, len(common))])], *own * rng.choice([1, 1, 2, 4]))


def random_tools(rng: random.Random) -> tuple[tuple[str, dict[str, Any]], dict[str, Any], bool]:
    """The format of calls with the schemas of tools, their structural tag, and whether the text may follow another grammar, too."""
    name, given = rng.choice(list(TOOL_FORMATS)), None
    functions = [Function(name=each, parameters=random_schema(rng), strict=True) for each in ("f", "g")[: rng.randint(1, 2)]]
    use = ToolUse(TOOL_FORMATS[name], (), functions, rng.random() < 0.6, rng.random() < 0.7)
    if not use.must_call and rng.random() < 0.6:
        given = Given("response_format", "json_schema", random_schema(rng))
    made = constraint_for(use, given, None, Thinking.NONE)
    assert made is not None
    return (name, use.schemas), {made.name: made.value}, given is not None


def random_case(rng: random.Random, prompt: tuple[int, ...], tree: TreeShape | None) -> Case:
    """Any that may change what is drawn or where it ends; a half has grammars or tools. A text of few tokens, or under a penalty
    below zero, repeats."""
    few = rng.sample(TOKENS, rng.randint(2, 6))
    drawn = [{"top_p": 0.9}, {"top_k": rng.randint(1, 20)}, {"min_p": 0.05}, {"top_p": 0.7, "top_k": 30, "min_p": 0.01}]
    penalties = [
        {"frequency_penalty": round(rng.uniform(-1.5, 1.5), 1)},
        {"presence_penalty": round(rng.uniform(-1.5, 1.5), 1)},
        {"repetition_penalty": rng.choice([0.7, 1.2])},
    ]
    moved = [*penalties, {"logit_bias": {token: rng.choice([-5.0, 3.0]) for token in few}}, {"bad_token_ids": few}]
    letters = [bytes([token]).decode() for token in rng.sample(range(32, 127), 6)]
    ends = [{"stop": letters}, {"stop": letters[:3], "include_stop_str_in_output": True}, {"stop_token_ids": rng.sample(TOKENS, 4)}]
    repeats = rng.random() < 0.4
    if repeats:
        pair = [bytes(rng.choices(few, k=2)).decode() for _ in range(2)]
        ends = [{"stop": pair}, {"stop": pair[0], "min_tokens": 5}, {"stop_token_ids": few[:1], "min_tokens": 3}]
    chosen: dict[str, Any] = {"allowed_token_ids": few} if repeats else {}
    shares, tools, has = [(drawn, 0.4), (moved, 0.5), (ends, 0.4)], None, set[str]()
    if (kind := rng.random()) < 0.5:
        shares = [(drawn, 0.4), (penalties, 0.4)]
        if kind < 0.25:
            has, chosen = {"grammar"}, {"json_schema": random_schema(rng)} if rng.random() < 0.7 else dict(rng.choice(GRAMMARS))
        else:
            tools, chosen, has_given = random_tools(rng)
            has = {"tools", "grammar"} if has_given else {"tools"}
    for kinds, share in shares:
        chosen |= rng.choice(kinds) if rng.random() < share else {}
    if "bad_token_ids" in chosen and repeats:
        chosen["bad_token_ids"] = few[:1]
    has |= {"penalties"} if any(name.endswith("_penalty") for name in chosen) else set()
    temperature = rng.choice([0, 0, round(rng.uniform(0.2, 1.4), 2)])
    params = SamplingParams(max_tokens=rng.randint(8, 72), temperature=temperature, seed=rng.randrange(2**32), **chosen)
    asked = GenerationRequest(
        prompt, params, rng.choice([0, 0, 1]), tree=tree, cache_salt=rng.choice([None, None, "a"]), wants_trees=rng.random() < 0.15
    )
    return Case(asked, rng.randint(1, 8), frozenset(has or {"no constraint"}), tools)


def random_cases(rng: random.Random, count: int, trees: list[TreeShape | None]) -> list[Case]:
    """Of one group. `trees`: what a request may ask for."""
    common = [rng.choice(TOKENS) for _ in range(40)]
    return [random_case(rng, random_prompt(rng, common), rng.choice(trees)) for _ in range(count)]


type Said = tuple[tuple[int, ...], str, str, int | str | None, str | None, list[Event]]
"""All of a result that its drafts must not change, and what its pieces were read as."""


class Served(NamedTuple):
    """What became of a request."""

    said: Said
    went_through: frozenset[str]
    """Of the prefix cache and preemption."""


def run(engine: Engine, cases: Sequence[Case]) -> list[Served]:
    """Adds the cases in groups, each when at most four requests run."""
    requests, left, preempted, parsers, events = list[Request](), list(cases), set[str](), {}, {}
    while left or engine.has_work:
        if left and sum(request.finish_reason is None for request in requests) <= 4:
            group, left = left[: left[0].at_once], left[left[0].at_once :]
            for case in group:
                requests.append(request := engine.add(case.asked))
                form, schemas = case.tools or (None, {})
                read = None if form is None else TOOL_FORMATS[form].read
                parsers[request.id], events[request.id] = AnswerParser(AnswerFormat(tool_parser=read, tools=schemas)), []
        admitted = list(engine.scheduler.admitted)
        for update in engine.step():
            events[update.request_id] += parsers[update.request_id].add(update.text)
        preempted |= {each.id for each in admitted if each in engine.scheduler.waiting}
    if engine.lending is not None:
        assert engine.lending.store.texts <= sum(request.finish_reason in ("stop", "length") for request in requests), "each once"
    served = []
    for request in requests:
        output, parts = request.result(), merged(events[request.id] + parsers[request.id].add("", is_last=True))
        went_through = {"prefix cache"} if output.cached_tokens else set[str]()
        went_through |= {"preemption"} if request.id in preempted else set()
        said = output.token_ids, output.text, output.finish_reason, output.matched_stop, output.error, parts
        served.append(Served(said, frozenset(went_through)))
    return served


class Outcome(NamedTuple):
    """What became of a group."""

    setting: Setting
    requests: int
    unequal: list[tuple[Case, Said, Said]]
    """With what plain decoding says, and what was said instead."""
    counts: Counter[str]
    has: list[list[str]]
    """The features of its requests beside those of the setting, each set once."""


def serve(setting: Setting, cases: Sequence[Case], start: Start = DEFAULT_START) -> tuple[list[Served], Counter[str]]:
    """What an engine says, and what it counted. No page is lost."""
    engine = engine_of(setting, start)
    served = run(engine, cases)
    engine.prefix_cache.check([])
    engine.grammars.close()
    stats = engine.stats()
    return served, Counter(
        drafted=stats.draft_tokens, accepted=stats.accepted_tokens, preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens, lent=stats.lent_texts, forced=stats.forced_tokens,
    )  # fmt: skip


def serve_by_two(setting: Setting, cases: Sequence[Case]) -> tuple[list[Served], Counter[str]]:
    """The same by two processes, each with one device (group_process.py)."""
    with tempfile.TemporaryDirectory() as directory:
        asked, said = Path(directory) / "asked", Path(directory) / "said"
        asked.write_bytes(pickle.dumps((setting, cases)))
        with group(f"sources:{asked}", longest=1800) as processes:
            done = [each.communicate()[1] for each in processes]
        if any(each.returncode for each in processes):
            raise RuntimeError("\n".join(done))
        found: tuple[list[Served], Counter[str]] = pickle.loads(said.read_bytes())
        return found


def random_group(
    number: int, seed: int, *, count: int = GROUP, source: str | None = None, wanted: frozenset[str] = frozenset(), **fixed: str
) -> tuple[Setting, list[Case]]:
    """Group `number`: it depends on nothing but the arguments, so that it can be repeated alone."""
    rng = random.Random(f"{seed} {number}")
    names = [name for name, each in SOURCES.items() if each.kind in wanted]
    drawn = rng.choice(names) if names else list(SOURCES)[number % len(SOURCES)]
    setting = Setting.random(rng, source or drawn, wanted, **fixed)
    trees = [None, None, setting.tree, PLAIN] if setting.options["request_trees"] else [None]
    return setting, random_cases(rng, count, trees)


def check(setting: Setting, cases: Sequence[Case]) -> Outcome:
    """Serves a group and compares it with plain decoding."""
    expected = run(setting.plain_engine(), [Case(replace(case.asked, tree=None), *case[1:]) for case in cases])
    again = [*range(len(cases)), *range(0, len(cases), 4)]
    served, counts = (serve_by_two if setting.placement == "two processes" else serve)(setting, [cases[place] for place in again])
    unequal = [
        (cases[place], expected[place].said, each.said)
        for place, each in zip(again, served, strict=True)
        if each.said != expected[place].said
    ]
    counts += Counter(
        engines=1, requests=len(again), unequal=len(unequal), tokens=sum(len(each.said[0]) for each in served),
        calls=sum(isinstance(event, CallStart) for each in served for event in each.said[-1]),
        stopped=sum(each.said[2] == "stop" for each in served),
    )  # fmt: skip
    has = {cases[place].has | each.went_through for place, each in zip(again, served, strict=True)}
    return Outcome(setting, len(again), unequal, counts, sorted(map(sorted, has)))


def recorded_group(number: int, seed: int, count: int, wanted: frozenset[str], out: Path | None) -> dict[str, Any]:
    """Serves a group, says what became of it, and records that."""
    started = time.perf_counter()
    outcome = check(*random_group(number, seed, count=count, wanted=wanted))
    seconds, equal = time.perf_counter() - started, outcome.requests - len(outcome.unequal)
    print(f"{number}: {equal} of {outcome.requests} equal, {seconds:.0f} s, {outcome.setting}", flush=True)
    for case, plainly, said in outcome.unequal[:3]:
        print(f"  {case}\n    plain {plainly}\n    drafts {said}", flush=True)
    drawn = {"seed": seed, "group": number, "count": count, "wanted": sorted(wanted), "setting": repr(outcome.setting)}
    served = {"source": outcome.setting.source, "features": sorted(outcome.setting.features), "has": outcome.has}
    return record(out, **drawn, **served, seconds=round(seconds), counts=outcome.counts)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.engine.sources", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--group", type=int, nargs="+", help="these only, by their numbers")
    parser.add_argument("--out", type=Path, help="add a line per group to this file; those that it has are not served again")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    enable_compilation_cache()
    known = [line for line in recorded(options.out) if line["seed"] == options.seed and not line.get("wanted", True)]
    before, by_source = {line["group"]: line for line in known}, dict[str, Counter[str]]()
    for number in options.group or range(-(-options.count // GROUP)):
        line = before.get(number) or recorded_group(number, options.seed, GROUP, frozenset(), options.out)
        by_source.setdefault(line["source"], Counter()).update(line["counts"])
    for source, counts in by_source.items():
        print(f"{source}: {dict(counts)}")
    total = sum(by_source.values(), Counter[str]())
    print(f"{total['requests']} requests: {total['unequal']} differ from plain decoding")


if __name__ == "__main__":
    main()
