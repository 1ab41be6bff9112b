"""Shared by all tests: programs that several tests compile are compiled once per run."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each a few times: optimizing them would cost twice the time that it saves.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    os.environ["JAXSPEC_COMPILATION_CACHE"] = str(tmp_path_factory.mktemp("programs"))
    from jaxspec.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
