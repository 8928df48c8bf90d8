"""The glossary names every column, key and tag that a run with everything in it writes, and with it a unit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedray import FedrayWarning, RunResult, simulate
from fedray.testing.contracts import SETTINGS, small_source

GLOSSARY = Path(__file__).parents[2] / "fedray" / "tracking" / "README.md"

SCORES = {
    "run.eval_clients": "all", "run.finetune_steps": 2, "run.eval_train_samples": 50, "run.targets": [0.1, 1.0],
    "data.validation_samples": 40, "engine.profile": True, "run.diagnostics": True,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "pfedmo": {},
    "feddyn": {"system.latency_ms": 5, "system.watts": 3},
    "feddyn, its average evaluated": {"algorithm.eval": "avg_selected"},
    "fedsiam_da": {"model.proj_dim": 8},
}
"""Algorithms that bring columns of their own."""


OF_METRICS = ("Columns of metrics.csv", "Scores on clients' own test shares", "Drift of the clients' models")
"""The tables with columns of metrics.csv."""


def tables() -> dict[str, dict[str, list[str]]]:
    """The names of each table of the glossary, by the table's heading, with the rest of their row."""
    text = GLOSSARY.read_text().partition("\n## Glossary\n")[2]
    found: dict[str, dict[str, list[str]]] = {}
    for part in text.split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        rows = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines() if line.startswith("| `")
        ]
        found[heading.replace("`", "")] = {name: row[1:] for row in rows for name in re.findall(r"`(.*?)`", row[0])}
    return found


def unknown(names: Iterable[str], *headings: str) -> list[str]:
    """Those of ``names`` that no row of the tables with these headings has, as it is or as a form with <...>."""
    known = [name for heading in headings for name in tables()[heading]]
    metric = "(<metric>|f1|perplexity|mean_squared_error|mean_absolute_error|sharpness)"
    forms = [re.sub(r"<(?!metric>)\w+>", r"[\\w<>]+", name).replace("<metric>", metric) for name in known]
    return [name for name in names if not any(re.fullmatch(form, name) for form in forms)]


def keys_of(summary: Mapping[str, Any]) -> list[str]:
    """The keys of summary.json, and those one level below."""
    below = {"targets": next(value for value in summary["targets"].values() if value), "machine": summary["machine"]}
    return [*summary, *(f"{key}.{name}" for key, inner in below.items() for name in inner)]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run whose clients, classes and metrics have names."""
    folder = tmp_path_factory.mktemp("glossary")
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 12, generator=rng), torch.randint(0, 3, (400,), generator=rng)
    frame = pd.DataFrame(x.numpy()).rename(columns=str)
    frame["label"] = pd.Series(y.numpy()).map({0: "cat", 1: "dog", 2: "hen"})
    frame["client"] = [f"phone {number % 9}" for number in range(len(frame))]

    def sharpness(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return logits.softmax(1).max(1).values

    settings = {key: value for key, value in SETTINGS.items() if key not in ("data.partition.kind", "data.clients")}
    settings |= {"algorithm.name": request.param.split(",")[0], "run.output": str(folder), "run.rounds": 2}
    settings |= SCORES | RUNS[request.param]
    return simulate(settings, data=frame[:300], test=frame[300:], metrics={"sharpness": sharpness})


def test_every_column(run: RunResult) -> None:
    assert not unknown(run.metrics.columns, *OF_METRICS)
    assert not unknown(pd.read_parquet(run.folder / "layers.parquet").columns, "Columns of layers.parquet")
    assert not unknown(pd.read_parquet(run.folder / "partition.parquet").columns, "Columns of partition.parquet")
    assert not unknown(run.clients.columns, "Columns of clients.parquet")
    assert not unknown(run.evaluation.columns, "Columns of evaluation.parquet")
    assert not unknown(run.profile.columns, "Columns of profile.csv")
    assert not unknown(keys_of(run.summary), "Keys of summary.json")
    assert {"test_sharpness", "finetuned_accuracy", "clients_accuracy_mean"} <= {*run.metrics}
    assert {"client_name", "loss"} <= {*run.clients}
    assert "class_names" in run.summary


def test_every_tag(run: RunResult) -> None:
    events = EventAccumulator(str(run.folder)).Reload()
    tags = [*events.Tags()["scalars"], *events.Tags()["histograms"]]
    assert {"metrics/test_sharpness", "profile/waiting", "clients/loss", "final/best_accuracy"} <= {*tags}
    assert not unknown(tags, "TensorBoard tags")
    if run.metrics["virtual_seconds"].notna().any():
        (first, second) = events.Scalars("virtual_time/accuracy/test")
        assert [first.wall_time, second.wall_time] == pytest.approx(run.metrics["virtual_seconds"].tolist())
        assert [first.step, second.step] == [1, 2]


def test_columns_of_a_private_run(tmp_path: Path) -> None:
    private = {"privacy.noise": 1.0, "privacy.clip": 1.0, "run.rounds": 1, "run.output": str(tmp_path)}
    run = simulate({**SETTINGS, "algorithm.name": "fedavg", **private}, data=small_source())
    assert {"epsilon", "clip_norm"} <= {*run.metrics}
    assert not unknown(run.metrics.columns, *OF_METRICS)
    assert not unknown(EventAccumulator(str(run.folder)).Reload().Tags()["scalars"], "TensorBoard tags")


def test_keys_of_private_layers(tmp_path: Path) -> None:
    keys = {"algorithm.name": "fedper", "run.eval_clients": "all", "run.rounds": 2, "run.targets": [0.1]}
    with pytest.warns(FedrayWarning, match=r"final and test_accuracy say little: look at personalized_accuracy"):
        run = simulate({**SETTINGS, **keys, "run.output": str(tmp_path)}, data=small_source())
    summary, last = run.summary, run.metrics.iloc[-1]
    assert not unknown(keys_of(summary), "Keys of summary.json")
    for name in ("personalized_accuracy", "clients_personal_accuracy_mean", "clients_personal_accuracy_std"):
        assert summary[f"final_{name}"] == last[name]
    assert 0 < summary["private_parameters"] < summary["parameters"]
    assert f"personal accuracy {summary['final_personalized_accuracy']:.4g}" in repr(run)


def test_every_row_has_a_meaning_and_a_place_for_its_unit() -> None:
    for heading, rows in tables().items():
        assert rows, heading
        for name, rest in rows.items():
            assert len(rest) == 2, f"{heading}: {name}"
            assert rest[0], f"{heading}: {name}"


def test_what_is_not_in_it_is_found() -> None:
    assert unknown(["test_accuracy", "test_sharpness", "test_speed"], "Columns of metrics.csv") == ["test_speed"]
    assert unknown(["accuracy/averaged", "oddity/x"], "TensorBoard tags") == ["oddity/x"]
