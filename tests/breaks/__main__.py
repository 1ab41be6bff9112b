"""python -m tests.breaks: breaks the code on purpose, one place at a time, and says which breaks the tests catch.

Works in a copy of the files that git knows. First all tests of the list run unbroken: one that fails then proves nothing. A break
is caught if its test fails, missed if it passes, and not applicable if its old text does not occur exactly once.
"""

import argparse
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900
"""For one test; a break that hangs is caught too."""
PRELOADED = ("jax", "flax.nnx", "jaxtyping", "beartype", "hypothesis", "httpx", "fastapi", "uvicorn", "safetensors", "transformers")
"""Imported once: tests run in forks of this process, which saves four seconds each."""
OURS = ("tests", "jaxspec", "pallas_kernels", "convert", "benchmarks")
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


class Result(NamedTuple):
    """What became of one break."""

    outcome: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every break that was tried is caught."""
    parser = argparse.ArgumentParser("python -m tests.breaks", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="breaks whose name, file or test holds this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON; breaks that are in it are not tried again")
    parser.add_argument("--check", action="store_true", help="only look whether every old text occurs exactly once")
    parser.add_argument("--trust", action="store_true", help="the whole suite has just passed: don't run the tests unbroken")
    options = parser.parse_args(arguments)
    breaks = [each for each in read_breaks() if options.only in f"{each.name} {each.file} {each.test}"]
    if options.check:
        return show({each.name: Result(NOT_APPLICABLE, 0.0) for each in breaks if not is_applicable(ROOT, each)}, breaks)
    results: dict[str, Result] = {}
    if options.out and options.out.exists():
        results = {name: Result(*result) for name, result in json.loads(options.out.read_text()).items()}
    left = sorted((each for each in breaks if each.name not in results), key=lambda each: each.test)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder) / "tree")
        broken = set() if options.trust else failing(tree, sorted({each.test for each in left if is_applicable(tree, each)}))
        for number, each in enumerate(left, 1):
            began = time.monotonic()
            outcome = NO_PROOF if each.test in broken else outcome_of(tree, each)
            results[each.name] = Result(outcome, round(time.monotonic() - began, 1))
            print(f"{number}/{len(left)} {each.name}: {outcome}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return show(results, breaks)


def read_breaks() -> list[Break]:
    return [Break(name, **fields) for name, fields in tomllib.loads(Path(__file__).with_name("breaks.toml").read_text()).items()]


def outcome_of(tree: Path, each: Break) -> str:
    """Tries one break."""
    if not is_applicable(tree, each):
        return NOT_APPLICABLE
    file = tree / each.file
    original = file.read_text()
    file.write_text(original.replace(each.old, each.new))
    try:
        return CAUGHT if failing(tree, [each.test], "-x") else MISSED
    except LookupError:
        return NO_TEST
    finally:
        file.write_text(original)


def is_applicable(tree: Path, each: Break) -> bool:
    file = tree / each.file
    return file.is_file() and file.read_text().count(each.old) == 1


class Failures:
    """A pytest plugin that notes what fails."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found.add(report.nodeid)


def failing(tree: Path, tests: Sequence[str], *options: str) -> set[str]:
    """Which of the tests fail in the tree. Raises LookupError if there is no such test."""
    plain = [test for test in tests if " " not in test]
    found: set[str] = set()
    for group in ([plain] if plain else []) + [[test] for test in tests if " " in test]:
        status, failures, output = run_in_fork(tree, [*options, *(word for test in group for word in shlex.split(test))])
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED) and not failures:
            raise LookupError(f"there is no such test:\n{output[-2000:]}")
        named = {test for test in group if any(failure.startswith(shlex.split(test)[0]) for failure in failures)}
        found |= named if named or status == pytest.ExitCode.OK else set(group)
    return found


def run_in_fork(tree: Path, arguments: list[str]) -> tuple[int | None, list[str], str]:
    """Runs pytest in one process; its exit status (None: it was stopped), the tests that failed, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        output, answer = Path(folder) / "output", Path(folder) / "answer"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; it has no threads yet
            child = os.fork()
        if child == 0:
            try:
                become(tree, output)
                failures = Failures()
                fixed = [
                    "-p",
                    "no:cacheprovider",
                    "-W",
                    "ignore::pytest.PytestAssertRewriteWarning",
                    "-q",
                    "-m",
                    "",
                    *(["-n", "0"] if has_workers(tree) else []),
                ]
                status = int(pytest.main([*fixed, *arguments], plugins=[failures]))
                answer.write_text(json.dumps([status, sorted(failures.found)]))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        deadline = time.monotonic() + SECONDS
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(child, 9)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        status, failures = json.loads(answer.read_text()) if answer.exists() else (None, [])
        return status, failures, output.read_text(errors="replace") if output.exists() else ""


def become(tree: Path, output: Path) -> None:
    """Makes this process, a fork, one that was started in the tree."""
    os.setpgid(0, 0)
    with output.open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() not in (ROOT, tree))]
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()


def has_workers(tree: Path) -> bool:
    return "pytest-xdist" in (tree / "pyproject.toml").read_text()


def copy_tree(tree: Path) -> Path:
    """The files that git knows, and the shared folder of compiled programs."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    programs = ROOT / ".pytest_cache/programs"
    if programs.exists():
        (tree / ".pytest_cache").mkdir()
        (tree / ".pytest_cache/programs").symlink_to(programs.resolve())
    return tree


def show(results: dict[str, Result], breaks: Sequence[Break]) -> int:
    """Prints a table and the sums."""
    for each in breaks:
        if each.name in results:
            outcome, seconds = results[each.name]
            print(f"{outcome:24} {seconds:6.1f} s  {each.name}  ({each.file}; {each.test})")
    counts = Counter(results[each.name].outcome for each in breaks if each.name in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "every old text occurs exactly once")
    return 0 if set(counts) <= {CAUGHT} else 1


if __name__ == "__main__":
    if "--check" not in sys.argv:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        for package in PRELOADED:
            importlib.import_module(package)
    sys.exit(main())
