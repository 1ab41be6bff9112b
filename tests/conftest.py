"""Shared by all tests: programs that several tests compile are compiled once per run."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    os.environ["JAXSPEC_COMPILATION_CACHE"] = str(tmp_path_factory.mktemp("programs"))
    from jaxspec.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
