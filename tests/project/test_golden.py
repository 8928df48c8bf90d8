"""No change has altered what runs compute, unless golden.json says so."""

from __future__ import annotations

import warnings

import pytest
from golden import ONE_SAMPLE, cases, differences, far_off, known, known_values, machine, outcome

from fedray.experiment.placement import missing_compiler


@pytest.fixture(scope="module", autouse=True)
def said_what_is_compared() -> None:
    if machine() not in known():
        warnings.warn(f"golden.json has no entry for {machine()}: values are compared but for rounding", stacklevel=1)


@pytest.mark.parametrize("name", cases())
def test_a_run_computes_what_it_did(name: str) -> None:
    """To the bit on a kind of machine that golden.json lists, and but for rounding on any other."""
    if "engine.compile" in cases()[name].settings and (lacking := missing_compiler()):
        pytest.skip(f"there is {lacking}")
    before = known().get(machine(), {}).get(name)
    found, values = outcome(cases()[name])
    wrong = far_off(name, found, values) if before is None else differences(name, before, found)
    if wrong is None:
        pytest.skip(f"golden.json has no {name!r}: python tests/golden.py --write makes an entry")
    assert not list(wrong)


def test_what_counts_as_far_off() -> None:
    name = "scaffold"
    entry, values = list(known().values())[-1][name], known_values()[name]

    def wrong(changes: dict[str, float], model: list[float]) -> list[str]:
        return list(far_off(name, entry | changes, model) or ())

    assert not wrong({}, values)
    assert not wrong({"test_loss": entry["test_loss"] * 1.0005}, [value + 0.0005 * values[0] for value in values])
    assert wrong({"test_loss": entry["test_loss"] * 1.002}, values)
    assert wrong({"flops": entry["flops"] * 1.1}, values)
    assert not wrong({"test_accuracy": entry["test_accuracy"] - 0.9 * ONE_SAMPLE}, values)
    assert wrong({"test_accuracy": entry["test_accuracy"] - 1.5 * ONE_SAMPLE}, values)
    assert wrong({}, [values[0] * 1.01, *values[1:]])
    assert wrong({}, [*values[:-1], values[-1] + 0.01 * values[0]])


def test_every_case_has_values() -> None:
    assert known_values().keys() == cases().keys()
