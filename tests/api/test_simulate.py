"""simulate takes a user's own data, model, loss, metrics and callbacks, and tells where one of them fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from small_runs import COLUMNS, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedray import ClientError, Report
from fedray.testing.contracts import assert_same, small_source


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[i]), int(self.y[i])


def test_own_arrays_and_datasets_are_the_same_run(tmp_path):
    source = small_source()
    given = run(tmp_path / "source")
    arrays = run(
        tmp_path / "arrays", data=(source.x_train, source.y_train), call={"test": (source.x_test, source.y_test)}
    )
    pairs = run(
        tmp_path / "dataset",
        data=Pairs(source.x_train, source.y_train),
        call={"test": Pairs(source.x_test, source.y_test)},
    )
    assert_same(given, arrays)
    assert_same(given, pairs)


def test_own_clients_in_a_dataframe_or_as_an_array(tmp_path):
    source = small_source()
    owners = np.arange(360) % 7
    names = np.array(["f", "a", "e", "b", "g", "c", "d"])[owners]
    features = [f"x{k}" for k in range(12)]
    frame = pd.DataFrame(source.x_train, columns=features).assign(label=source.y_train, client=names)
    test = pd.DataFrame(source.x_test, columns=features).assign(label=source.y_test)
    keys = {"data__partition__kind": "natural", "data__clients": None, "data__public_samples": 0}
    framed = run(tmp_path / "frame", data=frame, call={"test": test}, **keys)
    columns = {"label": "species", "client": "station"}
    renamed = {"test": test.rename(columns=columns), "label_column": "species", "client_column": "station"}
    assert_same(framed, run(tmp_path / "renamed", data=frame.rename(columns=columns), call=renamed, **keys))
    arrays = run(
        tmp_path / "arrays",
        data=(source.x_train, source.y_train, names),
        call={"test": (source.x_test, source.y_test)},
        **keys,
    )
    assert_same(framed, arrays)
    # clients are numbered in the order of their names
    sizes = pd.Series(names).value_counts().sort_index().to_numpy()
    rows = framed.clients.drop_duplicates("client")
    assert (rows["samples"].to_numpy() == sizes[rows["client"]]).all()


class Mine(nn.Module):
    """Takes the number of classes from the data, and its width from the configuration."""

    def __init__(self, classes: int, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(self.first(x)))


def test_an_own_model_as_a_class_with_options(tmp_path):
    keys = {"model__name": None, "model__hidden": None, "model__width": 5}
    result = run(tmp_path, call={"model": Mine}, **keys)
    assert result.summary["parameters"] == 12 * 5 + 5 + 5 * 4 + 4
    assert isinstance(result.model(), Mine)
    # its initial weights come from run.seed alone
    torch.manual_seed(123)
    assert torch.equal(result.module().first.weight, result.module().first.weight)


def test_an_own_model_as_an_object_starts_where_it_is_and_is_left_alone(tmp_path):
    module = Mine(4)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    result = run(tmp_path, call={"model": module}, model__name=None, model__hidden=None, train__lr=1e-12)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        torch.testing.assert_close(result.model().state_dict()[name], value)


def test_an_own_loss_and_metrics(tmp_path):
    """The loss ignores class 0, so that nobody can learn it; the two metrics are easily checked."""

    def loss(logits, targets):
        return F.cross_entropy(logits, targets, reduction="none") * (targets != 0)

    def brier(logits, targets):
        return (torch.softmax(logits, 1) - F.one_hot(targets, 4)).square().sum(1)

    def top2(logits, targets):
        return (logits.topk(2, dim=1).indices == targets[:, None]).any(1)

    result = run(tmp_path, call={"loss": loss, "metrics": {"brier": brier, "top2": top2}})
    source, row = small_source(), result.metrics.iloc[-1]
    assert list(result.metrics.columns) == [*COLUMNS, "test_brier", "test_top2"]
    x, y = torch.from_numpy(source.x_test), torch.from_numpy(source.y_test)
    with torch.no_grad():
        logits = result.model()(x)
    assert row["test_brier"] == pytest.approx(float(brier(logits, y).mean()), rel=1e-5)
    assert row["test_top2"] == pytest.approx(float(top2(logits, y).float().mean()))
    assert row["test_loss"] == pytest.approx(float(loss(logits, y).mean()), rel=1e-5)
    assert not (logits.argmax(1) == 0).any()
    accumulator = EventAccumulator(str(result.folder))
    accumulator.Reload()
    assert accumulator.Scalars("metrics/test_brier")[-1].value == pytest.approx(row["test_brier"])


def test_torchs_loss_modules_are_taken_as_they_are_meant(tmp_path):
    assert_same(run(tmp_path / "own", call={"loss": nn.CrossEntropyLoss()}), run(tmp_path / "default"))


def test_callbacks_see_every_round_and_may_stop_the_run(tmp_path):
    reports: list[Report] = []
    result = run(tmp_path, call={"callbacks": [reports.append, lambda report: report.round == 4]})
    assert [report.round for report in reports] == [1, 2, 3, 4]
    assert result.summary["status"] == "interrupted"
    assert result.summary["rounds"] == 4
    for report, (_, row) in zip(reports, result.metrics.iterrows(), strict=True):
        assert report.metrics["test_accuracy"] == row["test_accuracy"]
        assert report.metrics["train_loss"] == row["train_loss"]
    finished = run(tmp_path, call={"callbacks": [reports.append]})
    assert [report.round for report in reports] == [1, 2, 3, 4, 5, 6]
    assert_same(finished, run(tmp_path / "whole"))


def test_the_exception_of_a_client_is_told_with_its_place(tmp_path):
    calls = []

    def loss(logits, targets):
        calls.append(1)
        # after the trial pass of the beginning, in the middle of the training
        if logits.requires_grad and len(calls) > 100:
            raise ZeroDivisionError("my own mistake")
        return F.cross_entropy(logits, targets, reduction="none")

    with pytest.raises(ClientError, match=r"client \d+ failed in phase train of round \d+ on ") as caught:
        run(tmp_path, call={"loss": loss})
    assert "my own mistake" in str(caught.value)
    assert "test_simulate.py" in str(caught.value)
