"""Compiling ahead: what is counted, what was found in JAX's cache, and that nothing compiles afterwards."""

import atexit
import gc
import logging
import pickle
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding.programs import AdmitProgram, PrefillProgram
from jaxspec.engine.programs import Compilation, ProgramError, Programs
from jaxspec.placement import GPU_COMPILER_OPTIONS, UNTIMED

pytestmark = pytest.mark.compiles

ADMIT, CHUNK = AdmitProgram(), PrefillProgram(4, 1)


class TwoPrograms(Programs):
    """Two small functions in place of the model's."""

    def __init__(self, factor: float):
        super().__init__(lambda params: params, {"w": jnp.ones(8)}, jnp.zeros((8, 8)))
        self._factor = factor

    def _function(self, program):
        power = 1 if program == ADMIT else 2
        return lambda params, state, x: jnp.tanh(state * self._factor) + params["w"] * x**power

    def inputs(self, program):
        return (jnp.ones(8),)


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


@pytest.mark.variants
@pytest.mark.parametrize("before", [[ADMIT, CHUNK], [ADMIT]], ids=len)
def test_each_is_compiled_once_and_the_next_process_finds_it(before):
    """A hit counts for its own program."""
    first, second = TwoPrograms(3.0), TwoPrograms(3.0)
    first.compile_all(before)
    jax.clear_caches()
    second.compile_all([CHUNK, ADMIT])
    assert {program: done.from_cache for program, done in first.compilations.items()} == dict.fromkeys(before, False)
    assert {program: done.from_cache for program, done in second.compilations.items()} == {ADMIT: True, CHUNK: CHUNK in before}
    assert all(done.seconds > 0 for done in first.compilations.values())
    assert second.temporary_bytes(CHUNK) >= 0


def test_autotuning_is_kept_beside_the_programs(tmp_path):
    """XLA itself reads the directory, on a GPU; the options that JAX hands to XLA are nowhere else to be seen."""
    from jax._src.compiler import get_compile_options

    assert "xla_gpu_per_fusion_autotune_cache_dir" in jax.config.jax_persistent_cache_enable_xla_caches
    options = get_compile_options(num_replicas=1, num_partitions=1)
    assert options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir.startswith(str(tmp_path))


def test_what_is_compiled_already_is_not_compiled_again():
    programs = TwoPrograms(7.0)
    compiled = programs[ADMIT]
    assert isinstance(programs.compilations[ADMIT], Compilation)
    programs.compile_all([ADMIT, CHUNK])
    assert programs[ADMIT] is compiled and len(programs.compilations) == 2


def test_threads_that_compile_have_the_callers_precision(monkeypatch):
    seen = list[str | None]()
    lower = Programs.lower
    monkeypatch.setattr(Programs, "lower", lambda *these: seen.append(jax.config.jax_default_matmul_precision) or lower(*these))
    with jax.default_matmul_precision("highest"):
        TwoPrograms(5.0).compile_all([ADMIT, CHUNK])
    TwoPrograms(6.0).compile_all([ADMIT])
    assert seen == ["highest", "highest", None]


def test_a_sealed_set_compiles_nothing():
    programs = TwoPrograms(9.0)
    programs.compile_all([ADMIT])
    programs.seal()
    programs[ADMIT]
    with pytest.raises(RuntimeError, match=r"program \(prefill 4 tokens\) was not compiled ahead; compiled: admit"):
        programs[CHUNK]


def test_a_launch_takes_the_smallest_program_that_is_there_and_gets_a_smaller_one_for_the_next_time():
    programs = TwoPrograms(11.0)
    assert programs.choose([ADMIT, CHUNK]) == ADMIT  # it compiles at its first use
    programs.compile_all([CHUNK])
    programs.seal()
    assert programs.choose([ADMIT, CHUNK]) == CHUNK and not programs.can_launch(ADMIT)
    assert programs.count[:2] == (1, 1), "without a compiler nothing is asked for"
    programs.start_compiler()
    assert programs.choose([CHUNK]) == CHUNK and programs.count[:2] == (1, 1)
    assert programs.choose([ADMIT, CHUNK]) == CHUNK
    programs.wait()
    assert programs.choose([ADMIT, CHUNK]) == ADMIT and programs.count[:2] == (2, 2)


@pytest.mark.parametrize(
    ("backend", "options"), [("gpu", [GPU_COMPILER_OPTIONS, GPU_COMPILER_OPTIONS | UNTIMED]), ("cpu", [None, None])]
)
def test_only_gpus_get_the_compiler_options_of_gpus(monkeypatch, backend, options):
    """CPUs would take them too, but JAX's cache would no longer find what it has. Beside a cache nothing is timed."""
    given = []

    class Lowered:
        def compile(self, compiler_options):
            given.append(compiler_options)

    programs = TwoPrograms(1.0)
    monkeypatch.setattr(programs, "lower", lambda program: Lowered())
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    programs.compile_all([ADMIT])
    programs.may_time = False
    programs.compile_all([CHUNK])
    assert given == options


