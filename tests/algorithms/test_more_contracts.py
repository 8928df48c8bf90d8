"""The contract tests of the other algorithms. Of an algorithm with several variants all but the first are slow: the
golden cases hold their bits every time, and the references their rules."""

from __future__ import annotations

import pytest
from variants import CASES

from fedray.testing import AlgorithmContract

seen: set[str] = set()
for number, (algorithm, hyper, zero, settings) in enumerate(CASES):
    name = f"Test{number}_{algorithm}"
    members = {"algorithm": algorithm, "hyper": hyper, "zero": zero, "settings": settings}
    members["pytestmark"] = [pytest.mark.slow] if algorithm in seen else []
    seen.add(algorithm)
    globals()[name] = type(name, (AlgorithmContract,), members)
