"""Requests that an engine serves to their end, and a gate before its compiler."""

import random
import threading
from typing import Any

import pytest

from jaxspec.decoding.programs import Program
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest, Request, Update


class Gate:
    """Lets the background thread compile when it is `open`; `error`: then that fails."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self.open = threading.Event()
        compile_one = engine.runner.programs._compile

        def waiting(program: Program) -> Any:
            if threading.current_thread().name == "compiler":
                assert self.open.wait(60)
                if error is not None:
                    raise error
            return compile_one(program)

        monkeypatch.setattr(engine.runner.programs, "_compile", waiting)


def lose_halves_now_and_then(engine: Engine) -> None:
    """Some of the engine's steps find no halves of cycles, as if these were still being compiled: cycles with masks of roots only
    come between those with masks of all nodes."""
    rng, step, programs = random.Random(0), engine.step, engine.runner.programs
    are_there = True

    def step_on() -> list[Update]:
        nonlocal are_there
        are_there = rng.random() < (0.9 if are_there else 0.3)
        programs.ready = programs.table.ready(programs.can_launch)
        if not are_there:
            programs.ready = programs.ready._replace(in_two=())
        return step()

    engine.step = step_on  # type: ignore[method-assign]


def updates_of(engine: Engine) -> list[Update]:
    """Of all steps until nothing is left to do. No page is lost."""
    updates = []
    while engine.has_work:
        updates += engine.step()
    engine.prefix_cache.check([])
    return updates


def outputs_of(engine: Engine) -> dict[str, GenerationOutput]:
    """Of all requests that end from now on, each once."""
    ended = [(update.request_id, update.output) for update in updates_of(engine) if update.output]
    assert len(dict(ended)) == len(ended), "a request ended twice"
    return dict(ended)


def served(engine: Engine, *asked: GenerationRequest) -> list[Request]:
    """These requests, which were served together."""
    requests = [engine.add(each) for each in asked]
    updates_of(engine)
    return requests
