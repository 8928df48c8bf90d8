"""The table of what goes with what says what the algorithms declare, and what it leaves empty is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedray import UserError
from fedray.algorithms import find_algorithm, known_algorithms
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source

TABLE = (Path(__file__).parents[2] / "fedray/algorithms/README.md").read_text()
ASKED = {
    "private": {"model.private": ["head"]},
    "upload": {"train.upload": [{"clip": 1.0}]},
    "memory": {"train.upload": ["sign"]},
    "aggregation": {"train.aggregation": {"kind": "median"}},
    "privacy": {"privacy.noise": 1.0, "privacy.clip": 1.0},
    "buffered": {"system.mode": "buffered", "system.latency_ms": 5},
    "adam": {"train.optimizer": "adam"},
}


def table():
    """What each algorithm goes with, by the table."""
    part = TABLE.partition("## What goes with what\n")[2].partition("\n## ")[0]
    found = {}
    for line in part.splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|")) if line.startswith("| `") else ("",)
        for name in re.findall("`(.*?)`", names):
            private, upload, aggregation, *rest = cells
            both = [bool(aggregation)] * 2
            values = [private == "yes", bool(upload), upload == "yes", *both, *map(bool, rest)]
            found[name] = dict(zip(ASKED, values, strict=True))
    return found


def test_every_algorithm_is_in_the_table_once():
    assert sorted(table()) == sorted(known_algorithms())


@pytest.mark.parametrize("name", sorted(known_algorithms()))
def test_it_says_what_is_refused(name):
    algorithm = find_algorithm(name)()
    keys = {**SETTINGS, "algorithm.name": name}
    if algorithm.needs_public:
        keys["data.public_samples"] = 20
    for what, more in ASKED.items():
        try:
            resolve(load(keys | more), CustomObjects(source=small_source()))
            refused = None
        except UserError as error:
            refused = str(error)
        assert (refused is None) == table()[name][what], f"{what}: {refused}"
