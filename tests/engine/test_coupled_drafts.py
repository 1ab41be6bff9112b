"""How much coupled drafts bring, with the built-in model on held-out prompts."""

import dataclasses

import jax
import pytest

from jaxspec.commands.common import load_prompts
from jaxspec.commands.workbench import Workbench, run
from jaxspec.config import PLAIN, EngineConfig, SpecConfig
from jaxspec.engine.engine import Engine
from jaxspec.sampling_params import SamplingParams

PROMPTS, TOKENS, SPEC = 16, 64, SpecConfig(5, 4, 8)


@pytest.mark.exhaustive
def test_sampled_drafts_are_accepted_whatever_the_head_thinks_of_itself():
    """The head's logits as trained, half and twice as large. Drafts that may not look at the noise, because of thresholds (which
    accept nothing that is not chosen), show what coupling brings."""
    bench = Workbench(None, None, context_length=2)
    llm, prompts = bench.llm, bench.encode(load_prompts(None, PROMPTS, PROMPTS).prompts)
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in range(len(prompts))]

    def accept_length(factor: float, **options) -> float:
        head = llm.head
        lm_head = jax.tree.map(lambda array: factor * array, head.params["lm_head"])
        head = dataclasses.replace(head, params=head.params | {"lm_head": lm_head})
        config = EngineConfig(max_running_requests=8, context_length=256, **options)
        done = run(Engine(llm.target, head, llm.tokenizer, SPEC, config), prompts, params)
        assert options or done.tokens == plain.tokens
        return done.accept_length

    plain = run(bench.engine(PLAIN, 8, 256), prompts, params)
    uncoupled = accept_length(1.0, accept_threshold_acc=0.999999)
    as_trained, flat, sharp = map(accept_length, (1.0, 0.5, 2.0))
    assert as_trained > 1.3 * uncoupled
    assert min(flat, sharp) > 0.95 * as_trained
