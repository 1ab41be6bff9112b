"""Shared by all tests: what is compiled once is not compiled again, neither in this process nor in the next run."""

import asyncio
import gc
import inspect
import os
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist import is_xdist_worker
from xdist.scheduler import LoadScopeScheduling

from tests.live_server import LiveServer, running_server, wait_for_programs
from tests.sets import SETS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens there: tests that download run a Hub of their own
QUICK_COMPILER = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
"""Most tests compile many small programs and run each a few times: optimizing them would cost twice the time that it saves.
(A module per program, as the other worker has the other core.)"""
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILER}"

settings.register_profile("a busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("a busy machine")  # how fast examples come says nothing of what they test

CACHE_BYTES = 4 << 30
"""The oldest programs beyond this are removed at the start. (JAX's own bound reads the whole directory for each new program.)"""


MAPPINGS = Path("/proc/self/maps")
"""One line per mapping of this process, on Linux."""
MOST_MAPPINGS = 20_000

TESTS = Path(__file__).parent
STARTED = time.monotonic()
LEFT_OUT = pytest.StashKey[Counter]()
"""How many tests of each set were not asked for."""
ON_LIVE_SERVER = ("tests/clients/", "tests/browser/test_page.py")
"""They share one server, so one worker runs them."""
SLOW = (
    "browser/test_page.py",
    "engine/test_coupled_drafts.py",
    "benchmarks/test_gpu.py",
    "planner/test_gpu_program.py",
    "test_notebook.py",
    "checkpoints/test_smollm2.py",
    "server/test_launch.py",
    "pallas_kernels/test_compiled_for_gpus.py",
    "train/test_gpu_step.py",
    "planner/test_compile.py",
    "engine/test_equality.py",
    "train/test_head.py",
    "test_llm.py",
    "engine/test_engine.py",
    "server/test_real_engine.py",
    "engine/test_in_two.py",
    "decoding/test_extend.py",
    "engine/test_request_trees.py",
    "decoding/test_drafter.py",
    "decoding/test_block_drafter.py",
    "pallas_kernels/test_tree_attention.py",
    "test_placement.py",
    "decoding/test_distribution.py",
    "decoding/test_coupling.py",
    "commands/test_check_lossless.py",
    "engine/test_fault_run.py",
    "test_python_api.py",
    "engine/test_kv_cache_dtype.py",
    "engine/test_start.py",
    "checkpoints/test_storing.py",
    "train/test_training.py",
    "train/test_reference.py",
    "train/test_conversations.py",
    "models/test_weight.py",
    "models/test_heads.py",
    "decoding/test_reference_trace.py",
    "pallas_kernels/test_cutoff.py",
    "pallas_kernels/test_quantized.py",
    "pallas_kernels/test_rotate_qkv.py",
    "checkpoints/test_quantization.py",
    "checkpoints/test_hostile_files.py",
    "checkpoints/test_gguf_file.py",
    "engine/test_prefill_groups.py",
    "grammar/test_structured_text.py",
    "engine/test_trees.py",
    "engine/test_sampling_kinds.py",
    "models/test_feed_forward.py",
    "benchmarks/test_speculative.py",
    "benchmarks/test_peers.py",
    "commands/test_serve_loading.py",
)
"""They run first: a worker that began one of them last would still be at it when the others have nothing left to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-clients", action="store_true", help="a missing browser or client library fails its tests")
    parser.addoption("--exhaustive-minutes", type=float, help="exhaustive tests that would begin later than this are skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept between runs; the processes that tests start share them."""
    directory = Path(os.environ.setdefault("JAXSPEC_COMPILATION_CACHE", str(config.rootpath / ".pytest_cache/programs")))
    directory.mkdir(parents=True, exist_ok=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        remove_oldest(directory, CACHE_BYTES)
    config.stash[LEFT_OUT] = Counter()


def remove_oldest(directory: Path, most: int) -> None:
    """Keeps the newest files, up to `most` bytes."""
    kept = 0
    for file in sorted((file for file in directory.rglob("*") if file.is_file()), key=lambda file: -file.stat().st_mtime):
        kept += file.stat().st_size
        if kept > most:
            file.unlink()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Puts slow files first, marks clients, browser and what compiles for GPUs, lets -m choose, and counts what it left out."""
    places = {str(TESTS / name): place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))
    for item in items:
        folder = item.path.parent.name
        if folder in ("clients", "browser"):
            item.add_marker(folder)
        if "gpu_compiler" in item.fixturenames:
            item.add_marker("gpu_compiler")
        if item.get_closest_marker("exhaustive"):  # a case of a test whose other cases may be variants
            item.own_markers = [mark for mark in item.own_markers if mark.name != "variants"]
    before = of_sets(items)
    yield
    config.stash[LEFT_OUT] = before - of_sets(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported and collected stays: Python need not look through it again for garbage.

    Tracing programs makes many objects that live on. With Python's own thresholds that led to hundreds of collections over all
    that a session holds, a fifth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def of_sets(items: list[pytest.Item]) -> Counter[str]:
    """How many of the tests belong to each of the sets."""
    return Counter(name for item in items for name in SETS if item.get_closest_marker(name))


class ByFile(LoadScopeScheduling):
    """A file's tests run in one worker, as its fixtures are expensive; so do all tests on the live server."""

    def _split_scope(self, nodeid: str) -> str:
        return "live server" if nodeid.startswith(ON_LIVE_SERVER) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> ByFile:
    config.option.loadscopereorder = False  # files with the most tests would come first, and slow ones that have few tests last
    return ByFile(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_xdist_worker(session):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Every worker collects all tests, so any worker knows."""
    if error is None:
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, count in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"left out: {count} tests marked {name}; to run them: python -m pytest -m {name}")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    from jaxspec.engine.program_cache import enable_compilation_cache

    enable_compilation_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), 60))
    return True


class SharedPrograms:
    """Engines of one process share what they compile: programs take weights and state as arguments, so equal ones are the same."""

    def __init__(self) -> None:
        self.is_on = True
        self.compiled: dict[Hashable, object] = {}

    def instead_of(self, compile_one):
        """In place of Programs._compile."""

        def shared(programs, program):
            if not self.is_on:
                return compile_one(programs, program)
            identity = programs.identity(program)
            if identity not in self.compiled:
                self.compiled[identity] = compile_one(programs, program)
            return self.compiled[identity]

        return shared


SHARED_PROGRAMS = SharedPrograms()


@pytest.fixture(scope="session", autouse=True)
def shared_programs(compilation_cache) -> Iterator[None]:
    from jaxspec.engine.programs import Programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compile", SHARED_PROGRAMS.instead_of(Programs._compile))
        yield


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test's module
def pytest_runtest_setup(item: pytest.Item) -> None:
    SHARED_PROGRAMS.is_on = item.get_closest_marker("compiles") is None
    minutes = item.config.getoption("--exhaustive-minutes")
    if minutes is not None and item.get_closest_marker("exhaustive") and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes: python -m pytest -m exhaustive runs it")


@pytest.hookimpl
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Each compiled program holds mappings of memory; LLVM crashes at the kernel's limit, 65,530 for a process. To count them takes
    a while: it is done after each module, and after large tests."""
    is_large = item.get_closest_marker("exhaustive") or item.get_closest_marker("variants")
    if not is_large and nextitem is not None and nextitem.path == item.path:
        return
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        SHARED_PROGRAMS.compiled.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def live_server(compilation_cache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server process on the built-in model: one for all tests, as it compiles for half a minute."""
    with running_server(tmp_path_factory.mktemp("server")) as server:
        wait_for_programs(server)
        yield server


@pytest.fixture(scope="module")
def gpu_compiler() -> Iterator[None]:
    """Skips the test, with the reason, where XLA's GPU compiler is missing. The flag above is not for GPUs: it is taken away."""
    from jaxspec.planner.compile import why_not

    if reason := why_not("h100"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        yield
