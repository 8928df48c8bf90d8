"""No change has altered what runs compute, unless golden.json says so."""

from __future__ import annotations

import pytest
from golden import cases, differences, known, machine, outcome


@pytest.mark.parametrize("name", cases())
def test_a_run_computes_what_it_did(name: str) -> None:
    kind = machine()
    if kind not in known():
        pytest.skip(f"golden.json has no entry for {kind}: python tests/golden.py --write makes one")
    assert not list(differences(name, known()[kind].get(name), outcome(cases()[name])))
