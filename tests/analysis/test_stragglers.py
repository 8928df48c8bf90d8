"""What analysis/stragglers.py compares: the slow devices, and who has which digits."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedray.data.sources.source import Source


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "analysis")
    return importlib.import_module("stragglers")


def test_one_tenth_is_ten_times_as_slow(program, tmp_path):
    table = pd.read_csv(program.devices(tmp_path))
    assert table.client.tolist() == list(range(100))
    for column, factor in (("flops_per_second", 0.1), ("down_mbps", 0.1), ("up_mbps", 0.1), ("latency_ms", 10)):
        assert table[column][:10].to_numpy() == pytest.approx(factor * table[column][10])
        assert table[column][10:].nunique() == 1


@pytest.mark.parametrize("world", ["alike", "apart"])
def test_who_has_the_digits(program, world):
    y = np.repeat(np.arange(10), 300)
    x = np.zeros((len(y), 1), np.float32)
    source = program.owned(Source("digits", x_train=x, y_train=y, x_test=x, y_test=y, classes=10), world)
    last, slow = np.isin(y, (8, 9)), source.client_train < 10
    assert set(source.client_train) == set(range(100))
    if world == "apart":
        assert (last == slow).all()
    else:
        assert 0.05 < slow[last].mean() < 0.15


def test_what_is_said_of_a_run(program, tmp_path):
    rows = pd.DataFrame({
        "round": [1, 2, 3], "virtual_seconds": [1.0, 2.0, 3.0], "test_accuracy": [0.5, 0.91, 0.95],
        "joules": [5.0, 9.0, 20.0],
    })  # fmt: skip
    clients = {
        "round": [1, 1, 2, 3, 4],
        "client": [3, 50, 60, 70, 3],
        "outcome": ["used", "late", "used", "used", "used"],
    }
    pd.DataFrame(clients).to_parquet(tmp_path / "clients.parquet")

    class Run:
        pass

    Run.folder, Run.rows = tmp_path, rows
    found = program.row_of(Run)
    assert found["seconds to 90 %"] == 2
    assert (found["updates"], found["answers used"], found["joules"]) == (3, 3, 20)
    assert found["test accuracy"] == pytest.approx(95)
    assert found["of slow clients, %"] == pytest.approx(100 / 3)
