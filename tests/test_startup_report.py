"""The lines about memory and programs."""

import jax
import pytest

from jaxspec.config import SpecConfig
from jaxspec.engine.programs import AdmitProgram, CatchUpProgram, Compilation, CycleProgram, PrefillProgram
from jaxspec.llm import LLM
from jaxspec.startup_report import largest, memory_table, programs_line, readable
from jaxspec.testing import tiny_target, write_target

TREE, PLAIN = SpecConfig(2, 1), SpecConfig(num_steps=0)
CYCLE = CycleProgram(1, 16, PLAIN)
MADE = {
    AdmitProgram(): Compilation(0.5, from_cache=False),
    CYCLE: Compilation(9.25, from_cache=False),
    PrefillProgram(16, 16): Compilation(0.2, from_cache=True),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(write_target(tmp_path_factory.mktemp("models") / "tiny", tiny_target()), num_pages=50, max_running_requests=3)


def megabytes(line: str) -> float:
    name, size, unit = line[:17].strip(), *line[17:].split()[:2]
    assert name and unit == "MB"
    return float(size)


@pytest.fixture(autouse=True)
def programs(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Those of MADE, of which the last but one takes the most memory."""
    programs = llm.engine.runner.programs
    monkeypatch.setattr(programs, "compilations", MADE)
    monkeypatch.setattr(programs, "temporary_bytes", {program: 1_000_000 * (1 + (program == CYCLE)) for program in MADE}.get)


def test_the_parts_are_what_the_arrays_take_and_add_up(llm: LLM):
    target, cache, requests, temporaries, total = memory_table(llm).splitlines()  # no head, no line
    nbytes = sum(array.nbytes for array in jax.tree.leaves((llm.engine.runner.params, llm.engine.runner.state)))
    assert megabytes(total) == pytest.approx(nbytes / 1e6 + 2.0, abs=0.051)
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


def test_only_the_largest_of_a_kind_are_looked_at():
    cycles = [CycleProgram(batch, pages, tree) for tree in (TREE, PLAIN) for batch in (1, 8, 4) for pages in (64, 16)]
    prefills = [PrefillProgram(chunk, pages) for chunk in (16, 256, 64) for pages in (16, 64)]
    others = [CatchUpProgram(2, 64), CatchUpProgram(8, 64), AdmitProgram()]
    expected = {CycleProgram(8, 64, TREE), CycleProgram(8, 64, PLAIN), PrefillProgram(256, 64), *others[1:]}
    assert set(largest([*cycles, *prefills, *others])) == expected


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MB"), (24_140_000, "24.1 MB"), (1_000_000_000, "1.0 GB")])
def test_bytes_for_people(size: int, text: str):
    assert readable(size) == text
