"""Coupled drafts of the built-in model on held-out prompts: the text stays that of plain decoding, and more drafts are accepted."""

import dataclasses

import jax
import pytest

from jaxspec.commands.common import load_prompts
from jaxspec.commands.workbench import Pass, Workbench, run
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.models.registry import LoadedHead
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import largest_sizes_only
from jaxspec.tree_shape import PLAIN, TreeShape

pytestmark = pytest.mark.exhaustive
BATCH, PROMPTS, CHUNK, TOKENS, SPEC = 8, 16, 64, 64, TreeShape(5, 4, 8)


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
