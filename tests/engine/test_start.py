"""The start: programs are compiled first, their temporaries decide how many pages fit, and each runs once before it is needed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.decoding.programs import AdmitProgram, CatchUpProgram, CycleProgram, MaskProgram, PrefillProgram, Program
from jaxspec.decoding.state import State
from jaxspec.engine.device import addressable_pages, memory_limit
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import MARGIN, CacheSize, DeviceMemory
from jaxspec.engine.programs import ProgramError, Programs
from jaxspec.engine.request import GenerationRequest
from jaxspec.engine.runner import Start
from jaxspec.host_memory import own_memory
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import random_eagle, tiny_engine, tiny_target
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served

GB = 10**9
CACHE = CacheSize(page_bytes=2**20, page_size=16, pages_per_sequence=512, sequences=8)
MEMORY = DeviceMemory(limit=8 * GB, weights=4 * GB, rows=10**7)


class Compiled:
    """Programs that take these temporaries."""

    def __init__(self, temporaries: int):
        self.temporaries, self.asked = temporaries, list[int]()

    def __call__(self, num_pages: int) -> "Compiled":
        self.asked.append(num_pages)
        return self

    def most_temporaries(self) -> tuple[int, str]:
        return self.temporaries, "cycle 5/8/64, batch 8"


def test_programs_whose_temporaries_fit_are_compiled_once():
    compiled = Compiled(temporaries=GB // 2)
    pages, programs = MEMORY.fit(CACHE, 0.85, compiled)
    assert compiled.asked == [pages] and programs is compiled
    assert pages == int(8 * GB * 0.85 - MEMORY.weights - MEMORY.rows) // CACHE.page_bytes


def test_the_cache_shrinks_by_what_temporaries_take():
    compiled = Compiled(temporaries=2 * GB)
    pages, _ = MEMORY.fit(CACHE, 0.85, compiled)
    taken = MEMORY.weights + MEMORY.rows + 2 * GB + pages * CACHE.page_bytes
    assert compiled.asked[1:] == [pages] and compiled.asked[0] > pages
    assert 0 <= MEMORY.limit * (1 - MARGIN) - taken < CACHE.page_bytes


def test_no_more_pages_than_all_sequences_need():
    assert MEMORY.fit(replace(CACHE, sequences=1), 0.85, Compiled(0))[0] == 512


def test_no_more_pages_of_an_8_bit_cache_than_kernels_can_address():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target, draft, flags = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (((1, 16, 8, 128), jnp.uint8), ((1, 16, 2, 64), jnp.uint8), ((9, 10**6), jnp.bool))
    )
    assert addressable_pages([target, draft, flags]) == 2**31 // (16 * 8 * 128)
    assert addressable_pages([flags]) == math.inf
    assert MEMORY.fit(replace(CACHE, most_pages=600), 0.85, Compiled(0))[0] == 600


@pytest.mark.parametrize(
    ("memory", "temporaries", "message"),
    [
        (
            replace(MEMORY, weights=13 * GB // 2),
            0,
            "the cache has room for 4416 tokens, but one sequence may have 8192: of 8.0 GB, weights take 6.5 GB, requests 10.0 MB, "
            "and mem_fraction 0.85 leaves 1.2 GB for temporaries; lower context_length, or raise mem_fraction",
        ),
        (
            MEMORY,
            7 * GB // 2,
            "the cache has room for 3808 tokens, but one sequence may have 8192: of 8.0 GB, weights take 4.0 GB, requests 10.0 MB, "
            "and temporaries 3.5 GB (cycle 5/8/64, batch 8); lower context_length, max_running_requests, prefill_chunk "
            "or the size of the tree",
        ),
        (replace(MEMORY, weights=9 * GB), 0, "the cache has room for 0 tokens"),
        (replace(MEMORY, rows=9 * GB), 0, "; lower max_running_requests, or raise mem_fraction"),
    ],
)
def test_too_little_memory_is_refused_with_its_parts(memory, temporaries, message):
    with pytest.raises(ValueError) as refused:
        memory.fit(CACHE, 0.85, Compiled(temporaries))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.variants
def test_an_engine_compiles_first_and_then_allocates_what_fits():
    usual = tiny_engine(PLAIN)
    shapes, pages, first = usual.runner.programs.state, usual.runner.num_pages, usual.runner.table.first()
    usual.runner.programs.compile_all(first)
    nbytes, (temporaries, largest) = usual.runner.placement.nbytes, usual.runner.programs.most_temporaries()
    page_bytes = nbytes(shapes.cache) // pages
    limit = nbytes(usual.runner.params) + nbytes(shapes) + temporaries - 20 * page_bytes  # 20 pages too little

    engine = tiny_engine(PLAIN, start=Start(memory_limit=limit), mem_fraction=1.0)
    programs, fitting = engine.runner.programs, engine.runner.num_pages
    assert set(programs.compilations) == set(first) and programs.most_temporaries() == (temporaries, largest)
    assert engine.pages.num_pages == engine.stats().total_pages == fitting
    missing = (pages - 20 - fitting) * page_bytes - limit * MARGIN
    assert 0 <= missing < page_bytes, "as many pages as fit beside the temporaries and the margin"

    cache = programs.state.cache[0].k.shape
    assert not any(array.shape == cache for array in jax.live_arrays()), "allocated before it is needed"
    texts = []
    for each in (usual, engine):
        (request,) = served(each, GenerationRequest([3, 1, 4, 1, 5], SamplingParams(max_tokens=20)))
        texts.append(tuple(request.output))
    assert texts[0] == texts[1] and engine.runner.state.cache[0].k.shape == cache


def test_memory_that_is_too_small_for_the_engine():
    with pytest.raises(ValueError, match=r"one sequence may have 256: of 0\.1 MB, weights take .* lower context_length"):
        tiny_engine(start=Start(memory_limit=100_000))
    assert tiny_engine(start=Start(memory_limit=100_000), num_pages=70).runner.num_pages == 70, "given, so not questioned"


@pytest.fixture
def host(monkeypatch) -> Callable[[int], None]:
    """Sets the memory that is available beside this process."""

    def has(available: int) -> None:
        monkeypatch.setattr("jaxspec.engine.memory.available_memory", lambda: available)
        monkeypatch.setattr("jaxspec.engine.memory.own_memory", lambda: 0)

    return has


def test_a_cpus_cache_takes_its_share_of_what_is_available(host):
    small: dict[str, Any] = {"target": tiny_target(num_layers=1), "mem_fraction": 0.5}
    host(1 << 40)
    usual = tiny_engine(PLAIN, **small).runner
    page, state = usual.cache_bytes // usual.num_pages, usual.programs.state
    taken = usual.placement.nbytes((usual.params, state)) - usual.cache_bytes
    assert usual.num_pages == 2 * 256 // 4, "no more than two requests of 256 tokens can use"
    for pages in (64, 80, 112):
        host(2 * (taken + pages * page))
        assert tiny_engine(PLAIN, **small).runner.num_pages == pages
    host(2 * (taken + 63 * page))
    with pytest.raises(ValueError, match=r"room for 252 tokens, but one sequence may have 256: .*, or raise mem_fraction"):
        tiny_engine(PLAIN, **small)
    assert tiny_engine(PLAIN, **small, num_pages=70).runner.num_pages == 70, "given, so not questioned"


def test_loaded_weights_are_counted_once(monkeypatch):
    """They are no longer available, so they are part of what there is; mapped files are available still."""
    monkeypatch.setattr("jaxspec.engine.memory.available_memory", lambda: 5 * GB)
    for own, limit in ((4 * GB, 8 * GB), (GB, 6 * GB), (3 * GB, 8 * GB)):
        monkeypatch.setattr("jaxspec.engine.memory.own_memory", lambda own=own: own)
        assert DeviceMemory.of_host(3 * GB, 10**7) == DeviceMemory(limit, 3 * GB, 10**7)


@given(room=st.integers(512, 5000), sequences=st.integers(1, 8))
def test_starts_that_find_about_as_much_memory_have_the_same_programs(room, sequences):
    cache = replace(CACHE, sequences=sequences)
    planned, full = min(room, sequences * 512), sequences * 512
    pages = DeviceMemory(room * CACHE.page_bytes, 0, 0).steady_pages(cache, 1.0)
    assert max(512, planned * 8 / 9) <= pages <= planned
    assert pages == full or pages == 512 or pages in {2**power * part // 8 for power in range(9, 14) for part in range(8, 16)}


@pytest.mark.variants
def test_pages_take_no_memory_before_they_are_used():
    """At the start, in the first runs and while a request runs."""
    before = own_memory()
    engine = tiny_engine(PLAIN, target=tiny_target(num_layers=1), num_pages=1 << 21)
    engine.warm_up()
    (request,) = served(engine, GenerationRequest([3, 1, 4, 1, 5], SamplingParams(max_tokens=20)))
    assert len(request.output) == 20 and engine.runner.cache_bytes >= 1 << 30
    assert own_memory() - before < engine.runner.cache_bytes / 4


class Device:
    def __init__(self, platform: str, stats: dict[str, int] | None):
        self.platform, self._stats = platform, stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_what_the_device_says_of_its_memory():
    assert memory_limit(Device("gpu", {"bytes_limit": 64 * GB})) == 64 * GB
    assert memory_limit(Device("cpu", None)) is None
    for stats in (None, {}):  # what allocators without a limit say
        with pytest.raises(ValueError, match=r"the gpu does not tell .* XLA_PYTHON_CLIENT_ALLOCATOR=platform: unset that, or give"):
            memory_limit(Device("gpu", stats))


@pytest.fixture(scope="module")
def every_kind() -> Engine:
    """An engine with each kind of program, warmed up."""
    small = tiny_target(num_layers=2)
    engine = tiny_engine(TreeShape(1, 2, 2), target=small, head=random_eagle(small.config), request_trees=(PLAIN,), page_size=32)
    engine.warm_up()
    return engine


@pytest.mark.variants
def test_first_runs_change_nothing_but_the_padding_row(every_kind, monkeypatch):
    runner, ran, get = every_kind.runner, list[Program](), Programs.__getitem__
    assert {type(program) for program in runner.programs.compilations} == {
        AdmitProgram, CatchUpProgram, CycleProgram, MaskProgram, PrefillProgram
    }  # fmt: skip
    runner.reset()
    expected = jax.tree.map(np.array, runner.state)
    monkeypatch.setattr(Programs, "__getitem__", lambda programs, program: ran.append(program) or get(programs, program))
    runner.run_once()
    assert ran == list(runner.programs.compilations)
    found: State = jax.tree.map(np.array, runner.state)
    for before, after in zip(*(jax.tree.leaves((state.cache, state.draft.cache)) for state in (expected, found)), strict=True):
        np.testing.assert_array_equal(after, before)
    assert (found.draft.calibration.weights == expected.draft.calibration.weights).all()
    by_row = (state._replace(cache=None, draft=state.draft.hidden) for state in (expected, found))
    for before, after in zip(*map(jax.tree.leaves, by_row), strict=True):
        np.testing.assert_array_equal(after[:-1], before[:-1])  # the last row is the padding row
    assert runner.state.sequences.done.all()


@pytest.mark.variants
def test_first_runs_change_no_text(every_kind):
    """Between two requests, and in the middle of one."""
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=4)
    texts = []
    for interrupts in (False, True):
        every_kind.flush_cache()
        asked = (GenerationRequest([3, 1, 4, 1, 5][:size], params, tree=tree) for size, tree in ((5, None), (3, PLAIN)))
        requests = [every_kind.add(each) for each in asked]
        for _ in range(100):
            every_kind.step()
            if interrupts:
                every_kind.runner.run_once()
        assert not every_kind.has_work
        texts.append([tuple(request.output) for request in requests])
    assert texts[0] == texts[1] and all(len(text) == 30 for text in texts[0])


class Faulty(Programs):
    """One kind of program fails when it runs, or when it is compiled."""

    kind: type
    at_compilation: bool

    def lower(self, program, platform=None):
        if self.at_compilation and isinstance(program, self.kind):
            raise RuntimeError("INTERNAL: ptxas failed\nwith many lines")
        return super().lower(program, platform)

    def __getitem__(self, program):
        compiled = super().__getitem__(program)

        def run(params, state, *others):
            for array in state.sequences:
                array.delete()
            raise RuntimeError("INTERNAL: an illegal memory access was encountered\nwith many lines")

        return run if isinstance(program, self.kind) and not self.at_compilation else compiled


@pytest.mark.parametrize("kind", [CycleProgram, PrefillProgram, AdmitProgram])
def test_a_program_that_fails_ends_the_start_with_its_name(kind):
    engine = tiny_engine(PLAIN)
    engine.runner.programs.__class__, engine.runner.programs.kind = Faulty, kind
    engine.runner.programs.at_compilation = False
    (program,) = (each for each in engine.runner.table.first() if isinstance(each, kind))
    with pytest.raises(ProgramError) as failed:
        engine.warm_up()
    assert str(failed.value) == (
        f"the program ({program}) failed on its first run: RuntimeError: INTERNAL: an illegal memory access was encountered"
    )
    engine.runner.programs.__class__ = Programs
    engine.warm_up()  # with a new state
    asked = GenerationRequest([1, 2, 3, *range(40)], SamplingParams(max_tokens=4, temperature=0))
    before = [request.output for request in served(engine, asked)]
    engine.runner.programs.__class__ = Faulty
    with pytest.raises(ProgramError):
        engine.warm_up()
    engine.runner.programs.__class__ = Programs
    (request,) = served(engine, asked)
    assert (request.cached_tokens, [request.output]) == (0, before), "cached pages went with the state"
    assert len(request.output) == 4


@pytest.mark.compiles
def test_a_program_that_can_not_be_compiled_ends_the_start_with_its_name():
    engine = tiny_engine(PLAIN)
    engine.runner.programs.__class__, engine.runner.programs.kind = Faulty, AdmitProgram
    engine.runner.programs.at_compilation = True
    with pytest.raises(ProgramError, match=r"^the program \(admit\) could not be compiled: RuntimeError: INTERNAL: ptxas failed$"):
        engine.runner.programs.compile_all([AdmitProgram()])


def test_a_cache_that_can_not_be_allocated_is_refused(monkeypatch):
    engine = tiny_engine(PLAIN)

    def no_memory():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nwith many lines")

    monkeypatch.setattr(engine.runner, "_new_state", no_memory)
    with pytest.raises(ValueError, match=r"^the cache can't be allocated \(128 pages; RESOURCE_EXHAUSTED: out of memory\): lower "):
        engine.runner.run_once()
