"""The prefix cache spares work and changes nothing: same text, same drafts accepted, whatever the page and chunk sizes."""

import pytest

from jaxspec import LLM, SamplingParams, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.testing import largest_sizes_only

SYSTEM = "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
PROMPTS = [SYSTEM + end for end in ("        self.items", "        return", "", "        if item is None:\n")]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)


def run(engine: Engine, llm: LLM, prompts: list[str | list[int]]) -> list[GenerationOutput]:
    """Each prompt greedily and sampled, one after the other, so that all but the first find a cached prefix."""
    outputs = []
    for prompt in prompts:
        for params in (GREEDY, SAMPLED):
            request = engine.add(GenerationRequest(llm.encode(prompt), params))
            while engine.has_work:
                engine.step()
            outputs.append(request.result())
    engine.prefix_cache.check([])
    return outputs


@pytest.mark.exhaustive
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, 7), (64, 24)])
def test_the_cache_changes_neither_text_nor_accept_length(page_size, chunk):
    """With the built-in model, whose head really has drafts accepted: wrong keys in a shared page would show."""
    options = dict(max_running_requests=1, context_length=160, page_size=page_size, prefill_chunk=chunk)
    with_cache, without = (LLM(spec=TreeShape(3, 1, 4), prefix_cache=on, **options) for on in (True, False))
    for llm in (with_cache, without):
        largest_sizes_only(llm.engine)
    cold = run(without.engine, without, PROMPTS)
    conversation = list(cold[0].prompt_token_ids + cold[0].token_ids)  # a second turn: prefix of prompt and output
    cold += run(without.engine, without, [conversation])
    warm = run(with_cache.engine, with_cache, [*PROMPTS, conversation])
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert [output.speculation for output in warm] == [output.speculation for output in cold]
    assert max(output.speculation.accept_length for output in cold) > 2, "hardly a draft is accepted: this would show nothing"

    shared = page_size * (len(with_cache.encode(SYSTEM)) // page_size - 1)
    assert warm[0].cached_tokens == 0 and all(output.cached_tokens >= max(0, shared) for output in warm[1:])
    assert warm[-1].cached_tokens >= page_size * ((len(conversation) - 2) // page_size) > shared
    stats = with_cache.engine.stats()
    assert stats.prefix_hit_tokens == sum(output.cached_tokens for output in warm) > 0
    assert stats.prefilled_tokens + stats.prefix_hit_tokens >= sum(len(output.prompt_token_ids) for output in warm)
    assert without.engine.stats().prefix_queried_tokens == without.engine.stats().cached_pages == 0
    with_cache.engine.flush_cache()
    assert with_cache.engine.stats().cached_pages == 0
    assert run(with_cache.engine, with_cache, PROMPTS[:1])[0].cached_tokens == 0
