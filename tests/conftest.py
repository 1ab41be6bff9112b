"""Shared by all tests: programs that several tests compile are compiled once per run."""

import os
from collections.abc import Iterator

import pytest

from tests.live_server import LiveServer, running_server

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each a few times: optimizing them would cost twice the time that it saves.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-clients", action="store_true", help="a missing browser or client library fails its tests")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    os.environ["JAXSPEC_COMPILATION_CACHE"] = str(tmp_path_factory.mktemp("programs"))
    from jaxspec.engine.program_cache import enable_compilation_cache

    enable_compilation_cache()


@pytest.fixture(scope="session")
def live_server(compilation_cache, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server process on the built-in model: one for all tests, as it compiles for a minute."""
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def gpu_compiler() -> Iterator[None]:
    """Skips the test, with the reason, where XLA's GPU compiler is missing. The flag above is not for GPUs: it is taken away."""
    from jaxspec.gpu_program.compiled import why_not

    if reason := why_not("h100"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        yield
