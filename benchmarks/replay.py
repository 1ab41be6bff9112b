"""What the host takes by itself: a pass is recorded, and run again with a device that answers at once.

Where the device is a CPU, its threads and ours share cores and caches, and what the engine does between two cycles takes longer
for that alone. The replay calls no program: scheduling, pages, arguments, reading results and text are all that is left.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.load import Load, run
from jaxspec import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs import AdmitProgram, CatchUpProgram, Program


class Recorder:
    """In place of an engine's programs: calls them and keeps the reports, in order."""

    def __init__(self, programs: Any):
        self._programs = programs
        self.steps: list[Any] = []

    def __getitem__(self, program: Program) -> Callable[..., Any]:
        call = self._programs[program]
        if isinstance(program, AdmitProgram | CatchUpProgram):
            return call

        def recorded(*arguments: Any) -> Any:
            self.steps.append(call(*arguments))
            return self.steps[-1]

        return recorded


class Player:
    """In place of an engine's programs: hands out recorded reports and leaves the state alone."""

    def __init__(self, steps: Sequence[Any]):
        self._steps = iter(steps)

    def __getitem__(self, program: Program) -> Callable[..., Any]:
        def played(_params: Any, state: Any, *_arguments: Any) -> Any:
            if isinstance(program, AdmitProgram | CatchUpProgram):
                return state
            return next(self._steps)._replace(state=state)

        return played


def replay(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int, rounds: int
) -> tuple[Load, list[Load]]:
    """A recorded pass, and the same one replayed `rounds` times. The engine must be idle, without prefix cache, and not adaptive:
    then the same requests take the same steps."""
    programs = engine.runner.programs
    recorder: Any = Recorder(programs)
    engine.runner.programs = recorder
    recorded, played = run(engine, prompts, params, concurrency), []
    for _ in range(rounds):
        player: Any = Player(recorder.steps)
        engine.runner.programs = player
        played.append(run(engine, prompts, params, concurrency))
    engine.runner.programs = programs
    if any(each.tokens != recorded.tokens for each in played):
        raise AssertionError("the replay took other steps than the recorded pass")
    return recorded, played
