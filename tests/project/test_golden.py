"""No change has altered what runs compute, unless golden.json says so."""

from __future__ import annotations

import pytest
from golden import cases, differences, known, machine, outcome

from fedray.experiment.placement import missing_compiler


@pytest.mark.parametrize("name", cases())
def test_a_run_computes_what_it_did(name: str) -> None:
    kind = machine()
    before = known().get(kind, {}).get(name)
    if before is None:
        pytest.skip(f"golden.json has no {name!r} for {kind}: python tests/golden.py --write makes an entry")
    if "engine.compile" in cases()[name].settings and (lacking := missing_compiler()):
        pytest.skip(f"there is {lacking}")
    assert not list(differences(name, before, outcome(cases()[name])))
