"""The documentation names files and functions that exist."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from jaxspec.checkpoints.exporting import DIALECTS
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.families import FAMILIES
from tests.sets import SETS

ROOT = Path(__file__).parents[1]
STRUCTURE = (ROOT / "docs/structure.md").read_text()
SERVING = (ROOT / "docs/serving.md").read_text()
LIFE = STRUCTURE.split("## The life of one token")[1].split("\n## ")[0]


def definitions(path: Path) -> set[str]:
    """Functions, classes and Class.method of a file, and the attributes that a class's methods assign."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
            attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
            names |= {f"{node.name}.{each.attr}" for each in attributes if isinstance(each.ctx, ast.Store)}
    return names


def test_the_life_of_a_token_has_at_most_ten_steps():
    assert 5 <= len(re.findall(r"^\d+\. ", LIFE, re.MULTILINE)) <= 10


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:jaxspec|pallas_kernels|convert|benchmarks)/[\w/.]*)`", STRUCTURE + SERVING)))
)
def test_paths_exist(path):
    assert (ROOT / path).exists()


def test_every_promise_of_security_names_its_code_and_its_test():
    """The first table of SECURITY.md's section; promises of what does not exist have neither."""
    table = (ROOT / "SECURITY.md").read_text().split("## Promised")[1].split("###")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) > 10
    for name, _, *rest in rows:
        files = re.findall(r"`([\w/.]+)`", " ".join(rest))
        assert [file for file in files if not (ROOT / file).exists()] == [], name
        kinds = {file.startswith("tests/") for file in files}
        assert kinds == {True, False} or name == "**No files, no URLs**", name


def test_files_that_the_page_on_checkpoints_names_exist():
    named = (ROOT / "docs/checkpoints.md").read_text().split("## Where it is in the code")[1]
    files = re.findall(r"`(\w+\.py)`", named)
    assert len(set(files)) > 10 and all((ROOT / "jaxspec/checkpoints" / file).exists() for file in files)


def test_every_function_of_the_life_of_a_token_is_where_it_says():
    found = re.findall(r"`(jaxspec/[\w/]+\.py)`\s+`([A-Z]?\w+(?:\.\w+)?)`", LIFE)
    assert len(found) >= 15
    missing = [(path, name) for path, name in found if name not in definitions(ROOT / path)]
    assert not missing


def test_names_without_a_file_exist_somewhere():
    everywhere = set().union(*(definitions(path) for path in (ROOT / "jaxspec").rglob("*.py")))
    named = set(re.findall(r"`([A-Z]\w+\.\w+|[A-Z]\w+|truncate|extend)`", LIFE))
    assert named and not {name for name in named if name not in everywhere}


def test_every_family_and_dialect_is_in_the_table():
    table = (ROOT / "docs/checkpoints.md").read_text()
    assert all(f"`{model_type}`" in table for model_type in FAMILIES)
    assert all(f"`{dialect}`" in table for dialect in DIALECTS)
    switches = [field.name for field in fields(Eagle3Config) if field.type is bool and field.name.startswith(("fc_norm", "norm_"))]
    assert len(switches) == 4 and all(f"`{name}`" in table for name in switches)


def test_ci_runs_the_command_that_the_readme_tells_and_then_what_it_leaves_out():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text().splitlines()
    command, rest = (line for line in script if "-m pytest" in line)
    assert command.startswith("python3 -m venv") and f"```bash\n{command}\n```" in readme
    assert script[-1] == rest
    (left_out,) = re.findall(r"-m 'not \((.*?)\)'", (ROOT / "pyproject.toml").read_text())
    assert f"-m '{left_out}'" in rest and left_out.split(" or ") == [*SETS]
    assert ".venv/bin/mypy" in "\n".join(script)


def test_no_two_classes_have_one_name():
    classes: dict[str, list[str]] = {}
    for path in (ROOT / "jaxspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in classes.items() if len(paths) > 1}
