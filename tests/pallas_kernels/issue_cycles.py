"""How many cycles a kernel's warps need to issue their instructions, counted from its PTX. (Not the time: nothing waits here.)"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SCHEDULERS, WARP = 4, 32
"""Warps that a multiprocessor issues from in a cycle, and threads of a warp."""
_LABEL, _INSTRUCTION = re.compile(r"(\$\w+):"), re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*[.\w:]*)(?:\s.*)?;")
_BRANCH, _THREADS = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);"), re.compile(r"\.(?:req|max)ntid (\d+)")


class Loop(NamedTuple):
    """What lies between a label and the last branch back to it."""

    first: int
    """Number of the first instruction, from 0."""
    last: int
    words: list[str]
    """The operations in it, such as `ld.global.v4.b32`, and whole numbers such as `128256`."""

    def has(self, start: str) -> bool:
        return any(word.startswith(start) for word in self.words)


class Program(NamedTuple):
    """A kernel's instructions, as PTX has them."""

    instructions: int
    """All, each once."""
    loops: list[Loop]
    warps: int

    def cycles(self, rounds: Callable[[Loop], int] = lambda loop: 1) -> float:
        """Of one thread block, on its multiprocessor. `rounds`: how often a loop is run, each time that it is reached."""
        times = [1] * self.instructions
        for loop in self.loops:
            for place in range(loop.first, loop.last + 1):
                times[place] *= rounds(loop)
        return sum(times) * self.warps / SCHEDULERS

    def is_nested(self, loop: Loop) -> bool:
        """Whether the loop has another in it."""
        return any(loop.first <= other.first and other.last <= loop.last for other in self.loops if other != loop)


def read_programs(dump: Path) -> dict[str, Program]:
    """The kernels dumped by XLA with xla_dump_emitter_re, by name."""
    return {name: program for file in dump.glob("*.ptx") for name, program in [read_program(file.read_text())]}


def read_program(text: str) -> tuple[str, Program]:
    """A kernel's name, and the kernel."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    ends: dict[int, int] = {}
    for line in (line.split("//")[0].strip() for line in text[text.index(".entry") :].splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.fullmatch(line):
            if (branch := _BRANCH.search(line)) and branch[1] in labels:
                ends[labels[branch[1]]] = len(code)
            code.append((instruction[1], line))

    def words(first: int, last: int) -> list[str]:
        part = code[first : last + 1]
        numbers = {number for _, line in part for number in re.findall(r"(?<=[ ,])\d+(?=[,;])", line)}
        return sorted({name for name, _ in part} | numbers)

    loops = [Loop(first, last, words(first, last)) for first, last in ends.items()]
    name, threads = re.search(r"\.entry (\w+)", text), _THREADS.search(text)
    assert name and threads, text[:500]
    return name[1], Program(len(code), loops, int(threads[1]) // WARP)
