"""A loss of torch's, handed over with its own mean, is minimised and reported as torch takes that mean."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedray import UserError, simulate

W = torch.tensor([0.1, 0.2, 0.05, 0.3])
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 12)).astype(np.float32), rng.integers(0, 4, 40)
STEPS, LR = 5, 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(12, 4)


def log_model() -> nn.Module:
    return nn.Sequential(model(), nn.LogSoftmax(1))


def ran(folder: Path, loss: Any, module: nn.Module, **changed: Any) -> Any:
    settings = {
        "algorithm.name": "fedavg", "data.clients": 1, "train.batch_size": "full", "train.local_steps": STEPS,
        "train.lr": LR, "run.rounds": 1, "engine.kind": "local", "run.output": str(folder), "task.mode": "min",
        "task.metric": "own",
    }  # fmt: skip
    keys = {key.replace("__", "."): value for key, value in changed.items()}
    return simulate({**settings, **keys}, data=(X, Y), test=(X, Y), model=module, loss=loss, metrics={"own": loss})


LOSSES = {
    "weights": (nn.CrossEntropyLoss(weight=W), model),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), model),
    "weights, ignored": (nn.CrossEntropyLoss(weight=W, ignore_index=2), model),
    "weights, smoothed": (nn.CrossEntropyLoss(weight=W, label_smoothing=0.2), model),
    "plain": (nn.CrossEntropyLoss(), model),
    "nll": (nn.NLLLoss(weight=W, ignore_index=0), log_model),
    "margin": (nn.MultiMarginLoss(weight=W), model),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_is_torchs(tmp_path, name, stacked):
    loss, make = LOSSES[name]
    module = make()
    expected = copy.deepcopy(module)
    optimizer = torch.optim.SGD(expected.parameters(), LR)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(expected(x), y).backward()
        optimizer.step()
    result = ran(tmp_path, loss, module, engine__vectorize=stacked)
    for found, parameter in zip(result.model().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.detach())
    row = result.metrics.iloc[-1]
    assert row["test_loss"] == pytest.approx(float(loss(expected(x), y)), rel=1e-5)
    assert row["test_own"] == pytest.approx(float(loss(expected(x), y)), rel=1e-5)


def test_full_gradients_are_weighed_too(tmp_path):
    """Those of parts of a client's samples, which Mime and SCAFFOLD add up."""
    found = [
        ran(tmp_path / name, nn.CrossEntropyLoss(weight=W), model(), algorithm__name=name, train__local_steps=1)
        for name in ("fedavg", "mime")
    ]
    one, two = (next(iter(each.model().parameters())) for each in found)
    torch.testing.assert_close(one, two)


class Halved(nn.CrossEntropyLoss):
    """Has a mean of its own."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = super().forward(outputs, targets)
        return found / 2 if self.reduction == "mean" else found


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "the loss has reduction='sum'; fedray takes the mean over the samples"),
        (Halved(), "the loss, Halved, takes another mean than that of its samples' losses"),
    ],
)
def test_other_means_are_refused_in_one_line(tmp_path, loss, line):
    with pytest.raises(UserError) as caught:
        ran(tmp_path, loss, model())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_of_a_loss_are_told(tmp_path):
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heat = nn.Parameter(torch.tensor(2.0))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs / self.heat, targets, reduction="none")

    with pytest.warns(UserWarning, match=r"the loss has parameters of its own \(heat\)"):
        ran(tmp_path, Tempered(), model())
