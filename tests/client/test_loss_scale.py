"""train.precision=fp16: gradients in half precision, with loss scaling."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedray import UserError, simulate
from fedray.core.batches import Batch
from fedray.core.task import Task
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.loss_scale import FIRST, LossScale
from fedray.gradients.network import Network
from fedray.gradients.stack import StackNetwork
from fedray.models.precision import precision_obstacle
from fedray.testing.contracts import SETTINGS, assert_same, small_source

X, Y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]] * 2)


def network_of(kind: type[Network], module: nn.Module, precision: str = "fp16") -> Network:
    return kind(copy.deepcopy(module), precision=precision)


def gradient(network: Network, scale: LossScale | None, faint: float = 1.0) -> torch.Tensor:
    """Returns the gradients of a loss that is ``faint`` times the cross-entropy."""
    at = network.loaded().rows(2)
    rule = lambda outputs, losses: faint * losses  # noqa: E731
    return network.gradients(at, Batch(X, Y, 0), rule, scale=scale).value


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_small_gradients_are_kept(kind):
    """A loss of 1e-6 has gradients of 1e-7, which half precision rounds to 0 or to one of a few numbers."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    exact = gradient(network_of(kind, module, "fp32"), None, 1e-6)
    scale = LossScale(2)
    found = gradient(network_of(kind, module), scale, 1e-6)
    assert (found - exact).norm() < 0.005 * exact.norm()
    assert (gradient(network_of(kind, module), None, 1e-6) - exact).norm() > 0.1 * exact.norm()
    assert scale.factors.tolist() == [FIRST, FIRST]


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_a_gradient_that_overflows_is_taken_again(kind):
    """The gradient of client 1 is the same as client 0's 100 times: its factor falls, and that of client 0 does not."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 3))
    weights = torch.tensor([[1.0], [1000.0]])
    rule = lambda outputs, losses, weight: weight * losses  # noqa: E731

    def taken(precision: str, scale: LossScale | None) -> torch.Tensor:
        network = network_of(kind, module, precision)
        return network.gradients(network.loaded().rows(2), Batch(X, Y, 0), rule, [weights], scale=scale).value

    exact, scale = taken("fp32", None), LossScale(2)
    found = taken("fp16", scale)
    assert scale.factors[0] == FIRST
    assert 1 < scale.factors[1] < FIRST
    assert scale.factors[1].log2() % 1 == 0
    assert (found - exact).norm(dim=1).le(0.005 * exact.norm(dim=1)).all()
    lowered = scale.factors.clone()
    taken("fp16", scale)
    assert torch.equal(scale.factors, lowered)


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_a_forward_pass_that_overflows_ends(kind):
    """No factor helps against that: the gradient is not finite, which ends the run as one that diverged."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with torch.no_grad():
        module[0].weight.fill_(1e5)
    scale = LossScale(2)
    assert not gradient(network_of(kind, module), scale).isfinite().all()
    assert scale.factors.tolist() == [1, 1]


@pytest.mark.parametrize("algorithm", ["fedavg", "mime", "fedsiam_da", "pfedmo"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_fp16_is_close_to_fp32(algorithm, vectorize, tmp_path):
    """Also with gradients over all samples, of two losses in one step, and at the server."""
    config = {
        **SETTINGS, "algorithm.name": algorithm, "engine.vectorize": vectorize and algorithm != "fedsiam_da",
        "engine.chunk": 4, "model.proj_dim": 16,
    }  # fmt: skip
    runs = [
        simulate({**config, "train.precision": precision, "run.output": str(tmp_path / precision)}, data=small_source())
        for precision in ("fp32", "fp16")
    ]
    start, end, rough = (
        nn.utils.parameters_to_vector(module.parameters()).detach()
        for module in (runs[0].module(), runs[0].model(), runs[1].model())
    )
    assert 1e-6 < (end - rough).norm() / (end - start).norm() < 0.02


def test_the_same_bits_however_clients_are_spread(tmp_path):
    config = {**SETTINGS, "algorithm.name": "fedavg", "train.precision": "fp16", "train.lr": 0.5}
    config |= {"engine.kind": "local", "engine.vectorize": False}
    runs = [
        simulate({**config, "engine.chunk": chunk, "run.output": str(tmp_path / str(chunk))}, data=small_source())
        for chunk in (1, 4)
    ]
    assert_same(*runs)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(),
                              nn.Linear(16, 3)),
        lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 8, 0.0, batch_first=True),
                              nn.Flatten(), nn.Linear(6, 3)),
    ],
)  # fmt: skip
def test_kinds_of_layers(layers):
    torch.manual_seed(2)
    module = layers()
    exact = gradient(network_of(LoopNetwork, module, "fp32"), None)
    found = gradient(network_of(LoopNetwork, module), LossScale(2))
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_a_layer_that_this_processor_may_lack(tmp_path, precision, tolerance):
    """Which ones it lacks differs between processors. The line about it comes before any training."""
    model = nn.Sequential(nn.Unflatten(1, (3, 2)), Recurrent(), nn.Flatten(), nn.Linear(12, 3))
    keys = {"run.output": str(tmp_path), "algorithm.name": "fedavg", "engine.kind": "local", "run.rounds": 2}
    data = X.reshape(-1, 6), Y.reshape(-1)

    def run(precision: str) -> float:
        more = {"train.precision": precision, "data.clients": 2, "data.partition.kind": "iid", "run.name": precision}
        return simulate({**keys, **more}, data=data, test=data, model=model).metrics["test_loss"].iloc[-1]

    if precision_obstacle(model, Task(), precision, *data) is None:
        assert run(precision) == pytest.approx(run("fp32"), rel=tolerance)
        return
    line = rf"train.precision={precision}: model.name=.* can't be trained in it on this processor"
    with pytest.raises(UserError, match=line):
        run(precision)


def test_no_such_precision(tmp_path):
    with pytest.raises(UserError, match=r"train.precision must be 'fp32', 'tf32', 'bf16' or 'fp16', not 'fp8'"):
        simulate({**SETTINGS, "train.precision": "fp8"}, data=small_source())
