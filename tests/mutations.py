"""Breaks one rule after another, and says which test notices: a mutant that no test kills is a rule that none holds.

    python tests/mutations.py                          # all of it; writes analysis/results/mutations.csv
    python tests/mutations.py algorithms/fedprox.py    # the mutants of some files only, which are printed

A mutant differs from the source in one place: a sign is another, a factor or divisor is gone, a number is larger by
one, a comparison is turned round, or the branches of a condition are exchanged. The tests are collected once. Each
mutant is a forked process in which one function has other code, so that no file is changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import importlib
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

import fedray
from fedray.algorithms import known_algorithms

PACKAGE = Path(fedray.__file__).parent
RESULTS = PACKAGE.parent / "analysis" / "results" / "mutations.csv"
TESTS = Path(__file__).parent

OF_ALGORITHMS = [
    "algorithms/test_algorithms_against_references.py",
    "algorithms/test_more_algorithms_against_references.py",
    "algorithms/test_representation_against_references.py",
    "algorithms/test_personal_models.py",
    "algorithms/test_other_rules.py",
    "algorithms/test_fedproto.py",
    "algorithms/test_private_layers.py",
    "algorithms/test_known_personal_models.py",
    "tracking/test_costs_command.py",
    "algorithms/test_reductions_of_drift_correction.py",
    "algorithms/test_reductions_of_momentum.py",
    "algorithms/test_reductions_of_past_models.py",
    "algorithms/test_reductions_of_pfedmo.py",
    "algorithms/test_more_contracts.py",
    "algorithms/test_pfedmo_server.py",
    "algorithms/test_averaged_models.py",
    "algorithms/test_rules_at_their_limits.py",
]
STEPS_OF_UPLOADS = ("clip", "noise", "qsgd", "quantize", "randk", "sign", "topk")
ATTACKS = ("alie", "backdoor", "ipm", "label_flip", "noise", "sign_flip")
ROBUST = ("bulyan", "centered_clip", "geometric_median", "krum", "mean", "median", "norm_bound", "trimmed_mean")
RULES = {
    "core/tree.py": ["core/test_tree.py"],
    "core/batches.py": ["core/test_batches.py", "core/test_seeds.py"],
    "core/seeds.py": ["core/test_seeds.py", "core/test_batches.py"],
    "core/schedule.py": ["client/test_schedules.py"],
    "client/optimizer.py": ["client/test_client_optimizer.py", OF_ALGORITHMS[1]],
    "experiment/cohorts.py": ["algorithms/test_participation.py", OF_ALGORITHMS[0]],
    "engine/sums.py": [OF_ALGORITHMS[0], OF_ALGORITHMS[2], "algorithms/test_phase_outputs.py"],
    "data/partitions/dirichlet.py": ["data/test_dirichlet.py", "data/test_partition.py"],
    "data/partitions/skew.py": ["data/test_partition.py"],
    "algorithms/server_state.py": OF_ALGORITHMS[:2],
    "engine/selection.py": ["engine/test_selection.py"],
    "privacy/mechanism.py": ["engine/test_privacy.py"],
    "robust/attackers.py": ["engine/test_robust.py", "engine/test_backdoor.py", "engine/test_own_robust.py"],
    **{f"uploads/{each}.py": ["engine/test_known_uploads.py"] for each in STEPS_OF_UPLOADS},
    **{f"robust/rules/{each}.py": ["engine/test_robust.py"] for each in ROBUST},
    **{f"robust/attacks/{each}.py": ["engine/test_robust.py", "engine/test_backdoor.py"] for each in ATTACKS},
}
"""The files besides the algorithms', and the tests that hold what they promise."""

SECONDS = 120
"""How long the tests of a mutant may compute. One that would never end is found too."""


@dataclass
class Mutant:
    """A change of one place in a file of the package, and the test that failed with it."""

    file: str
    line: int
    function: str
    change: str
    killed_by: str = ""


def algorithm_files() -> dict[str, list[str]]:
    """Returns the files of the algorithms, and the names of the algorithms that are in each."""
    found: dict[str, list[str]] = {}
    for name, algorithm in known_algorithms().items():
        found.setdefault("/".join(algorithm.__module__.split(".")[1:]) + ".py", []).append(name)
    return found


OPPOSITE: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt,
    ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip


