"""Large linear layers write the gradient of their weights into its place: the same bits as autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from fedray.core.batches import Batch
from fedray.core.task import Task
from fedray.gradients import direct_linear
from fedray.gradients.loop import LoopNetwork


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 5))


class Tied(nn.Module):
    """An embedding that is the last layer too, a layer that is used twice, inputs of three axes, weights by name."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 20)
        self.twice = nn.Linear(20, 20)
        self.unused = nn.Linear(20, 20)

    def forward(self, x):
        h = self.embedding(x)
        h = self.twice(torch.relu(self.twice(h)))
        return F.linear(h.mean(1), weight=self.embedding.weight)


class Single(nn.Module):
    """A layer that is applied to one vector."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 20)

    def forward(self, x):
        return torch.stack([self.layer(each) for each in x])


class Checkpointed(Plain):
    """Computes its first layers again in the backward pass."""

    def forward(self, x):
        first, *others = self
        return nn.Sequential(*others)(torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False))


class Searching(Plain):
    """Makes a backward pass of its own in the forward pass, through which the gradient goes if ``onward`` is set."""

    onward = False

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (away,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=self.onward)
        return super().forward(x.detach() + 0.1 * away)


class Penalised(Searching):
    onward = True


class Masked(Plain):
    """Has a hook that changes the gradient of weights."""

    def __init__(self):
        super().__init__()
        self[0].weight.register_hook(lambda grad: grad * 0.5)


class Mapped(Plain):
    """Calls its layers sample by sample, within a transform."""

    def forward(self, x):
        return torch.func.vmap(super().forward)(x)


def floats():
    return torch.randn(3, 6, 12), torch.randint(0, 5, (3, 6))


def words():
    return torch.randint(0, 30, (3, 6, 7)), torch.randint(0, 30, (3, 6))


def own_loss(outputs, task, weight):
    return weight * task + outputs.logits.square().mean(1)


ORDINARY = [Plain, Checkpointed, Searching, Penalised, Masked, Mapped, Single]


@pytest.mark.parametrize(("module", "inputs"), [*((each, floats) for each in ORDINARY), (Tied, words)])
@pytest.mark.parametrize("own", [False, True])
def test_gradients_are_the_same(module, inputs, own, monkeypatch):
    torch.manual_seed(0)
    model, batch = module(), Batch(*inputs(), 0)
    found = {}
    for least in (100, 10**9):
        monkeypatch.setattr(direct_linear, "LEAST", least)
        network = LoopNetwork(model)
        assert (network._direct is None) == (least > 100)
        rule = (own_loss, [torch.full((3,), 0.5)]) if own else ()
        at = network.layout.model(torch.randn(3, network.layout.row_width, generator=torch.Generator().manual_seed(1)))
        found[least] = network.gradients(at, batch, *rule).value
    assert found[100].any(dim=1).all()
    assert network._direct is None or network._direct.out is None
    # of weights that are used twice, the gradients may be added in another order
    close = {"rtol": 1e-5, "atol": 1e-6} if module is not Plain else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[100], found[10**9], **close)


def test_other_precisions_are_left_to_autograd(monkeypatch):
    monkeypatch.setattr(direct_linear, "LEAST", 100)
    assert LoopNetwork(Plain(), Task(), precision="bf16")._direct is None
    assert LoopNetwork(Plain(), Task(), precision="fp16")._direct is None
