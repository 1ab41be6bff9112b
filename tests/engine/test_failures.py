"""A failure ends the requests it happened to and no others: serving continues, and no page is lost."""

import logging

import numpy as np
import pytest

from jaxspec.engine.driver import MAX_FAILED_STEPS
from jaxspec.engine.engine import Engine
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import GenerationOutput, GenerationRequest, Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import TinyTokenizer, tiny_engine
from jaxspec.tree_shape import PLAIN
from tests.engine.served import outputs_of

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8]]
PARAMS = SamplingParams(max_tokens=25, temperature=0.8, seed=11)


class DeviceError(RuntimeError):
    """What a broken device might raise."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "jaxspec")


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    engine = tiny_engine()
    return [finish(engine, asked(engine, prompt))[0].token_ids for prompt in PROMPTS]


def asked(engine: Engine, *prompts: list[int]) -> list[Request]:
    return [engine.add(GenerationRequest(prompt, PARAMS)) for prompt in prompts]


def finish(engine: Engine, requests: list[Request]) -> list[GenerationOutput]:
    outputs = outputs_of(engine)
    return [outputs[request.id] for request in requests]


def fail_at(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, call: int, error: BaseException) -> None:
    """Makes one call of a runner's method fail after it has consumed the device state, as a failing program would."""
    original, calls = getattr(engine.runner, name), iter(range(1000))

    def failing(*arguments):
        if next(calls) == call:
            for array in engine.runner.state.sequences:
                array.delete()
            raise error
        return original(*arguments)

    monkeypatch.setattr(engine.runner, name, failing)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("name", "call"), [("launch_cycle", 0), ("launch_cycle", 4), ("launch_prefill", 2), ("read", 5)])
def test_a_failed_program_ends_its_own_requests_only(monkeypatch, expected, overlap, name, call):
    engine = tiny_engine(overlap=overlap)  # two rows: two requests wait
    requests = asked(engine, *PROMPTS)
    fail_at(engine, monkeypatch, name, call, DeviceError("boom"))
    outputs = finish(engine, requests)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= 2 and all("DeviceError: boom" in output.error for output in failed)
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.token_ids == (tokens[: len(output.token_ids)] if output in failed else tokens)
    assert [output.token_ids for output in finish(engine, asked(engine, *PROMPTS))] == expected


def test_a_launch_that_fails_because_of_a_program_of_the_same_step_ends_the_requests_of_that_one(monkeypatch, expected):
    engine = tiny_engine()
    requests = asked(engine, PROMPTS[0])
    for _ in range(3):
        engine.step()
    requests += asked(engine, PROMPTS[1])
    launch_cycle, read, broken = engine.runner.launch_cycle, engine.runner.read, []

    def launching(*arguments):
        launched = launch_cycle(*arguments)
        broken.append(launched.report)
        return launched

    def failing(*_arguments):
        monkeypatch.undo()
        monkeypatch.setattr(engine.runner, "read", reading)
        raise DeviceError("boom")

    def reading(launched):
        if launched.report is broken[-1]:
            raise DeviceError("boom")
        return read(launched)

    monkeypatch.setattr(engine.runner, "launch_cycle", launching)
    monkeypatch.setattr(engine.runner, "launch_prefill", failing)
    outputs = finish(engine, requests)
    assert [output.finish_reason for output in outputs] == ["error", "length"] and len(broken) == 1
    assert outputs[1].token_ids == expected[1]


def test_cached_prefixes_are_forgotten_with_the_device_state(monkeypatch):
    engine = tiny_engine()
    long = list(range(40))
    finish(engine, asked(engine, long))
    fail_at(engine, monkeypatch, "launch_cycle", 0, DeviceError())
    finish(engine, asked(engine, long))
    assert [finish(engine, asked(engine, long))[0].cached_tokens for _ in range(2)] == [0, 40]


@pytest.mark.parametrize("name", ["launch_cycle", "launch_prefill", "read"])
def test_an_interrupt_in_the_middle_of_a_step_loses_nothing(monkeypatch, expected, name):
    engine = tiny_engine()
    requests = asked(engine, *PROMPTS)
    fail_at(engine, monkeypatch, name, 3, KeyboardInterrupt())
    outputs: dict[str, GenerationOutput] = {}
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs |= {update.request_id: update.output for update in engine.step() if update.output}
    outputs |= outputs_of(engine)
    assert [outputs[request.id].token_ids for request in requests] == expected


class BrokenTokenizer(TinyTokenizer):
    """Can't decode one token."""

    def __init__(self, broken: int):
        self._broken = broken

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        if self._broken in token_ids:
            raise KeyError("no such token")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_tokenizer_that_fails_costs_one_request(expected):
    unused = min(set(range(128)).difference(*expected, *PROMPTS))
    engine = tiny_engine(tokenizer=BrokenTokenizer(unused))
    forced = SamplingParams(max_tokens=5, temperature=0, allowed_token_ids=[unused])
    params = (PARAMS, forced, PARAMS)
    requests = [engine.add(GenerationRequest(prompt, each)) for prompt, each in zip(PROMPTS, params, strict=False)]
    first, broken, third = finish(engine, requests)
    assert broken.finish_reason == "error" and "KeyError" in broken.error
    assert [first.token_ids, third.token_ids] == [expected[0], expected[2]]
    assert engine.stats().failed_steps == 0, "the device has not failed"