def changed(node: ast.AST) -> ast.AST | None:
    """Returns what stands in place of ``node`` in a mutant, or None if it is no place to change."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not any(map(_is_text, (new.left, new.right))):
            new.op = OPPOSITE[type(new.op)]()
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            new = new.left
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            new.ops = [OPPOSITE[type(op)]()]
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
        case ast.Constant(value=int() | float()) if not isinstance(new.value, bool):
            new.value += 1
        case _:
            return None
    return new


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def places(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST, str, int | None]]:
    """Yields each place in a function of ``tree``: the function's name, the parent, its field, and the index in it."""
    for name, value in ast.iter_fields(tree):
        if name in ("decorator_list", "annotation", "returns", "args") and not isinstance(tree, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.Assert)):
                continue
            inner = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not function.endswith("()"):
                call = "()" if isinstance(child, ast.FunctionDef) else ""
                inner = f"{function}.{child.name}".lstrip(".") + call
            elif function.endswith("()") and changed(child) is not None:
                yield function.removesuffix("()"), tree, name, index
            yield from places(child, inner)


def mutants(file: str) -> Iterator[tuple[Mutant, CodeType]]:
    """Yields the mutants of a file, each with the code of the whole file."""
    source = (PACKAGE / file).read_text()
    count = sum(1 for _ in places(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        function, parent, field, index = list(places(tree))[number]
        value = getattr(parent, field)
        old: Any = value if index is None else value[index]
        new: Any = changed(old)
        if index is None:
            setattr(parent, field, new)
        else:
            value[index] = new
        change = f"{ast.unparse(old)} -> {ast.unparse(new)}"
        code = compile(ast.fix_missing_locations(tree), PACKAGE / file, "exec")
        yield Mutant(file, old.lineno, function, change), code


def install(file: str, function: str, code: CodeType) -> None:
    """Gives the function of this process the code that it has in ``code``, wherever it was imported."""
    module = importlib.import_module("fedray." + file.removesuffix(".py").replace("/", "."))
    home: ModuleType | type = module
    *classes, name = function.split(".")
    for part in classes:
        home = vars(home)[part]
    for part in function.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    _function(vars(home)[name]).__code__ = code


def _function(found: Any) -> FunctionType:
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        inner = (getattr(found, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        found = next(each for each in inner if each is not None)
    return found


class Mutating:
    """A plugin of pytest that collects the tests and runs those of each mutant in a process of its own."""

    def __init__(self, files: list[str], note: Callable[[Mutant], None]) -> None:
        self.files, self.note = files, note
        self.of_algorithms = algorithm_files()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for file in self.files:
            items = self.tests_of(file, session.items)
            for mutant, code in mutants(file):
                mutant.killed_by = in_a_fork(lambda: self.first_failure(items, mutant, code))  # noqa: B023
                self.note(mutant)
        return True

    def tests_of(self, file: str, items: list[pytest.Item]) -> list[pytest.Item]:
        """Returns the tests that must notice what is broken in a file, first those of the references."""
        if file in RULES:
            return [item for path in RULES[file] for item in items if item.path == TESTS / path]

        def about(item: pytest.Item, names: Iterable[str]) -> bool:
            return any(re.search(rf"[\[_-]{name}[\]_:-]", item.nodeid.replace("_against_", "")) for name in names)

        places = {TESTS / path: place for place, path in enumerate(OF_ALGORITHMS)}
        names = self.of_algorithms[file]
        chosen = [item for item in items if about(item, names) or not about(item, known_algorithms())]
        return sorted((item for item in chosen if item.path in places), key=lambda item: places[item.path])

    def first_failure(self, items: list[pytest.Item], mutant: Mutant, code: CodeType) -> str:
        """Returns the name of the first test that fails with the mutant, or nothing."""
        install(mutant.file, mutant.function, code)
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                return item.nodeid
        return ""


def in_a_fork(work: Callable[[], str]) -> str:
    """Returns what ``work`` returns in a forked process, or how that process died."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        try:
            os.write(writing, work().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return answer if status == 0 else f"ended by signal {os.waitstatus_to_exitcode(status)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of the package, all that are known if left out")
    chosen = parser.parse_args().files
    files = chosen or [*algorithm_files(), *RULES]
    found: list[Mutant] = []
    with open(os.devnull if chosen else RESULTS, "w", newline="") as target:
        writer = csv.DictWriter(target, list(asdict(Mutant("", 0, "", ""))), lineterminator="\n")
        writer.writeheader()

        def note(mutant: Mutant) -> None:
            found.append(mutant)
            writer.writerow(asdict(mutant))
            target.flush()

        paths = dict.fromkeys(path for file in files for path in RULES.get(file, OF_ALGORITHMS))
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--durations=0"]
        pytest.main([*options, *(str(TESTS / path) for path in paths)], plugins=[Mutating(files, note)])
    alive = [mutant for mutant in found if not mutant.killed_by]
    print(f"{len(found)} mutants, {len(found) - len(alive)} killed")
    for mutant in alive:
        print(f"{mutant.file}:{mutant.line} {mutant.function}: {mutant.change}")
    return 1 if alive or not found else 0


if __name__ == "__main__":
    sys.exit(main())
