"""Requests for prompt log probabilities in engines that compile nothing in a launch: they wait for their program, alone."""

import pytest

from jaxspec.decoding.programs import PrefillProgram
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import tiny_engine
from jaxspec.tree_shape import PLAIN
from tests.engine.served import Gate, outputs_of, served

PROMPT = [3, 1, 4, 1, 5]
SCORED, OTHER = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1), SamplingParams(max_tokens=6, temperature=0)


def started(now: list[float] | None = None) -> Engine:
    engine = tiny_engine(PLAIN, clock=(lambda: now[0]) if now else lambda: 0.0)
    engine.warm_up()
    assert not any(isinstance(each, PrefillProgram) and each.scores for each in engine.runner.programs.compilations)
    return engine


@pytest.fixture(scope="module")
def expected() -> GenerationOutput:
    """Of an engine that compiles at first use."""
    (request,) = served(tiny_engine(PLAIN), GenerationRequest(PROMPT, SCORED))
    return request.result()


def test_others_run_meanwhile(monkeypatch, expected):
    engine = started()
    gate = Gate(engine, monkeypatch)
    engine.add(GenerationRequest(PROMPT, SCORED), "scored")
    engine.add(GenerationRequest(PROMPT, OTHER), "other")
    assert engine.stats().waiting == 2
    ended: set[str] = set()
    while "other" not in ended:
        ended |= {update.request_id for update in engine.step() if update.output}
    engine.step()
    assert ended == {"other"} and engine.stats().waiting == 1 and engine.has_work
    gate.open.set()
    output = outputs_of(engine)["scored"]
    assert (output.token_ids, output.prompt_logprobs) == (expected.token_ids, expected.prompt_logprobs)
    engine.add(GenerationRequest(PROMPT, SCORED), "again")
    assert not engine.scheduler.held_back and outputs_of(engine)["again"].token_ids == expected.token_ids


def test_a_request_from_before_the_warm_up_gets_its_program_with_it(expected):
    engine = tiny_engine(PLAIN)
    engine.add(GenerationRequest(PROMPT, SCORED), "scored")
    engine.warm_up()
    assert outputs_of(engine)["scored"].prompt_logprobs == expected.prompt_logprobs


def test_a_program_that_cannot_be_compiled_ends_those_that_need_it(monkeypatch):
    engine = started()
    Gate(engine, monkeypatch, ValueError("no such kernel")).open.set()
    for name in ("first", "second"):
        engine.add(GenerationRequest(PROMPT, SCORED), name)
        output = outputs_of(engine)[name]
        assert output.finish_reason == "error" and "with prompt log probabilities) could not be compiled" in output.error
    engine.add(GenerationRequest(PROMPT, OTHER), "other")
    assert outputs_of(engine)["other"].finish_reason == "length"


def test_those_who_wait_can_be_aborted_and_time_out(monkeypatch):
    now = [0.0]
    engine = started(now)
    gate = Gate(engine, monkeypatch)
    engine.add(GenerationRequest(PROMPT, SCORED), "aborted")
    engine.add(GenerationRequest(PROMPT, SCORED, timeout=1.0), "late")
    assert engine.abort("aborted").output.finish_reason == "abort"
    now[0] = 2.0
    assert outputs_of(engine)["late"].finish_reason == "timeout" and not engine.has_work and not engine.scheduler.held_back
    gate.open.set()
    engine.runner.programs.wait()
