"""Every test can fail: it, or a function that it calls, asserts something."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedray.testing import contracts

TESTS = Path(__file__).parents[1]
ASSERTING = {"raises", "warns", "fail"}
"""Functions of pytest's that fail a test, beside all whose name begins with ``assert_``."""


class Module(NamedTuple):
    """The functions of a module, methods and inner ones too, by name; and where the names that it imports are from."""

    functions: Mapping[str, list[ast.FunctionDef]]
    imported: Mapping[str, str]


def read(source: str) -> Module:
    functions: dict[str, list[ast.FunctionDef]] = {}
    imported: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: (node.module or "").split(".")[-1] for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name.split(".")[-1] for alias in node.names}
    return Module(functions, imported)


def called(function: ast.AST) -> set[str]:
    """What a function calls or names as an argument, as dotted names."""
    return {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}


def meant(name: str, call: str, modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """The functions that a call in the module ``name`` may be of: its own, or of a module that it imports. A method may
    be of a class of either."""
    root, _, function = call.rpartition(".")
    here = modules[name]
    if not root:
        places = [name, here.imported.get(function, "")]
    elif root in here.imported:
        places = [here.imported[root]]
    else:
        places = [name, *here.imported.values()] if root.split("(")[0] in ("self", "cls", "super") else [name]
    yield from ((place, function) for place in places if place in modules and function in modules[place].functions)


def that_assert_nothing(sources: Mapping[str, str]) -> set[str]:
    """The tests in modules, by name, in which nothing is asserted, nor in what they call of these modules."""
    modules = {name: read(source) for name, source in sources.items()}
    functions = {(name, each): found for name, module in modules.items() for each, found in module.functions.items()}
    calls = {key: set().union(*map(called, found)) for key, found in functions.items()}
    asserting = {
        key
        for key, found in functions.items()
        if any(isinstance(node, ast.Assert) for each in found for node in ast.walk(each))
        or any((last := call.split(".")[-1]) in ASSERTING or last.startswith("assert_") for call in calls[key])
    }
    reached = {key: {place for call in found for place in meant(key[0], call, modules)} for key, found in calls.items()}
    while more := {key for key in functions.keys() - asserting if reached[key] & asserting}:
        asserting |= more
    return {function for _, function in functions.keys() - asserting if function.startswith("test_")}


def test_every_test_asserts_something():
    paths = [*TESTS.rglob("*.py"), *Path(contracts.__file__).parent.glob("*.py")]
    sources = {path.stem if path.stem != "conftest" else str(path): path.read_text() for path in paths}
    assert not that_assert_nothing(sources)


def test_a_test_that_asserts_nothing_is_found():
    tests = "import helper\nfrom helper import check\nfrom subprocess import run\n"
    tests += "def test_a():\n    check(1)\n\ndef test_b():\n    run(1)\n\ndef test_c():\n    helper.run(1)\n"
    tests += "def test_d():\n    subprocess.run(1)\n"
    helper = "def check(x):\n    assert x\n\ndef run(x):\n    assert x\n"
    assert that_assert_nothing({"helper": helper, "tests": tests}) == {"test_b", "test_d"}
