"""Label smoothing in training: against torch's own, in loops and stacks, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedray import UserError, simulate

rng = np.random.default_rng(2)
X, TOKENS = rng.normal(size=(40, 5)).astype(np.float32), rng.integers(0, 7, (40, 6))


class Next(nn.Module):
    """A model of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x))


def settings(folder: Any, **keys: Any) -> dict[str, Any]:
    return {
        "run.output": str(folder), "run.rounds": 3, "algorithm.name": "fedavg", "train.local_steps": 1, "train.lr": 0.3,
        "train.batch_size": "full", "engine.kind": "local", "data.clients": 1, "data.partition.kind": "iid",
        "task.label_smoothing": 0.2, **keys,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["classification", "tokens"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_training_is_torchs(kind, vectorize, tmp_path):
    if kind == "tokens":
        y = np.where(rng.random(TOKENS.shape) < 0.3, -100, rng.integers(0, 7, TOKENS.shape))
        x, make = TOKENS, Next
    else:
        x, y, make = X, np.arange(40) % 3, lambda: nn.Linear(5, 3)
    torch.manual_seed(1)
    model = make()
    keys = settings(tmp_path, **{"engine.vectorize": vectorize, "task.kind": kind})
    result = simulate(keys, data=(x, y), test=(x[:8], y[:8]), model=model)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    logged = []
    for _ in range(3):
        model.zero_grad()
        outputs = model(inputs)
        if kind == "tokens":
            each = F.cross_entropy(outputs.movedim(2, 1), targets, reduction="sum", label_smoothing=0.2)
            loss = each / (targets != -100).sum()
        else:
            loss = F.cross_entropy(outputs, targets, label_smoothing=0.2)
        loss.backward()
        logged.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
    np.testing.assert_allclose(result.metrics["train_loss"], logged, rtol=1e-5)
    trained = dict(result.model().named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(trained[name].detach(), parameter.detach(), atol=1e-6)
    plain = F.cross_entropy(model(inputs[:8]).movedim(-1, 1), targets[:8])
    assert result.metrics["test_loss"].iloc[-1] == pytest.approx(plain.item(), rel=1e-5), "tests are not smoothed"


def test_smoothing_changes_what_is_trained(tmp_path):
    bits = {
        simulate(
            settings(tmp_path, **{"run.name": name, "task.label_smoothing": value}),
            data=(X, np.arange(40) % 3), test=(X, np.arange(40) % 3), model=lambda: nn.Linear(5, 3),
        ).summary["model_sha256"]
        for name, value in (("plain", 0.0), ("smooth", 0.1))
    }  # fmt: skip
    assert len(bits) == 2


@pytest.mark.parametrize(
    ("given", "keys", "message"),
    [
        ({"loss": lambda a, b: F.cross_entropy(a, b, reduction="none")}, {}, "not for a loss that you or"),
        ({}, {"task.kind": "regression"}, "task.label_smoothing is for cross-entropy, not for task.kind=regression"),
        ({}, {"task.label_smoothing": 1.0}, "task.label_smoothing must be below 1"),
    ],
)
def test_what_is_refused(given, keys, message, tmp_path):
    y = X[:, 0] if "task.kind" in keys else np.arange(40) % 3
    outputs = 1 if "task.kind" in keys else 3
    with pytest.raises(UserError) as error:
        simulate(settings(tmp_path, **keys), data=(X, y), test=(X, y), model=nn.Linear(5, outputs), **given)
    assert message in str(error.value)
