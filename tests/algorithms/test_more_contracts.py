"""The contract tests of the other algorithms."""

from __future__ import annotations

from variants import CASES

from fedray.testing import AlgorithmContract

for number, (algorithm, hyper, zero, settings) in enumerate(CASES):
    name = f"Test{number}_{algorithm}"
    members = {"algorithm": algorithm, "hyper": hyper, "zero": zero, "settings": settings}
    globals()[name] = type(name, (AlgorithmContract,), members)
