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
BRIEF = {
    "algorithm.name": "fedavg", "data.clients": 1, "train.batch_size": "full", "train.local_steps": 1, "train.lr": LR,
    "run.rounds": 1, "engine.kind": "local",
}  # fmt: skip


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


class Wrapped(nn.Module):
    """Returns the weighted mean of a loss of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=W)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(outputs, targets)
        return found


class Halved(nn.CrossEntropyLoss):
    """Has a mean of its own."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = super().forward(outputs, targets)
        return found / 2 if self.reduction == "mean" else found


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "the loss has reduction='sum'; fedray takes the mean over the samples"),
        (nn.CrossEntropyLoss(reduction="sum"), "a train.lr that is as many times larger as a mini-batch has samples"),
        (nn.KLDivLoss(reduction="batchmean"), "nn.functional.kl_div(outputs, targets, reduction='none').sum(1)"),
        (Wrapped(), "fedray takes the plain mean; a weighted loss of torch's is handed over itself (loss=nn.Cross"),
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

    with pytest.warns(UserWarning, match=r"the loss has parameters \(heat\)"):
        ran(tmp_path, Tempered(), model())


def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class Penalised(nn.Linear):
    """Has a loss that reads its own parameters, which are not those of the copies that are trained."""

    def task_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return entropy(outputs, targets) + self.weight.square().sum()


class Keeping(nn.Linear):
    """Has a loss that reads what the forward pass has kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalties = [x.mean()]
        return super().forward(x)

    def task_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return entropy(outputs, targets) + self.penalties[0]


class Tracking(nn.Sequential):
    """Has a loss that reads running statistics."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.BatchNorm1d(sizes[0]), nn.Linear(*sizes))

    def task_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return entropy(outputs, targets) + self[0].running_mean.sum()  # type: ignore[operator,union-attr]


class Constant(nn.Linear):
    """Has a loss that reads what stays as it is."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("factor", torch.tensor(2.0))
        self.shift = torch.tensor(1.0)

    def task_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return entropy(outputs, targets) * self.factor + self.shift  # type: ignore[operator]


def penalised(module: nn.Linear, detached: bool) -> Any:
    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.detach().square().sum() if detached else p.square().sum() for p in module.parameters())
        return entropy(outputs, targets) + 0.5 * penalty

    return own


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("what", ["loss", "metric"])
def test_a_loss_or_metric_that_reads_the_model_is_refused(tmp_path, what, detached):
    module = model()
    own = penalised(module, detached)
    call = {"loss": own} if what == "loss" else {"metrics": {"own": own}}
    with pytest.raises(UserError, match="uses the model's parameter weight, but fedray trains copies"):
        simulate(BRIEF | {"run.output": str(tmp_path)}, data=(X, Y), test=(X, Y), model=module, **call)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Penalised, "the loss uses the model's parameter weight, but fedray trains copies of the model"),
        (Keeping, "the loss uses penalties, which a forward pass leaves in the model"),
        (Tracking, "the loss uses 0.running_mean, which a forward pass leaves in the model"),
        (Constant, None),
    ],
)
@pytest.mark.parametrize("as_class", [False, True])
def test_a_models_own_loss_reads_nothing_that_is_trained(tmp_path, make, line, as_class):
    given = (lambda: make(12, 4)) if as_class else make(12, 4)
    if line is None:
        assert simulate(BRIEF | {"run.output": str(tmp_path)}, data=(X, Y), test=(X, Y), model=given).summary
        return
    with pytest.raises(UserError) as caught:
        simulate(BRIEF | {"run.output": str(tmp_path)}, data=(X, Y), test=(X, Y), model=given)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_users_own_pass_has_left_is_not_read(tmp_path):
    module = Keeping(12, 4)
    module(torch.from_numpy(X))
    with pytest.raises(UserError, match="the loss uses penalties, which a forward pass leaves"):
        ran(tmp_path, lambda outputs, targets: entropy(outputs, targets) + module.penalties[0], module)


class AroundModel(nn.CrossEntropyLoss):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, targets) + sum(p.square().sum() for p in self.module.parameters())


def test_a_loss_module_that_holds_the_model_is_refused(tmp_path):
    module = model()
    with pytest.raises(UserError, match="the loss uses the model's parameter weight"):
        ran(tmp_path, AroundModel(module), module)


def test_a_loss_may_use_sparse_tensors(tmp_path):
    eye = torch.eye(4).to_sparse()
    assert ran(tmp_path, lambda outputs, targets: entropy(torch.sparse.mm(eye, outputs.T).T, targets), model()).summary


def test_parameters_that_a_function_uses_are_told(tmp_path):
    heat = nn.Parameter(torch.tensor(2.0))
    with pytest.warns(UserWarning, match=r"the loss has parameters, which stay as they are"):
        ran(tmp_path, lambda outputs, targets: entropy(outputs / heat, targets), model())


def natural_log(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Is NaN where outputs are no probabilities."""
    return -(targets * outputs.log() + (1 - targets) * (1 - outputs).log()).mean(1)


@pytest.mark.parametrize("loss", [nn.BCELoss(), natural_log])
def test_a_loss_of_probabilities_is_tried_on_those_of_the_model(tmp_path, loss):
    labels = (X[:, :3] > 0).astype(np.float32)
    module = nn.Sequential(nn.Linear(12, 3), nn.Sigmoid())
    expected = copy.deepcopy(module)
    x, y = torch.from_numpy(X), torch.from_numpy(labels)
    optimizer = torch.optim.SGD(expected.parameters(), LR)
    nn.BCELoss()(expected(x), y).backward()
    optimizer.step()
    settings = BRIEF | {"run.output": str(tmp_path), "task.kind": "multilabel"}
    result = simulate(settings, data=(X, labels), test=(X, labels), model=module, loss=loss)
    for found, parameter in zip(result.model().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.detach())
    with pytest.raises(UserError, match=r"the loss failed on outputs .* input should be between 0 and 1"):
        simulate(settings, data=(X, labels), test=(X, labels), model=nn.Linear(12, 3), loss=nn.BCELoss())


def test_such_a_loss_is_checked_as_others_are(tmp_path):
    """A mean over the batch shows on the model's own outputs too."""
    labels = (X[:, :3] > 0).astype(np.float32)
    module = nn.Sequential(nn.Linear(12, 3), nn.Sigmoid())
    settings = BRIEF | {"run.output": str(tmp_path), "task.kind": "multilabel"}

    def of_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(outputs, targets).expand(len(outputs))

    with pytest.warns(UserWarning, match="the loss of a sample depends on the other samples"):
        simulate(settings, data=(X, labels), test=(X, labels), model=module, loss=of_batch)
