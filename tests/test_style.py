"""Format, lint, the limits on file length, and who imports whom. Types are checked by .ci/run."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxspec", "pallas_kernels", "convert", "benchmarks")


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short_enough_to_read(package):
    limit = 500 if package == "pallas_kernels" else 400
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert lengths and not {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > limit}


MOST_LINES = {"jaxspec": 35_700, "pallas_kernels": 3_800, "convert": 700, "benchmarks": 4_600, "tests": 44_700}
"""As reached on 29 November 2026, rounded up. Who adds lines looks for others to take away; a new feature may raise the limits."""


def test_lines_stay_within_the_limits():
    """Prints the lines of Python in each package (pytest -s)."""
    files = {package: sorted((ROOT / package).rglob("*.py")) for package in MOST_LINES}
    lines = {package: sum(len(path.read_text().splitlines()) for path in paths) for package, paths in files.items()}
    print("".join(f"\n{package}: {count:,} lines in {len(files[package])} files" for package, count in lines.items()))
    assert not {package: count for package, count in lines.items() if count > MOST_LINES[package]}


def test_kernels_do_not_import_the_engine():
    assert not [
        path
        for path in (ROOT / "pallas_kernels").rglob("*.py")
        if "import jaxspec" in (text := path.read_text()) or "from jaxspec" in text
    ]


def imported(node: ast.AST) -> Iterator[str]:
    """What a module imports, functions included, but for TYPE_CHECKING: dotted names of modules, or of what is in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imported(ast.Module(child.orelse, []))
        else:
            yield from imported(child)


def knot(root: Path) -> list[str]:
    """The rooms of a package, which are its subpackages and top-level modules, that import one another in a circle; [] if none do.

    Two rooms that import each other can't be understood, tested or replaced one at a time.
    """
    rooms = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        room = path.relative_to(root).with_suffix("").parts[0]
        names = [name.split(".") for name in imported(ast.parse(path.read_text())) if name.split(".")[0] == root.name]
        # what no room is called is in __init__.py
        graph.setdefault(room, set()).update({name[1] if name[1:2] and name[1] in rooms else "__init__" for name in names} - {room})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(each) for each in reversed(error.args[1])]
    return []


def test_no_room_imports_one_that_imports_it():
    assert knot(ROOT / "jaxspec") == []


def test_a_knot_is_seen_through_functions_and_not_through_types(tmp_path):
    (root := tmp_path / "house").mkdir()
    for name in ("cellar", "attic"):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    (root / "__init__.py").write_text("from house.attic import floor\n")
    (root / "attic" / "floor.py").write_text("from house.cellar import wall\n")
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.attic import floor\n"
    (root / "cellar" / "wall.py").write_text(types)
    assert knot(root) == []
    (root / "cellar" / "wall.py").write_text("def build():\n    import house.attic.floor\n")
    assert sorted(set(knot(root))) == ["attic", "cellar"]
    (root / "cellar" / "wall.py").write_text("from house import anything\n")
    assert sorted(set(knot(root))) == ["__init__", "attic", "cellar"]


def test_what_modules_import_of_ours_is_there():
    """Also in tests that only a GPU compiler or other people's clients need, which most runs never import."""
    ours = {*PACKAGES, "tests"}
    assert not [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in imported(ast.parse(path.read_text()))
        if name.split(".")[0] in ours and not is_there(name)
    ]


def is_there(name: str) -> bool:
    """Whether a dotted name is a module of ours, or defined or imported somewhere in one."""
    parent, _, last = name.rpartition(".")
    module, inside = (ROOT.joinpath(*each.split(".")) for each in (name, parent))
    if module.is_dir() or module.with_suffix(".py").exists():
        return True
    file = inside.with_suffix(".py") if inside.with_suffix(".py").exists() else inside / "__init__.py"
    if not file.exists():
        return False
    return last in defined(file)


@cache
def defined(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.TypeAlias):
            names.add(node.name.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


WALL_CLOCK = re.compile(r"\b(time\.time|datetime\.now|from time import time)\b")
SHOWS_DATES = {
    "engine/program_cache.py",
    "server/sglang/info.py",
    "server/kv_events.py",
    "server/model.py",
    "server/openai/objects.py",
    "server/responses/answers.py",
    "text/chat_template.py",
    "train/evaluation.py",
}
"""They tell when something was made. Nothing waits or ends by a clock that may jump."""


def test_a_clock_that_jumps_delays_nothing():
    package = ROOT / "jaxspec"
    assert {str(file.relative_to(package)) for file in package.rglob("*.py") if WALL_CLOCK.search(file.read_text())} == SHOWS_DATES
