"""A wheel holds what a clone holds: data files, kernels and licences."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jaxspec.cli import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = (".cc", ".h", ".inc", ".so")
"""Of the kernels, which setup.py names."""


def files_beside_modules() -> list[Path]:
    """What of the packages is no module, relative to the repository. benchmarks/results is a record, not a part of the program."""
    packages = (ROOT / name for name in ("jaxspec", "pallas_kernels", "convert"))
    found = [path.relative_to(ROOT) for package in packages for path in package.rglob("*.*")]
    return [path for path in found if path.suffix not in (".py", ".pyc", *SOURCES) and (ROOT / path).is_file()]


def test_every_data_file_goes_into_a_wheel():
    globs = PROJECT["tool"]["setuptools"]["package-data"]
    named = [f"{package.replace('.', '/')}/{pattern}" for package, patterns in globs.items() for pattern in patterns]
    files = files_beside_modules()
    assert len(files) > 20
    assert not [str(path) for path in files if not any(fnmatch(str(path), glob) and path.match(glob) for glob in named)]


def test_the_version_is_declared_once_and_in_the_changelog(capsys):
    version = PROJECT["project"]["version"]
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"jaxspec {version}\n"
    titles = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert titles[0].startswith(f"## [{version}]")


def test_the_container_recipe_names_what_there_is():
    recipe = (ROOT / "Dockerfile").read_text()
    extras = PROJECT["project"]["optional-dependencies"]
    assert 'ENTRYPOINT ["jaxspec"]' in recipe and 'CMD ["serve"' in recipe
    assert "ARG EXTRAS=gguf" in recipe and {"gguf", "cuda12", "cuda13"} <= extras.keys()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv"} <= set(ignored) and not {"jaxspec", "benchmarks", "LICENSE", "NOTICE"} & set(ignored)


@pytest.mark.exhaustive
def test_a_wheel_runs_from_anywhere(tmp_path: Path):
    """Built from the files that git knows, with its kernels, and used from a directory that holds nothing of the clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0")[:-1]:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(tmp_path / "source")], check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not {str(path) for path in files_beside_modules()} - set(names)
    assert {"LICENSE", "NOTICE"} <= {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "installed"), str(wheel)], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout

    assert str(tmp_path) in run("-c", "import jaxspec, pallas_kernels.cpu; print(jaxspec.__file__)")
    found = json.loads(run("-m", "jaxspec", "collect-env", "--json"))
    assert found["jaxspec"] == {"version": PROJECT["project"]["version"]}
    assert shutil.which("g++") is None or "yes" in str(found["cpu_kernels"])
    assert "throughput" in run("-m", "jaxspec", "bench")
    assert run("-m", "jaxspec", "generate", "def f(", "--max-tokens", "4").strip()
