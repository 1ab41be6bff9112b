"""Compiling ahead: what is counted, what was found in JAX's cache, and that nothing compiles afterwards; what is said meanwhile."""

import io
import logging
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxspec.engine.programs import INTERVAL, AdmitProgram, Compilation, CompilingProgress, PrefillProgram, Programs
from jaxspec.spec.cycle import CycleOptions

pytestmark = pytest.mark.compiles

ADMIT, CHUNK = AdmitProgram(), PrefillProgram(4, 1)


class TwoPrograms(Programs):
    """Two small functions in place of the model's."""

    def __init__(self, factor: float):
        super().__init__(lambda params: params, {"w": jnp.ones(8)}, jnp.zeros((8, 8)), CycleOptions(None, None))
        self._factor = factor

    def _define(self, program):
        power = 1 if program == ADMIT else 2
        return lambda params, state, x: jnp.tanh(state * self._factor) + params["w"] * x**power, (jnp.ones(8),)


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    """JAX's cache, empty, and taking everything in."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def test_each_is_compiled_once_and_the_next_process_finds_it():
    first, second = TwoPrograms(3.0), TwoPrograms(3.0)
    for programs in (first, second):
        programs.compile_all([ADMIT, CHUNK])
        jax.clear_caches()
    assert {program: done.from_cache for program, done in first.compilations.items()} == {ADMIT: False, CHUNK: False}
    assert {program: done.from_cache for program, done in second.compilations.items()} == {ADMIT: True, CHUNK: True}
    assert all(done.seconds > 0 for done in first.compilations.values())
    assert first.temporary_bytes(CHUNK) >= 0


def test_a_hit_counts_for_its_own_program():
    TwoPrograms(5.0).compile_all([ADMIT])
    jax.clear_caches()
    programs = TwoPrograms(5.0)
    programs.compile_all([CHUNK, ADMIT])
    assert programs.compilations[ADMIT].from_cache and not programs.compilations[CHUNK].from_cache


def test_what_is_compiled_already_is_not_compiled_again():
    programs = TwoPrograms(7.0)
    compiled = programs[ADMIT]
    assert isinstance(programs.compilations[ADMIT], Compilation)
    programs.compile_all([ADMIT, CHUNK])
    assert programs[ADMIT] is compiled and len(programs.compilations) == 2


def test_a_sealed_set_compiles_nothing():
    programs = TwoPrograms(9.0)
    programs.compile_all([ADMIT])
    programs.seal()
    programs[ADMIT]
    with pytest.raises(RuntimeError, match=r"program \(prefill 4 tokens, 1 pages\) was not compiled ahead; compiled: admit"):
        programs[CHUNK]


def test_after_a_failure_the_rest_is_not_compiled():
    """SIGTERM is such a failure: nobody wants to wait for a hundred programs then."""

    class Broken(TwoPrograms):
        started = 0

        def _define(self, program):
            self.started += 1
            if program == ADMIT:
                raise SystemExit(0)
            time.sleep(0.05)
            return super()._define(program)

    programs = Broken(1.0)
    with pytest.raises(SystemExit):
        programs.compile_all([ADMIT, *(PrefillProgram(number, 1) for number in range(100))])
    assert programs.started < 50


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(shown: bool, seconds: float, programs: int = 4) -> None:
    now = iter(range(1000))
    with CompilingProgress(programs, shown=shown, clock=lambda: seconds * next(now)) as progress:
        for number in range(programs):
            progress.add(from_cache=number == 1)


def test_a_log_gets_a_line_now_and_then_and_none_at_the_end(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown=True, seconds=INTERVAL)
        assert [record.message for record in caplog.records] == [
            "1 of 4 programs are ready, about 90 s left",
            "2 of 4 programs are ready, about 60 s left",
            "3 of 4 programs are ready, about 30 s left",
        ]
        caplog.clear()
        run(shown=True, seconds=INTERVAL / 3, programs=9)
        assert len(caplog.records) == 2


@pytest.mark.parametrize(("shown", "seconds"), [(False, INTERVAL), (True, 0.1)])
def test_nothing_is_said_of_what_is_quick_or_not_asked_for(
    shown: bool, seconds: float, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown, seconds)
    assert not caplog.records and capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_an_estimate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown=True, seconds=INTERVAL)
    assert "compiling: 0 of 4 programs |" in terminal.getvalue() and "about ? left" in terminal.getvalue()
    assert not caplog.records
