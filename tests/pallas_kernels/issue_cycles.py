"""How many cycles a kernel's warps need to issue their instructions, counted from its PTX. (Not the time: nothing waits here.)"""

import re
from pathlib import Path
from typing import NamedTuple

SCHEDULERS, WARP = 4, 32
"""Warps that a multiprocessor issues from in a cycle, and threads of a warp."""
_LABEL, _INSTRUCTION = re.compile(r"(\$\w+):"), re.compile(r"(?:@!?%\w+\s+)?[a-z]\w*[.\w:]*(?:\s.*)?;")
_BRANCH, _THREADS = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);"), re.compile(r"\.(?:req|max)ntid (\d+)")


class Program(NamedTuple):
    """A kernel's instructions, as PTX has them."""

    instructions: int
    """All, each once."""
    loops: list[tuple[int, int]]
    """First and last instruction of each loop, in the order of the first; of two that begin together the inner one is first."""
    warps: int

    def cycles(self, rounds: list[int]) -> float:
        """Of one thread block, on its multiprocessor. `rounds`: of each loop; a loop that is not run has 0."""
        times = [1] * self.instructions
        for (first, last), count in zip(self.loops, rounds, strict=True):
            for place in range(first, last + 1):
                times[place] *= count
        return sum(times) * self.warps / SCHEDULERS


def read_programs(dump: Path) -> dict[str, Program]:
    """The kernels dumped by XLA with xla_dump_emitter_re, by name."""
    found = {}
    for file in dump.glob("*.ptx"):
        text = file.read_text()
        labels: dict[str, int] = {}
        loops, count = [], 0
        for line in map(str.strip, text[text.index(".entry") :].splitlines()):
            if label := _LABEL.match(line):
                labels[label[1]] = count
            elif _INSTRUCTION.fullmatch(line.split("//")[0].strip()):
                if (branch := _BRANCH.search(line)) and branch[1] in labels:
                    loops.append((labels[branch[1]], count))
                count += 1
        name, threads = re.search(r"\.entry (\w+)", text), _THREADS.search(text)
        if name and threads:
            found[name[1]] = Program(count, sorted(loops), int(threads[1]) // WARP)
    return found
