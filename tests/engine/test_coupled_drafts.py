"""Coupled drafts of the built-in model on held-out prompts: the text stays that of plain decoding, and more drafts are accepted."""

import dataclasses
import itertools

import jax
import pytest

from jaxspec.commands.common import load_prompts
from jaxspec.commands.workbench import Pass, Workbench, run
from jaxspec.config import PLAIN, EngineConfig, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest
from jaxspec.load import LoadedModels
from jaxspec.models.registry import LoadedHead
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import largest_sizes_only

pytestmark = pytest.mark.exhaustive
BATCH, PROMPTS, CHUNK, TOKENS, SPEC = 8, 16, 64, 64, TreeShape(5, 4, 8)
TREES = (SPEC, TreeShape(3, 1, 4), TreeShape(5, 4, 16), TreeShape(2, 2, 4), TreeShape(4, 8, 24))
KINDS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.3),
    SamplingParams(temperature=1.0, logit_bias={13: 4.0, 200: -3.0, 5: 2.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=list(range(5, 400, 3))),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, presence_penalty=0.5, logit_bias={30: 3.0}, min_tokens=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0),
)
"""The last two are the greedy neighbours of the others."""
ONE_OF_EACH = len(TREES) * len(KINDS)


@dataclasses.dataclass(frozen=True)
class Work:
    """Two requests of every kind of sampling with every tree, the first of each in front; and their texts by plain decoding."""

    llm: LoadedModels
    requests: list[tuple[list[int], SamplingParams, TreeShape]]
    plain: list[tuple[int, ...]]

    @classmethod
    def of(cls, seeds: int = 2) -> "Work":
        bench = Workbench(None, None, context_length=2)
        prompts = itertools.cycle(bench.encode(load_prompts(None, PROMPTS, PROMPTS).prompts))
        requests = [
            (next(prompts), dataclasses.replace(kind, seed=number, max_tokens=16, ignore_eos=True), tree)
            for number, (_, tree, kind) in enumerate(itertools.product(range(seeds), TREES, KINDS))
        ]
        return cls(bench.models, requests, texts(bench.models, None, requests))


def texts(llm: LoadedModels, head: LoadedHead | None, work: list[tuple], *, alone: bool = False) -> list[tuple[int, ...]]:
    """The tokens of each request. Requests run together, or `alone`, one after the other; without a head, decoding is plain."""
    config = EngineConfig(max_running_requests=BATCH, context_length=256, prefill_chunk=CHUNK, prefix_cache=False)
    spec, trees = (SPEC, TREES[1:]) if head else (PLAIN, ())
    engine = Engine(llm.target, head, llm.tokenizer, spec, dataclasses.replace(config, request_trees=trees))
    largest_sizes_only(engine)
    requests = []
    for prompt, params, tree in work:
        requests.append(engine.add(GenerationRequest(prompt, params, tree=tree if head else None)))
        while alone and engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    return [tuple(request.output) for request in requests]


@pytest.fixture(scope="module")
def work() -> Work:
    return Work.of()


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
def test_texts_are_those_of_plain_decoding(work, alone):
    chosen = slice(0, ONE_OF_EACH, 3) if alone else slice(None)  # every third still has all kinds and all trees
    requests, expected = work.requests[chosen], work.plain[chosen]
    drafted = texts(work.llm, work.llm.head, requests, alone=alone)
    assert all(map(len, expected))
    pairs = zip(requests, expected, drafted, strict=True)
    assert [request[1:] for request, plain, other in pairs if plain != other] == []


def test_sampled_drafts_are_accepted_whatever_the_head_thinks_of_itself():
    """The head's logits as trained, half and twice as large. Drafts that may not look at the noise, because of thresholds (which
    accept nothing that is not chosen), show what coupling brings."""
    bench = Workbench(None, None, context_length=2)
    llm, prompts = bench.models, bench.encode(load_prompts(None, PROMPTS, PROMPTS).prompts)
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in range(len(prompts))]

    def decoded(head: LoadedHead | None, **options) -> Pass:
        config = EngineConfig(max_running_requests=BATCH, context_length=256, prefill_chunk=CHUNK, **options)
        engine = Engine(llm.target, head, llm.tokenizer, SPEC if head else PLAIN, config)
        largest_sizes_only(engine)
        return run(engine, prompts, params)

    def accept_length(factor: float, **options) -> float:
        lm_head = jax.tree.map(lambda array: factor * array, llm.head.params["lm_head"])
        done = decoded(dataclasses.replace(llm.head, params=llm.head.params | {"lm_head": lm_head}), **options)
        assert options or done.tokens == plain.tokens
        return done.accept_length

    plain = decoded(None)
    uncoupled = accept_length(1.0, accept_threshold_acc=0.999999)
    as_trained, flat, sharp = map(accept_length, (1.0, 0.5, 2.0))
    assert as_trained > 1.3 * uncoupled
    assert min(flat, sharp) > 0.95 * as_trained
