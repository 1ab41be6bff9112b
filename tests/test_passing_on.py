"""A new field of requests is declared in one place: no function names a request's field only to pass it on.

The field of a request, as opposed to the tree of a cycle or a model's weights of the same name, is known by its annotation. Methods
of the Python API are where users find the fields: there they may be named, if they go straight into a GenerationRequest.
"""

import ast
from dataclasses import fields
from pathlib import Path

from jaxspec.engine.request import GenerationRequest

SOURCES = Path(__file__).parents[1] / "jaxspec"
OF_A_REQUEST = {
    "prompt": ("tuple[int, ...]", "Sequence[int]", "list[int]"),
    "params": ("SamplingParams", "SamplingParams | None"),
    "priority": ("int", "int | None", "Priority | None"),
    "timeout": ("float | None",),
    "tree": ("TreeLike | None", "TreeShape | None"),
    "cache_salt": ("str | None", "CacheSalt | None"),
    "wants_trees": ("bool",),
    "ends": ("tuple[str, ...]",),
}
"""How each field is annotated where it is a request's, and nothing else's."""


def passed_on(source: str) -> list[str]:
    """Functions with a parameter for a field of requests that they only pass on, and the field.

    In:  def start(tree: TreeLike | None): return begin(tree)
    Out: ["start: tree"]
    """
    found = []
    for name, function in functions(ast.parse(source)):
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            annotation = "" if each.annotation is None else ast.unparse(each.annotation).strip("'\"")
            if annotation in OF_A_REQUEST.get(each.arg, ()):
                uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == each.arg]
                if uses and all(any(use is given for given in handed_on(function)) for use in uses):
                    found.append(f"{name}: {each.arg}")
    return found


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            found += [] if isinstance(node, ast.ClassDef) else [(name, node)]
            found += functions(node, f"{name}.")
    return found


def handed_on(function: ast.AST) -> list[ast.AST]:
    """What the function's calls get as they are, except what goes into a GenerationRequest, or into models: an engine's tree."""
    found: list[ast.AST] = []
    into_requests: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            makes = [ast.unparse(each) for each in (node.func, *node.args[:1])]
            if "GenerationRequest" in makes or makes[0] in ("replace", "load_models"):
                into_requests |= {inner for each in given for inner in ast.walk(each)}
            found += given
    return [each for each in found if each not in into_requests]


def test_every_field_of_a_request_is_known_here():
    assert list(OF_A_REQUEST) == [each.name for each in fields(GenerationRequest)]


def test_no_function_names_a_field_of_requests_only_to_pass_it_on():
    found = [f"{file.name} {each}" for file in sorted(SOURCES.rglob("*.py")) for each in passed_on(file.read_text())]
    assert found == []
