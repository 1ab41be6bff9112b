"""The GPU compiler, if it is installed."""

from collections.abc import Iterator

import pytest

from jaxspec.gpu_program.compiled import why_not


@pytest.fixture(scope="module")
def gpu_compiler() -> Iterator[None]:
    """Skips the test, with the reason, where nothing can be compiled for a GPU."""
    if reason := why_not("h100"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")  # the tests' own flag turns optimizations off, which is not what GPUs are to run
        yield
