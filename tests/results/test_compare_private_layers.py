"""fedray compare: runs with layers that stay at the clients beside others."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from small_runs import run

import fedray
from fedray.results.clients import distribution, last_scores
from fedray.results.pictures import curves_figure
from fedray.results.tables import tables_of


def test_personal_models_stand_beside_the_global_one(tmp_path):
    """FedPer's global model has heads that nobody has trained, and its personal ones are what clients get."""
    keys = {"run__eval_clients": "all", "run__finetune_steps": 2, "run__rounds": 3}
    for algorithm in ("fedavg", "fedper"):
        for seed in range(3):
            run(tmp_path / f"{algorithm}-{seed}", algorithm=algorithm, run__seed=seed, **keys)
    found = fedray.compare(tmp_path)
    (environment,) = found.environments
    (table,) = [each for each in tables_of(found, environment) if "single clients" in each.title]
    names = ["fedavg", "fedavg, fine-tuned", "fedper", "fedper, personal models", "fedper, fine-tuned"]
    assert sorted(table.cells[""]) == sorted(names)
    finals = [
        pd.read_csv(path)["clients_personal_accuracy_mean"].iloc[-1] for path in tmp_path.glob("fedper-*/*/metrics.csv")
    ]
    line = next(row for row in environment.rows if row["group"] == "fedper")
    assert line["clients_personal_mean"] == pytest.approx(np.mean(finals))
    shown = table.cells.set_index("").loc["fedper, personal models", "mean over clients, %"]
    assert shown.startswith(f"{100 * np.mean(finals):.2f} ±")
    assert any(note.startswith("the global model of fedper has initial values") for note in environment.notes)
    assert f"{table.title}:" in repr(found).splitlines()
    # a difference between global models means nothing here, nor does a speed-up, and no legend hides whose curve it is
    assert "differences" not in line
    reached, *_ = tables_of(found, environment)
    assert reached.cells.set_index("").loc["fedper"].iloc[-1] == "private layers"
    assert found.targets.set_index("group").loc["fedper", "rounds_speedup"] != 1
    legend = {text.get_text() for text in curves_figure(found).axes[0].get_legend().get_texts()}
    assert legend == {"fedavg", "fedper (global model)"}
    panels = {axes.get_ylabel(): axes for axes in curves_figure(found).axes}
    assert [*panels] == [
        "test accuracy, %", "test accuracy of personal models, mean, %",
        "test accuracy of fine-tuned models, mean, %", "test loss",
    ]  # fmt: skip
    (curve,) = panels["test accuracy of personal models, mean, %"].get_lines()
    assert curve.get_label() == "fedper"
    assert curve.get_ydata()[-1] == pytest.approx(100 * np.mean(finals))
    best = np.sort(
        [np.sort(last_scores(path.parent)["personal_accuracy"]) for path in tmp_path.glob("fedper-*/*/metrics.csv")]
    )
    group = next(each for each in environment.groups if each.label == "fedper")
    assert distribution(group.runs, found.measure)[0] == pytest.approx(best[:, 0].mean())


def test_layers_that_stay_or_are_not_trained_make_groups(tmp_path):
    """The model is the same, so that FedAvg with a private head stands beside FedAvg and FedPer."""
    ways = {
        "fedavg": {},
        "fedavg, private=[head]": {"model__private": ["head"]},
        "fedavg, trainable=[head]": {"model__trainable": ["head"]},
        "fedper": {"algorithm": "fedper"},
    }
    made = {name: run(tmp_path / name, run__rounds=1, **keys).folder for name, keys in ways.items()}
    (environment,) = fedray.compare(*made.values()).environments
    assert {group.label for group in environment.groups} == {*ways}
    assert environment.baseline is not None
    assert environment.baseline.label == "fedavg"
    # those with private layers come last, whatever their global models reach
    assert [group.has_private_layers for group in environment.groups] == [False, False, True, True]
    rows = {row["group"]: row for row in environment.rows}
    assert rows["fedavg, private=[head]"]["finals"] == rows["fedper"]["finals"]
    (alone,) = fedray.compare(made["fedper"], made["fedavg, private=[head]"], baseline="fedper").environments
    assert all("differences" not in row for row in alone.rows)
