"""The lines about memory and programs."""

import jax
import pytest

from jaxspec.config import SpecConfig
from jaxspec.engine.programs import AdmitProgram, Compilation, CycleProgram, PrefillProgram
from jaxspec.llm import LLM
from jaxspec.startup_report import memory_table, programs_line, readable
from jaxspec.testing import tiny_target, write_target

CYCLE = CycleProgram(1, 16, SpecConfig(num_steps=0))
MADE = {
    AdmitProgram(): Compilation(0.5, from_cache=False, temporary_bytes=10),
    CYCLE: Compilation(9.25, from_cache=False, temporary_bytes=3_000_000),
    PrefillProgram(16, 16): Compilation(0.2, from_cache=True, temporary_bytes=2_000_000),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(write_target(tmp_path_factory.mktemp("models") / "tiny", tiny_target()), num_pages=50, max_running_requests=3)


def megabytes(line: str) -> float:
    name, size, unit = line[:17].strip(), *line[17:].split()[:2]
    assert name and unit == "MB"
    return float(size)


def test_the_parts_are_what_the_arrays_take_and_add_up(llm: LLM):
    llm.engine.runner.programs.compilations.clear()
    llm.engine.runner.programs.compilations.update(MADE)
    target, cache, requests, temporaries, total = memory_table(llm).splitlines()  # no head, no line
    nbytes = sum(array.nbytes for array in jax.tree.leaves((llm.engine.runner.params, llm.engine.runner.state)))
    assert megabytes(total) == pytest.approx(nbytes / 1e6 + 3.0, abs=0.051)
    assert megabytes(total) == pytest.approx(sum(map(megabytes, (target, cache, requests, temporaries))), abs=0.21)
    assert target.startswith("  target weights") and cache.endswith("800 tokens in 50 pages") and requests.endswith("3 at a time")
    assert temporaries.endswith(f"of the largest program: {CYCLE}")


def test_the_share_of_the_device_if_it_tells(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 2 * 10**9}

    assert " of " not in memory_table(llm).splitlines()[-1]
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert memory_table(llm).splitlines()[-1].endswith("of 2.0 GB, 0%")


def test_programs_are_counted_and_the_slowest_named():
    assert programs_line(MADE, 9.84) == (
        "3 programs are ready after 9.8 s: 1 from the compilation cache, 2 compiled "
        "(slowest: cycle 0/1/1, batch 1, 16 pages: 9.2 s; admit: 0.5 s)"
    )
    found = {PrefillProgram(16, 16): MADE[PrefillProgram(16, 16)]}
    assert programs_line(found, 1) == "1 programs are ready after 1.0 s: 1 from the compilation cache, 0 compiled"


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MB"), (24_140_000, "24.1 MB"), (1_000_000_000, "1.0 GB")])
def test_bytes_for_people(size: int, text: str):
    assert readable(size) == text
