"""python -m tests.breaks: breaks the code on purpose, one place at a time, and says which breaks the tests catch.

Works in a copy of the files that git knows. First each test of the list runs unbroken: one that fails then proves nothing. A break
is caught if its test fails, missed if it passes, and not applicable if its old text does not occur exactly once.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900
"""For one test; a break that hangs is caught too."""
CAUGHT, MISSED, NOT_APPLICABLE = "caught", "missed", "not applicable"
NO_PROOF, NO_TEST = "its test fails unbroken", "its test is missing"


class Break(NamedTuple):
    """One place to break, as breaks.toml has it."""

    name: str
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """What pytest is given; options too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every break that was tried is caught."""
    parser = argparse.ArgumentParser("python -m tests.breaks", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="breaks whose name, file or test holds this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON; breaks that are in it are not tried again")
    parser.add_argument("--check", action="store_true", help="only look whether every old text occurs exactly once")
    parser.add_argument("--trust", action="store_true", help="the whole suite has just passed: don't run the tests unbroken")
    options = parser.parse_args(arguments)
    listed = tomllib.loads(Path(__file__).with_name("breaks.toml").read_text())
    breaks = [Break(name, **fields) for name, fields in listed.items()]
    breaks = [each for each in breaks if options.only in f"{each.name} {each.file} {each.test}"]
    if options.check:
        return show({each.name: NOT_APPLICABLE for each in breaks if not is_applicable(ROOT, each)}, breaks)
    results: dict[str, str] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    left = sorted((each for each in breaks if each.name not in results), key=lambda each: each.test)
    with tempfile.TemporaryDirectory() as folder:
        tree, unbroken = copy_tree(Path(folder)), dict[str, bool | None]()
        for number, each in enumerate(left, 1):
            if each.test not in unbroken:
                unbroken[each.test] = True if options.trust else passes(tree, each.test)
            results[each.name] = outcome_of(tree, each) if unbroken[each.test] else NO_PROOF
            print(f"{number}/{len(left)} {each.name}: {results[each.name]}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return show(results, breaks)


def outcome_of(tree: Path, each: Break) -> str:
    """Tries one break."""
    if not is_applicable(tree, each):
        return NOT_APPLICABLE
    file = tree / each.file
    original = file.read_text()
    file.write_text(original.replace(each.old, each.new))
    passed = passes(tree, each.test)
    file.write_text(original)
    return {True: MISSED, False: CAUGHT, None: NO_TEST}[passed]


def is_applicable(tree: Path, each: Break) -> bool:
    file = tree / each.file
    return file.is_file() and file.read_text().count(each.old) == 1


def passes(tree: Path, test: str) -> bool | None:
    """Whether pytest passes in the tree; False if it takes too long, None if there is no such test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", "", "-p", "no:cacheprovider", *shlex.split(test)]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    try:
        status = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return False
    return None if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED) else status == 0


def copy_tree(tree: Path) -> Path:
    """The files that git knows, what was built here, and the shared folder of compiled programs."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    built = (file.relative_to(ROOT) for file in (ROOT / "pallas_kernels").rglob("*.so"))
    for name in (*files, *built):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    programs = ROOT / ".pytest_cache/programs"
    if programs.exists():
        (tree / ".pytest_cache").mkdir()
        (tree / ".pytest_cache/programs").symlink_to(programs.resolve())
    return tree


def show(results: dict[str, str], breaks: Sequence[Break]) -> int:
    """Prints a table and the sums."""
    tried = [each for each in breaks if each.name in results]
    for each in tried:
        print(f"{results[each.name]:24} {each.name}  ({each.file}; {each.test})")
    counts = Counter(results[each.name] for each in tried)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "every old text occurs exactly once")
    return 0 if set(counts) <= {CAUGHT} else 1


if __name__ == "__main__":
    sys.exit(main())
