"""The list of what a compiled GPU program launches, read from the files that XLA dumps."""

import re
from pathlib import Path
from typing import NamedTuple

_ROW = re.compile(r"( *)(\d+): (k\w+) +\[.*?\] ?(.*)")
_BRANCH = re.compile(r" *(branch_\d+|true_branch|false_branch):")
_INSTRUCTION = re.compile(r' *(?:ROOT )?%([\w.-]+) = .*metadata=\{op_name="((?:[^"\\]|\\.)*)"')
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
_DEFAULT_BRANCHES = (None, "branch_0", "true_branch")
"""XLA asks of a two-way switch whether it is the first way: that is its true branch."""


class Launch(NamedTuple):
    """One thing that the program makes the GPU do."""

    kind: str
    """XLA's name for it: kCustomKernel, kCopy, ..."""
    kernel: str
    """The kernel's name; empty for other things."""
    scope: str
    """Where in our code it comes from, as JAX's named scopes say: jit(cycle_program)/verify/layer_3/... Where XLA has lost that, as
    of some matrix products that it changed, it is the scope of the launch before."""
    in_graph: bool
    """It is part of a CUDA graph (XLA's command buffer)."""
    branch: str | None
    """The branch of a conditional that it belongs to; None: it always runs."""

    @property
    def by_default(self) -> bool:
        """It runs in a greedy cycle without extras: each of our conditionals has that as its first branch."""
        return self.branch in _DEFAULT_BRANCHES

    @property
    def stage(self) -> str:
        """The part of the algorithm: draft, verify, accept, commit, ... ; "other": between them."""
        parts = [part for part in self.scope.split("/")[1:-1] if not part.startswith(("jit(", "layer_"))]
        return parts[0] if parts else "other"

    @property
    def layer(self) -> int | None:
        """The target's layer, if it belongs to one."""
        found = re.search(r"/layer_(\d+)/", self.scope)
        return int(found[1]) if found else None


def read_launches(dump: Path) -> list[Launch]:
    """The launches of the one program that was dumped there, in order; a conditional and its branches' launches are all listed.

    Raises FileNotFoundError if nothing was dumped.
    """
    sequence = _only(dump, "*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
    scopes = _scopes(dump)
    found: list[Launch] = []
    graph: int | None = None  # the indentation of the command buffer that we are in
    branches: list[tuple[int, str]] = []  # and of the branches
    scope = ""
    for line in sequence.read_text().splitlines():
        indentation = len(line) - len(line.lstrip())
        while branches and indentation <= branches[-1][0]:
            branches.pop()
        if (branch := _BRANCH.match(line)) is not None:
            branches.append((indentation, branch[1]))
            continue
        if (row := _ROW.match(line)) is None:
            continue
        number, kind, rest = int(row[2]), row[3], row[4]
        if graph is not None and indentation <= graph:
            graph = None
        if kind == "kCommandBuffer":
            graph = indentation
        elif kind != "kSequential":
            kernel = rest.split(" ")[0] if kind == "kCustomKernel" else ""
            taken = next((name for _, name in branches if name not in _DEFAULT_BRANCHES), branches[-1][1] if branches else None)
            scope = scopes.get(number) or scope
            found.append(Launch(kind, kernel, scope, graph is not None, taken))
    return found


def touches_host(dump: Path) -> bool:
    """Something in the program lies in the host's memory: XLA marks it as memory space 5."""
    return "S(5)" in _only(dump, "*gpu_after_optimizations.txt").read_text()


def _scopes(dump: Path) -> dict[int, str]:
    """The scope of each launch, by its number: through the name of the instruction that it was made from."""
    program = _only(dump, "*gpu_after_optimizations.txt").read_text()
    by_instruction = {found[1]: found[2] for line in program.splitlines() if (found := _INSTRUCTION.match(line))}
    metadata = _only(dump, "*thunk_metadata.txt").read_text()
    return {int(number): by_instruction.get(name, "") for name, number in _METADATA.findall(metadata)}


def _only(dump: Path, *patterns: str) -> Path:
    """The largest file of the first pattern that any matches: beside the program itself there may be tiny ones."""
    for pattern in patterns:
        if files := sorted(dump.glob(pattern), key=lambda file: file.stat().st_size):
            return files[-1]
    raise FileNotFoundError(f"XLA dumped nothing that matches {' or '.join(patterns)}")
