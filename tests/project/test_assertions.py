"""Every test can fail: it, or a function that it calls, asserts something."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fedray.testing import contracts

TESTS = Path(__file__).parents[1]
ASSERTING = ("raises", "warns", "assert_", "fail")
"""What is in the names of functions of pytest's, numpy's and torch's that fail a test."""


def called(function: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {ast.unparse(each).split(".")[-1] for each in calls}


def that_assert_nothing(sources: Iterable[str]) -> set[str]:
    """The tests in the sources of modules in which nothing is asserted, nor in what they call of these modules."""
    functions = defaultdict(list)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                functions[node.name].append(node)
    reached = {name: set().union(*map(called, found)) for name, found in functions.items()}
    asserting = {
        name
        for name, found in functions.items()
        if any(isinstance(node, ast.Assert) for each in found for node in ast.walk(each))
        or any(word in call for call in reached[name] for word in ASSERTING)
    }
    while more := {name for name in functions.keys() - asserting if reached[name] & asserting}:
        asserting |= more
    return {name for name in functions.keys() - asserting if name.startswith("test_")}


def test_every_test_asserts_something():
    sources = [path.read_text() for path in [*TESTS.rglob("*.py"), *Path(contracts.__file__).parent.glob("*.py")]]
    assert not that_assert_nothing(sources)


def test_a_test_that_asserts_nothing_is_found():
    helper = "def check(x):\n    assert x\n"
    assert that_assert_nothing([helper, "def test_a():\n    check(1)\n\ndef test_b():\n    run(1)\n"]) == {"test_b"}
