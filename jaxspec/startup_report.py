"""What the log says of a model that is ready: where its memory goes, and how its programs came to be."""

from collections.abc import Iterable, Mapping

import jax

from jaxspec.config import SpecConfig
from jaxspec.engine.programs import AdmitProgram, CatchUpProgram, Compilation, CycleProgram, PrefillProgram, Program
from jaxspec.llm import LLM

SLOWEST = 3
"""Programs that are named."""


def memory_table(llm: LLM) -> str:
    """What weights, cache and programs take, one line each, and of how much.

    Out:   target weights   24.1 MB
           head weights      3.3 MB
           cache            92.3 MB  8192 tokens in 512 pages
           ...
           in all          139.0 MB  of 68.2 GB
    """
    runner, stats = llm.engine.runner, llm.engine.stats()
    state = runner.state
    temporaries = {program: runner.programs.temporary_bytes(program) for program in largest(runner.programs.compilations)}
    rows = [
        ("target weights", _bytes(runner.params["target"]), ""),
        ("head weights", _bytes(runner.params["head"]), ""),
        ("cache", _bytes(state.caches), f"{stats.total_pages * stats.page_size} tokens in {stats.total_pages} pages"),
        ("requests", _bytes(state) - _bytes(state.caches), f"{llm.engine.config.max_running_requests} at a time"),
    ]
    program = max(temporaries, key=lambda program: temporaries[program])
    rows.append(("temporaries", temporaries[program], f"of the largest program: {program}"))
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    total = sum(size for _, size, _ in rows)
    rows.append(("in all", total, f"of {readable(limit)}, {100 * total / limit:.0f}%" if limit else ""))
    return "\n".join(f"  {name:<15}{readable(size):>10}  {note}".rstrip() for name, size, note in rows if size)


def largest(programs: Iterable[Program]) -> list[Program]:
    """Of each kind and tree the program with the largest sizes; which of these needs the most memory, only the compiler knows.

    In:  cycle 5/4/8, batch 1, 16 pages; cycle 5/4/8, batch 8, 64 pages; prefill 64 tokens, 64 pages; admit
    Out: cycle 5/4/8, batch 8, 64 pages; prefill 64 tokens, 64 pages; admit
    """
    found: dict[tuple[type, SpecConfig | None], Program] = {}
    for program in programs:
        kind = type(program), program.spec if isinstance(program, CycleProgram) else None
        found[kind] = max(program, found.get(kind, program), key=_sizes)
    return list(found.values())


def programs_line(compilations: Mapping[Program, Compilation], seconds: float) -> str:
    """How many programs there are, from where, and which took long.

    Out: 39 programs are ready after 61.3 s: 0 from the compilation cache, 39 compiled (slowest: cycle 5/4/8, batch 8, ... 9.1 s)
    """
    compiled = {program: done.seconds for program, done in compilations.items() if not done.from_cache}
    slowest = sorted(compiled, key=lambda program: -compiled[program])[:SLOWEST]
    named = f" (slowest: {'; '.join(f'{program}: {compiled[program]:.1f} s' for program in slowest)})" if slowest else ""
    found = len(compilations) - len(compiled)
    return (
        f"{len(compilations)} programs are ready after {seconds:.1f} s: "
        f"{found} from the compilation cache, {len(compiled)} compiled{named}"
    )


def readable(size: int) -> str:
    """Bytes for people.

    In:  24_100_000
    Out: 24.1 MB
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _sizes(program: Program) -> tuple[int, int]:
    match program:
        case CycleProgram(batch, pages) | CatchUpProgram(batch, pages):
            return batch, pages
        case PrefillProgram(chunk, pages):
            return chunk, pages
        case AdmitProgram():
            return 0, 0


def _bytes(arrays: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
