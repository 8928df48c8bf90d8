"""Rules of the source text: imports point down, no global generator is used, files and functions are short, and an
installation holds all of it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layers import LAYERS

import fedray
from fedray.algorithms import known_algorithms
from fedray.robust import ATTACKS, RULES
from fedray.selection import SELECTIONS
from fedray.uploads import STEPS

PACKAGE = Path(fedray.__file__).parent


SHORT = (
    "fedper", "lg_fedavg", "fedrep", "fedbn", "fedbabu", "ditto", "pfedme", "apfl", "perfedavg", "fednova", "fedexp",
    "fedsam", "qfedavg", "ifca", "fedproto",
)  # fmt: skip
"""The algorithms whose files have at most :data:`LINES` lines of code, as selections, steps, rules and attacks have."""

LINES = 40

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Yields everything that is imported anywhere in a module, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    whole = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    described = ast.get_docstring(function) is not None
    return whole - ((first.end_lineno or 0) - first.lineno + 1 if described else 0)


def test_files_and_functions_are_short():
    """At most 400 lines a file, and 60 a function."""
    for folder in ("fedray", "tests", "analysis"):
        for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
            text = path.read_text()
            assert len(text.splitlines()) <= 400, path
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert own_lines(node) <= 60, f"{path}: {node.name}"


def test_imports_point_down():
    seen = set()
    for path, tree in modules():
        if path == "__init__.py":
            continue
        own = path.removesuffix(".py").split("/")[0]
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "fedray":
                continue
            other = parts[1]
            seen.add((own, other))
            # what the package itself offers stands above all that it is made of
            rank = RANK.get(other, RANK["api"])
            assert other == own or rank < RANK[own], f"{path} imports {name}"
    assert ("core", "core") in seen
    assert ("engine", "tracking") in seen


def test_no_module_imports_one_that_imports_it_back():
    """Imports for types only and in functions count too: two such modules can only be understood together."""
    trees = {
        f"fedray/{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__"): t for path, t in modules()
    }
    imported: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for name in imports(tree):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            if name and name != module:
                imported[module].add(name)

    def chain(start: str) -> list[str]:
        """The modules from ``start`` back to it, each of which imports the next; empty if there is no such chain."""
        before: dict[str, str] = {}
        left = [start]
        while left:
            module = left.pop()
            for name in sorted(imported[module]):
                if name == start:
                    found = [start, module]
                    while found[-1] != start:
                        found.append(before[found[-1]])
                    return found[::-1]
                if name not in before:
                    before[name] = module
                    left.append(name)
        return []

    assert "fedray.errors" in imported["fedray.tracking.lock"]
    assert [found for found in map(chain, trees) if found] == []


def test_ray_is_imported_by_the_engine_and_the_tuning_alone():
    users = {path.split("/")[0] for path, tree in modules() for name in imports(tree) if name.split(".")[0] == "ray"}
    assert users == {"engine", "tuning"}


ALLOWED = {"default_rng", "Generator", "Philox", "PCG64", "SeedSequence", "BitGenerator"}
DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "multinomial",
    "bernoulli",
    "normal",
    "manual_seed",
    "seed",
    "initial_seed",
    "rand_like",
    "randn_like",
    "randint_like",
    "poisson",
}
IN_PLACE = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
UNSEEDED = {"default_rng", "Philox", "PCG64", "SeedSequence", "MT19937", "SFC64"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses_of_global_generators(tree: ast.Module) -> list[str]:
    """Returns what draws from a generator that belongs to nobody, or seeds it."""
    found = [name for name in imports(tree) if name == "random" or name.startswith(("random.", "numpy.random"))]
    for node in ast.walk(tree):
        name = dotted(node)
        module, _, function = name.rpartition(".")
        if module in ("np.random", "numpy.random") and function not in ALLOWED:
            found.append(name)
        if module in ("torch", "torch.random", "torch.cuda") and function in {*DRAWS, "manual_seed_all"}:
            found.append(name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found + [ast.unparse(call) for call in calls if _is_unseeded(call) or _draws_in_place(call)]


def _is_unseeded(call: ast.Call) -> bool:
    """Whether it makes a generator of numpy's without a seed, which is as bad."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    from_nothing = not given or (isinstance(given[0], ast.Constant) and given[0].value is None)
    return dotted(call.func).rpartition(".")[2] in UNSEEDED and from_nothing


def _draws_in_place(call: ast.Call) -> bool:
    """Whether it fills a tensor without a generator: a method, or what nn.init has for that."""
    module, _, function = (dotted(call.func) or f"x.{getattr(call.func, 'attr', '')}").rpartition(".")
    fills = function in IN_PLACE or (
        module.endswith("init") and function.endswith(("uniform_", "normal_", "orthogonal_"))
    )
    return fills and not any(keyword.arg == "generator" for keyword in call.keywords)


def test_no_global_generator_is_used():
    for path, tree in modules():
        # the one place that lends torch's global generators, and gives them back
        if path != "core/seeds.py":
            found = uses_of_global_generators(tree)
            # it lends them to a model while that draws its first weights
            assert not [use for use in found if not (path.startswith("models/") and use.startswith("nn.init."))], path


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from random import choice",
        "x = np.random.permutation(3)",
        "np.random.seed(0)",
        "from numpy.random import rand",
        "torch.manual_seed(1)",
        "x = torch.randn(3)",
        "rng = np.random.default_rng()",
        "rng = np.random.default_rng(None)",
        "rng = np.random.Generator(np.random.PCG64())",
        "x.uniform_()",
        "layers[0].weight.data.normal_(0, 1)",
        "torch.rand_like(x)",
        "torch.poisson(x)",
        "nn.init.normal_(x)",
        "torch.nn.init.kaiming_uniform_(x)",
    ],
)
def test_a_global_generator_would_be_found(line):
    assert uses_of_global_generators(ast.parse(line))


def test_an_installation_holds_every_module_and_file():
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in Python since 3.11")
    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py")}
    assert {".".join(folder.parts) for folder in folders} | set(listed["package-dir"]) == set(listed["packages"])
    held: set[Path] = set()
    for package, patterns in listed["package-data"].items():
        held |= {path for pattern in patterns for path in PACKAGE.parent.joinpath(*package.split(".")).glob(pattern)}
    beside = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".md")}
    assert beside <= held


def lines_of_code(source: str) -> int:
    """Returns how many lines of a file are code: all but blank lines, comments, docstrings and imports."""
    tree = ast.parse(source)
    left_out = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text(node)]
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.split("#")[0].strip()}
    lines -= {number for node in left_out for number in range(node.lineno, node.end_lineno + 1)}
    return len(lines)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def methods() -> list[type[Any]]:
    found = {**SELECTIONS, **STEPS, **RULES, **ATTACKS}
    return [*(known_algorithms()[name] for name in SHORT), *found.values()]


@pytest.mark.parametrize("method", methods(), ids=lambda cls: cls.__name__)
def test_a_method_is_a_short_file(method):
    assert 3 <= lines_of_code(Path(inspect.getfile(method)).read_text()) <= LINES


def test_only_code_is_counted():
    source = '''"""A module."""\n\nimport os\nfrom a import (\n    b,\n)\n\n# why\n\n
def f(x):  # how\n    """What\n    it does."""\n    return [\n        x,\n    ]\n'''
    assert lines_of_code(source) == 4