def test_failures_in_a_row_are_counted(monkeypatch):
    engine = tiny_engine()
    monkeypatch.setattr(engine.runner, "launch_admission", lambda _request: 1 / 0)
    for number in range(1, 4):
        asked(engine, PROMPTS[0])
        engine.step()
        assert engine.stats().failed_steps == number
    monkeypatch.undo()
    finish(engine, asked(engine, PROMPTS[0]))
    assert engine.stats().failed_steps == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_launches_without_a_readable_result_are_no_success(monkeypatch, overlap):
    engine = tiny_engine(overlap=overlap)
    monkeypatch.setattr(engine.runner, "read", lambda _launched: 1 / 0)
    for _ in range(8):
        asked(engine, PROMPTS[0])
        engine.step()
    assert engine.stats().failed_steps >= MAX_FAILED_STEPS


def test_lost_pages_stop_the_engine():
    engine = tiny_engine()
    engine.add(GenerationRequest(PROMPTS[0], SamplingParams(max_tokens=2)))
    engine.pages.allocate(3)
    with pytest.raises(IntegrityError, match=r"free \(\d+\) \+ cached \(\d+\) \+ held \(0\).* total \(128\)"):
        while engine.has_work:
            engine.step()


def test_a_bug_in_planning_is_not_swallowed(monkeypatch):
    engine = tiny_engine()
    asked(engine, PROMPTS[0])
    monkeypatch.setattr(engine.scheduler, "plan", lambda _tokens: {}["missing"])
    with pytest.raises(KeyError):
        engine.step()


def test_a_timeout_ends_a_request_wherever_it_is(expected):
    now = [0.0]
    engine = tiny_engine()
    engine.clock = lambda: now[0]
    running = engine.add(GenerationRequest(PROMPTS[0], PARAMS, timeout=5.0))
    kept = engine.add(GenerationRequest(PROMPTS[1], PARAMS, priority=np.int64(0), timeout=500.0))
    waiting = engine.add(GenerationRequest(PROMPTS[2], PARAMS, timeout=4.0))
    for _ in range(6):
        engine.step()
    now[0] = 5.0
    updates = engine.step()
    ended = {update.request_id: update.output.finish_reason for update in updates if update.output}
    assert ended == {running.id: "timeout", waiting.id: "timeout"}
    assert tuple(running.output) == expected[0][: len(running.output)] and running.output
    assert finish(engine, [kept])[0].token_ids == expected[1]
    for wrong in (None, True):
        with pytest.raises(ValueError, match=f"priority must be a whole number, got {wrong}"):
            engine.add(GenerationRequest([1], SamplingParams(), priority=wrong))
    with pytest.raises(ValueError, match="timeout must be above 0"):
        engine.add(GenerationRequest(PROMPTS[0], PARAMS, timeout=0))


@pytest.mark.parametrize("error", [DeviceError(), KeyboardInterrupt()])
def test_a_failure_loses_no_update_of_its_step(monkeypatch, error):
    """Two requests end in the step whose launch fails: by a deadline, and by nothing else than the failure."""
    now = [0.0]
    engine = tiny_engine()
    engine.clock = lambda: now[0]
    (running,) = asked(engine, PROMPTS[0])
    engine.step()
    late = engine.add(GenerationRequest(PROMPTS[1], PARAMS, timeout=1.0))
    now[0] = 2.0
    fail_at(engine, monkeypatch, "launch_cycle", 0, error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.has_work
    ended = {update.request_id: update.output.finish_reason for update in engine.step() if update.output}
    assert ended == {late.id: "timeout"} | ({running.id: "error"} if isinstance(error, DeviceError) else {})


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chunk_that_fails_silently_ends_its_own_request_too(monkeypatch, expected, overlap):
    """A chunk that is not its prompt's last reports nothing: the next result tells, and the culprit must not come back for ever."""
    engine = tiny_engine(overlap=overlap)
    (running,) = asked(engine, PROMPTS[0])
    for _ in range(3):
        engine.step()
    original = engine.runner.launch_prefill

    def launch_prefill(chunks):
        launched = original(chunks)
        if chunks[0].request.id == "culprit":
            for array in engine.runner.state.sequences:
                array.delete()
        return launched

    monkeypatch.setattr(engine.runner, "launch_prefill", launch_prefill)
    engine.add(GenerationRequest(list(range(40)), PARAMS), "culprit")
    outputs = outputs_of(engine)
    assert outputs["culprit"].finish_reason == "error" and outputs[running.id].finish_reason in ("error", "length")
    assert finish(engine, asked(engine, PROMPTS[2]))[0].token_ids == expected[2]


def test_made_up_ids_avoid_given_ones():
    engine = tiny_engine()
    given = [engine.add(GenerationRequest(PROMPTS[0], PARAMS), f"request-{number}") for number in (0, 1, 3)]
    assert len({request.id for request in given + asked(engine, *PROMPTS[:3])}) == 6


def test_a_reset_that_fails_can_be_tried_again(monkeypatch, expected):
    engine = tiny_engine()
    requests = asked(engine, PROMPTS[0])
    fail_at(engine, monkeypatch, "launch_prefill", 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    original = engine.runner._new_state
    monkeypatch.setattr(engine.runner, "_new_state", lambda: {}["no memory"])
    with pytest.raises(KeyError, match="no memory"):
        engine.step()
    monkeypatch.setattr(engine.runner, "_new_state", original)
    assert finish(engine, requests)[0].token_ids == expected[0]


def test_priorities():
    engine, priorities = tiny_engine(PLAIN, max_running_requests=1), {"first": 0, "low": -1, "high": 5, "second": 0}
    for name, priority in priorities.items():
        engine.add(GenerationRequest(PROMPTS[0], SamplingParams(max_tokens=3), priority), name)
    assert list(outputs_of(engine)) == ["high", "first", "second", "low"]
