"""Which task follows from targets, and what is said of targets that do not fit theirs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import fedray
from fedray import UserError, simulate
from fedray.data.sources.targets import read_targets

RNG = np.random.default_rng(0)
BITS = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("y", "kind", "classes", "note"),
    [
        (np.array([0, 2, 1]), "classification", 3, None),
        (["ant", "cat", "ant"], "classification", 2, None),
        (np.array([True, False, True]), "classification", 2, None),
        (np.array([0.0, 2.0, 1.0]), "classification", 3, "^warning: .* of type float64, which are taken for 3 classes"),
        (
            np.array([0.5, 2.0, 1.0]),
            "regression",
            1,
            r"because y_train has fractions \(0.5 in row 0\)",
        ),
        (RNG.normal(size=(3, 4)), "regression", 4, r"because y_train \[n, 4\] holds numbers"),
        (np.ones((3, 1)), "regression", 1, r"because y_train \[n, 1\] holds numbers"),
        (np.ones((3, 1)) / 2, "regression", 1, r"because y_train \[n, 1\] holds numbers$"),
        (BITS, "multilabel", 3, r"task.kind=multilabel, because y_train \[n, 3\] holds only 0 and 1; task.kind=reg"),
        (BITS.astype(float), "multilabel", 3, "holds only 0 and 1; task.kind=regression takes numbers for quant"),
        (BITS.astype(bool), "multilabel", 3, "holds only 0 and 1; task.kind=regression takes numbers for quant"),
        (
            np.eye(4),
            "multilabel",
            4,
            r"^warning: .* if that is its class, give y_train.argmax\(1\).*task.kind=regression",
        ),
        (
            np.full((3, 1), 2.0),
            "regression",
            1,
            r"^warning: .*All are whole: if they are classes, .*\(y_train\[:, 0\]\)$",
        ),
        (
            np.ones((3, 1)),
            "regression",
            1,
            r"^warning: .*All are 0 or 1: if they are classes, .*\(y_train\[:, 0\]\); if each is a label, .*multilabel",
        ),
        (
            np.eye(4).reshape(2, 1, 2, 4),
            "regression",
            8,
            r"^warning: .*holds numbers. All are 0 or 1: if each is a label, .* give task.kind=multilabel",
        ),
        (np.eye(4, dtype=bool).reshape(2, 2, 4), "tokens", 2, r"task.kind=tokens, because y_train \[n, 2, 4\] holds"),
        (np.array([[3, 1], [0, 2]]), "tokens", 4, r"task.kind=tokens, because y_train \[n, 2\] holds whole numbers"),
        # a table that was filtered
        (
            pd.Categorical(["ant", "cat", "ant"], ["ant", "bee", "cat"]),
            "classification",
            3,
            "^warning: no sample is of class bee, as the categories of y_train have it: the model has outputs",
        ),
        (pd.Categorical(["ant", "cat", "ant"]), "classification", 2, None),
        (np.zeros((2, 3, 4), int), "tokens", 1, r"y_train \[n, 3, 4\] holds whole numbers"),
    ],
)
def test_the_task_follows_from_the_targets(y: Any, kind: str, classes: int, note: str | None) -> None:
    found = read_targets("it", {"y_train": y, "y_test": y})
    assert (found.kind, found.classes) == (kind, classes)
    assert found.arrays["y_train"].dtype == (np.int64 if kind in ("classification", "tokens") else np.float32)
    assert found.notes == () if note is None else re.search(note, found.notes[0])


@pytest.mark.parametrize(
    ("y", "kind", "message"),
    [
        (np.array([[1], [2]]), "auto", r"y_train has shape \[2, 1\]; give classes as \[n\] \(y_train\[:, 0\]\)"),
        (
            np.array([0.5, np.nan]),
            "regression",
            r"a target that is no finite number in row 1 \(1 such rows\)",
        ),
        (np.array([0.5, 1e300]), "regression", "no finite number in row 1"),
        (["a", "b"], "regression", "y_train must hold numbers"),
        (
            np.array([[0, 1], [2, 0]]),
            "multilabel",
            "2 in row 1; the labels of task.kind=multilabel are 0 or 1",
        ),
        (np.array([0, 1]), "multilabel", r"y_train has shape \[2\]; task.kind=multilabel needs \[n, labels\]"),
        (np.array([0, 1]), "tokens", r"y_train has shape \[2\]; task.kind=tokens needs \[n, ...\], a target per token"),
        (
            np.array([[0, 1], [0, -3]]),
            "tokens",
            "label -3 in row 1.*or task.ignore_index=-100 for tokens",
        ),
        ([1, 10**400], "auto", "it: y_train has a number beyond int64 in row 1"),
        (np.array([[0, 1], [0, 1.5]]), "tokens", "y_train must hold whole numbers, not 1.5 as in row 1"),
    ],
)
def test_targets_that_do_not_fit_their_task(y: Any, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_targets("it", {"y_train": y}, kind)


def test_targets_of_unequal_shapes_and_knuser_classes() -> None:
    with pytest.raises(UserError, match=r"targets of y_test have shape \[2\], those of y_train \[3\]"):
        read_targets("it", {"y_train": np.ones((4, 3)) / 2, "y_test": np.ones((4, 2)) / 2})
    assert read_targets("it", {"y_train": np.array([[1, 2], [0, -7]])}, "tokens", 9, None, -7).classes == 9
    with pytest.raises(UserError, match="label 4 in row 0"):
        read_targets("it", {"y_train": np.array([[4, 2]])}, "tokens", 3)


@pytest.mark.parametrize(
    ("y", "keys", "found"),
    [
        ([[0, 255], [0, 0]], {}, ["no token has label 1, 2, .* and 249 others.*; if 255 .*task.ignore_index=255$"]),
        ([[0, 255], [0, 1]], {"ignored": 255}, []),
        ([[0, 255], [0, 3]], {"ignored": 255}, ["the largest label is 3, so that there are 4 classes, .* label 1, 2:"]),
        ([[2, 1], [3, 0]], {"ignored": 0}, []),
        ([[0, 255], [0, 0]], {"classes": 256}, []),
        # words of a vocabulary
        ([[0, 5000], [0, 3]], {}, []),
    ],
)  # fmt: skip
def test_masks_with_gaps_are_warned_about(y: Any, keys: dict[str, Any], found: list[str]) -> None:
    notes = read_targets("it", {"y_train": np.array(y)}, "tokens", **keys).notes
    assert len(notes) == len(found)
    assert all(re.search(text, note) for text, note in zip(found, notes, strict=True))


def test_outputs_for_fewer_classes_than_a_mask_with_gaps(tmp_path):
    x, y = RNG.normal(size=(20, 3, 2, 2)).astype(np.float32), RNG.integers(0, 2, (20, 2, 2)) * 255
    settings = {**SETTINGS, "run.output": str(tmp_path), "run.name": "masks"}
    with pytest.raises(UserError, match=r"not \[b, 2, 2, 2\] \(labels must have no gaps; if 255 .*ignore_index=255\)"):
        simulate(settings, data=(x, y), test=(x, y), model=nn.Conv2d(3, 2, 1))


def test_masks_may_be_booleans() -> None:
    bits = np.array([[[False, True], [True, True]]])
    found = read_targets("it", {"y_train": bits, "y_test": bits.astype(int)})
    assert (found.kind, found.classes) == ("tokens", 2)
    assert np.array_equal(found.arrays["y_train"], bits.astype(int))


X = RNG.normal(size=(60, 5)).astype(np.float32)
OWNERS = np.arange(60) % 4
SETTINGS = {
    "algorithm.name": "fedavg", "run.rounds": 2, "engine.kind": "local", "train.local_steps": 2, "data.clients": 3,
}  # fmt: skip


def run(
    folder: Any, y: np.ndarray, outputs: int | nn.Module = 1, call: dict[str, Any] | None = None, **keys: Any
) -> Any:
    model = outputs if isinstance(outputs, nn.Module) else nn.Linear(5, outputs)
    settings = {**SETTINGS, "run.output": str(folder)} | {key.replace("__", "."): value for key, value in keys.items()}
    return simulate(settings, data=(X[:40], y[:40]), test=(X[40:], y[40:]), model=model, **(call or {}))


def of_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


@pytest.mark.parametrize(
    ("outputs", "call", "keys", "message"),
    [
        (3, {}, {}, r"model Linear must give predictions \[b\] or \[b, 1\], not \[b, 3\]"),
        (1, {"loss": of_batch}, {}, r"the loss must give one value per sample, \[b\], not a tensor of shape \[2, 2\]"),
        (1, {}, {"task__kind": "other"}, r"task.kind=other needs a user-defined loss: simulate\(..., loss=...\)"),
        (1, {}, {"task__metric": "absolut"}, "task.metric: there is no metric 'absolut'"),
        (1, {}, {"task__metric": "mean_absolut_error"}, "did you mean 'mean_absolute_error'"),
        (1, {"metrics": {"own": absolute}}, {"task__metric": "own"}, "say whether more of your metric 'own' is better"),
        (1, {}, {"task__mode": "max"}, "task.mode=max, but of mean_squared_error less is better"),
        (1, {"metrics": {"loss": absolute}}, {}, "metric 'loss' has the name of one of fedray's metrics"),
        (
            1,
            {},
            {"data__partition__kind": "dirichlet"},
            "dirichlet goes by classes, and the targets are none",
        ),
        (1, {}, {"task__kind": "classification"}, "y_train must hold whole numbers"),
        (1, {}, {"task__kind": "regresion"}, "task.kind"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(outputs, call, keys, message, tmp_path):
    with pytest.raises(UserError, match=message) as raised:
        run(tmp_path, X[:, 0] * 2, outputs, call, **keys)
    assert "\n" not in str(raised.value)


def test_other_outputs_need_a_loss_and_are_compared_by_it(tmp_path, capsys):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.back = nn.Linear(5, 2), nn.Linear(2, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            code = self.code(x)
            return code, self.back(code)

    def both(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return (outputs[1].sum(1) - targets).square() + outputs[0].square().mean(1)

    result = run(tmp_path, X[:, 0] * 2, Both(), {"loss": both, "verbose": True}, train__lr=0.05, run__rounds=9)
    assert "task.kind=other, because model Both must give predictions" in capsys.readouterr().out
    assert (result.summary["metric"], result.summary["mode"]) == ("loss", "min")
    assert result.summary["final"] == result.metrics["test_loss"].iloc[-1] < result.metrics["test_loss"].iloc[0]
    x, y = torch.from_numpy(X[40:]), torch.from_numpy(X[40:, 0] * 2)
    assert result.summary["final"] == pytest.approx(float(both(result.model()(x), y).mean().detach()), rel=1e-5)


def test_without_classes_clients_get_equal_parts(tmp_path):
    result = run(tmp_path, X[:, 0] * 2)
    assert sorted(result.clients["samples"].unique()) == [13, 14]


@pytest.mark.slow
def test_a_sweep_follows_the_main_metric(tmp_path, ray_cluster):
    space = {
        "base": {**SETTINGS, "run.rounds": 2, "engine.kind": "ray", "engine.cpus_per_actor": 0.5, "engine.actors": 1},
        "spaces": {"one": {"train.lr": {"grid": [0.001, 0.1]}}},
        "tune": {"name": "one", "output": str(tmp_path)},
    }
    y = X[:, 0] * 2
    (result,) = fedray.tune(space, data=(X[:40], y[:40]), test=(X[40:], y[40:]), model=nn.Linear(5, 1))
    trials = result.trials.set_index("train.lr")
    assert trials.loc[0.1, "validation_mean_squared_error"] < trials.loc[0.001, "validation_mean_squared_error"]
    assert "lr: 0.1" in result.best[0].read_text()
    with pytest.raises(UserError, match=r"tune.objective: there is no column 'validation_accuracy' in this task"):
        fedray.tune(
            space, ["tune.objective=validation_accuracy", "tune.name=two"], data=(X[:40], y[:40]),
            test=(X[40:], y[40:]), model=nn.Linear(5, 1),
        )  # fmt: skip
