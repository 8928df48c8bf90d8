"""The contract tests of the other algorithms. Of an algorithm with several variants all but the first are slow, and so
are three of the four dear tests of each algorithm, in turn: the golden cases hold their bits every time, and the
references their rules."""

from __future__ import annotations

import pytest
from pairs import later
from variants import CASES

from fedray.testing import AlgorithmContract

DEAR = ("test_actor_counts", "test_client_updates_are_pure", "test_chunk_sizes", "test_resume_equality")

OF_NORMS = ("fedbn", {}, {"private": []}, {"model.name": "small_runs:Normed"})
"""With norms to keep, which the contracts' perceptron does not have."""

seen: set[str] = set()
for number, (algorithm, hyper, zero, settings) in enumerate([OF_NORMS, *CASES]):
    name = f"Test{number}_{algorithm}"
    members = {"algorithm": algorithm, "hyper": hyper, "zero": zero, "settings": settings}
    members |= {test: later(getattr(AlgorithmContract, test)) for test in DEAR if test != DEAR[len(seen) % len(DEAR)]}
    members["pytestmark"] = [pytest.mark.slow] if algorithm in seen else []
    seen.add(algorithm)
    globals()[name] = type(name, (AlgorithmContract,), members)
