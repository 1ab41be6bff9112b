"""Every way of sampling gives the same tokens with and without speculation, in any company; so do log probabilities."""

import numpy as np
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, oracle_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served, updates_of

PROMPT = [7, 7, 30, 8, 30, 9, 7, 30]
LENGTH = 24
BANNED = list(range(0, 128, 3))
KINDS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.1},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    "repetition, greedy": {"temperature": 0, "repetition_penalty": 1.3},
    "repetition": {"repetition_penalty": 1.4, "temperature": 0.9},
    "frequency, greedy": {"temperature": 0, "frequency_penalty": 2.0},
    "presence": {"presence_penalty": 1.9, "temperature": 0.7},
    "penalties and filters": {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "presence_penalty": -0.5, "top_p": 0.8},
    "bias, greedy": {"temperature": 0, "logit_bias": {11: 15.0, 12: 13.0, 13: -100.0}},
    "bias": {"logit_bias": {11: 12.0, 50: 10.0}, "temperature": 2.0},
    "bad tokens": {"bad_token_ids": BANNED},
    "allowed tokens": {"allowed_token_ids": BANNED, "frequency_penalty": 0.3},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": list(range(5, 17)), "logit_bias": dict.fromkeys(range(5, 17), 30.0)},
}


def params_of(kind: str, **others) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "seed": 5, **KINDS[kind], **others})


def run(engine: Engine, params: list[SamplingParams]) -> list[GenerationOutput]:
    """PROMPT with each of the parameters; the outputs in their order."""
    return [request.result() for request in served(engine, *(GenerationRequest(PROMPT, each) for each in params))]


@pytest.fixture(scope="module")
def alone() -> dict[str, GenerationOutput]:
    """Each kind by plain decoding, one request at a time, with log probabilities."""
    engine = tiny_engine(PLAIN, prefix_cache=False)
    return {kind: run(engine, [params_of(kind, logprobs=5, prompt_logprobs=3)])[0] for kind in KINDS}


def test_every_kind_has_an_effect(alone):
    texts = {kind: output.token_ids for kind, output in alone.items()}
    assert len(set(texts.values())) == len(texts)
    assert not set(texts["bad tokens"]) & set(BANNED) and set(texts["allowed tokens"]) <= set(BANNED)
    assert len(texts["min_tokens"]) == 11 and texts["min_tokens"][-1] in range(5, 17)
    assert len(set(texts["frequency, greedy"])) > len(set(texts["greedy"]))
    assert {11, 12} & set(texts["bias, greedy"])


def test_speculation_and_company_change_nothing(alone):
    """All kinds in one engine, so that batches mix them."""
    outputs = run(tiny_engine(TreeShape(3, 2, 5)), [params_of(kind) for kind in KINDS])
    for kind, output in zip(KINDS, outputs, strict=True):
        assert output.token_ids == alone[kind].token_ids, kind
        assert output.logprobs is None and output.prompt_logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_drafts_obey_every_rule(alone, kind):
    """A head that knows the text has its drafts accepted, whatever the kind: rules look at a node's own ancestors."""
    target, tokens = engine_target(), alone[kind].token_ids
    engine = tiny_engine(TreeShape(4, 1), target=target, head=oracle_head(target.config, [*PROMPT, *tokens]))
    (output,) = run(engine, [params_of(kind)])
    assert output.token_ids == tokens
    assert output.speculation.accept_length > 4


@pytest.mark.variants
def test_log_probabilities_do_not_depend_on_speculation(alone):
    wanted = [params_of(kind, logprobs=5, prompt_logprobs=3) for kind in KINDS]
    outputs = run(tiny_engine(TreeShape(3, 2, 5), prefill_chunk=2), wanted)
    for output, plain in zip(outputs, alone.values(), strict=True):
        assert output.token_ids == plain.token_ids
        for entries, expected in ((output.logprobs, plain.logprobs), (output.prompt_logprobs[1:], plain.prompt_logprobs[1:])):
            assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
            of_entries, of_expected = ([[token for token, _ in each.top] for each in listed] for listed in (entries, expected))
            assert of_entries == of_expected
            np.testing.assert_allclose(
                [[entry.logprob, *(value for _, value in entry.top)] for entry in entries],
                [[entry.logprob, *(value for _, value in entry.top)] for entry in expected],
                atol=1e-4,
            )


def test_log_probabilities_belong_to_their_tokens(alone):
    for output in alone.values():
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
        assert [entry.token_id for entry in output.prompt_logprobs[1:]] == PROMPT[1:]
        assert all(len(entry.top) == 5 and entry.top[0][1] >= entry.logprob for entry in output.logprobs)
    greedy = alone["greedy"]
    assert [entry.top[0][0] for entry in greedy.logprobs] == list(greedy.token_ids)
    assert [entry.logprob for entry in greedy.logprobs] == [entry.top[0][1] for entry in greedy.logprobs]


def test_updates_carry_the_log_probabilities_of_their_tokens():
    engine = tiny_engine()
    request = engine.add(GenerationRequest(PROMPT, SamplingParams(max_tokens=12, temperature=0, logprobs=0)))
    entries = []
    for update in updates_of(engine):
        assert [entry.token_id for entry in update.logprobs or ()] == list(update.token_ids)
        entries += update.logprobs or ()
    assert entries == request.logprobs and all(entry.top == () for entry in entries)


def test_copies_share_the_prompt_and_have_their_own_seeds(alone):
    engine = tiny_engine(max_running_requests=2)
    outputs = run(engine, SamplingParams(max_tokens=LENGTH, temperature=1.1, seed=5, n=3).copies())
    assert outputs[0].token_ids == alone["temperature"].token_ids
    assert len({output.token_ids for output in outputs}) == 3
    assert [output.cached_tokens for output in outputs] == [0, 8, 8]


def test_stop_strings_wait_for_min_tokens():
    engine = tiny_engine(PLAIN)
    text = run(engine, [SamplingParams(max_tokens=30, temperature=0)])[0].text
    stop = text[4]
    (output,) = run(engine, [SamplingParams(max_tokens=30, temperature=0, stop=stop, min_tokens=8)])
    again = text.find(stop, 7)
    assert output.text == (text if again < 0 else text[:again])