class Slow(TwoPrograms):
    """A compiler that waits until it may go on."""

    def __init__(self, factor: float):
        super().__init__(factor)
        self.started, self.may_go_on = threading.Event(), threading.Event()

    def _function(self, program):
        if threading.current_thread().name == "compiler":
            self.started.set()
            assert self.may_go_on.wait(60)
        return super()._function(program)


def test_no_launch_waits_for_the_compiler_and_nothing_is_asked_for_twice():
    programs = Slow(13.0)
    programs.compile_all([CHUNK])
    programs.seal()
    programs.start_compiler()
    for _ in range(3):
        assert programs.choose([ADMIT, CHUNK]) == CHUNK and programs[CHUNK] is not None
    assert programs.started.wait(60)
    assert programs.choose([ADMIT, CHUNK]) == CHUNK
    assert programs.count == (1, 2, None) and programs.is_compiling
    with pytest.raises(RuntimeError, match="was not compiled ahead"):
        programs[ADMIT]
    programs.may_go_on.set()
    programs.wait()
    assert programs.count[:2] == (2, 2) and not programs.is_compiling


def test_what_a_request_waits_for_compiles_before_what_would_make_others_faster():
    """Also if it was asked for before; it compiles once."""
    programs, others = Slow(19.0), [PrefillProgram(tokens, 1) for tokens in (2, 3)]
    programs.compile_all([CHUNK])
    programs.seal()
    programs.start_compiler()
    programs.ask_for(ADMIT)
    assert programs.started.wait(60)
    for program in others:
        programs.ask_for(program)
    programs.require(others[-1])
    programs.may_go_on.set()
    programs.wait()
    assert list(programs.compilations) == [CHUNK, ADMIT, *reversed(others)] and programs.count[:2] == (4, 4)


def test_what_was_asked_for_may_be_compiled_by_others():
    programs, other = Slow(23.0), PrefillProgram(2, 1)
    programs.compile_all([CHUNK])
    programs.seal()
    programs.start_compiler()
    programs.ask_for(ADMIT)
    assert programs.started.wait(60)
    programs.ask_for(other)
    programs.compile_all([other])
    programs.may_go_on.set()
    programs.wait()
    assert programs.count[:2] == (3, 3) and not programs.is_compiling


def test_the_compiler_ends_after_its_program_and_is_forgotten(monkeypatch):
    """Python's end alone waits for it."""
    at_exit: list[str] = []
    monkeypatch.setattr(atexit, "register", lambda function: at_exit.append(function.__name__))
    programs = Slow(29.0)
    programs.start_compiler()
    programs.is_sealed = True
    for program in (ADMIT, CHUNK):
        programs.ask_for(program)
    assert programs.started.wait(60)
    programs.stop()
    compiler, compiled, left = programs._compiler, programs.compilations, weakref.ref(programs)
    assert compiler.is_alive() and at_exit == ["join", "stop"]
    programs.may_go_on.set()
    del programs
    compiler.join(60)
    gc.collect()
    assert list(compiled) == [ADMIT] and left() is None


def test_a_program_that_fails_in_the_background_is_logged_once_and_the_next_goes_on(caplog):
    class Broken(TwoPrograms):
        def _function(self, program):
            if program == ADMIT:
                raise ValueError("no such kernel")
            return super()._function(program)

    programs, other = Broken(17.0), PrefillProgram(2, 1)
    programs.compile_all([CHUNK])
    programs.seal()
    programs.start_compiler()
    with caplog.at_level(logging.INFO, "jaxspec"):
        for _ in range(2):
            assert programs.choose([ADMIT, CHUNK]) == CHUNK
            programs.wait()
        programs.choose([other, CHUNK])
        programs.wait()
    failed, done = caplog.records
    assert failed.message == "could not compile (admit): a larger program stays in use, if there is one"
    assert failed.levelno == logging.ERROR
    assert done.message == "all 2 programs are ready, the last was (prefill 2 tokens)"
    assert programs.choose([ADMIT, CHUNK]) == CHUNK and programs.count[:2] == (2, 2)


def test_after_a_failure_the_rest_is_not_compiled():
    """SIGTERM is such a failure: nobody wants to wait for a hundred programs then."""

    class Broken(TwoPrograms):
        started = 0

        def _function(self, program):
            self.started += 1
            if program == ADMIT:
                raise SystemExit(0)
            time.sleep(0.05)
            return super()._function(program)

    programs = Broken(1.0)
    with pytest.raises(SystemExit):
        programs.compile_all([ADMIT, *(PrefillProgram(number, 1) for number in range(100))])
    assert programs.started < 50


def test_an_error_survives_the_way_out_of_a_process():
    """A pool of processes would hang on one that can't be unpickled."""
    error = ProgramError.of(ADMIT, "could not be compiled", ValueError("no such kernel"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ProgramError and str(copy) == "the program (admit) could not be compiled: ValueError: no such kernel"
