"""Stacks of clients of any sizes, without a run around them, and torch's own gradients to compare theirs with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from fedray.algorithms import Algorithm, Carry, ClientPhase, Model
from fedray.client.phase import Stack
from fedray.core.batches import steps_of
from fedray.core.local_training import LocalTraining
from fedray.core.samples import Samples
from fedray.core.task import cross_entropy
from fedray.gradients.network import Network

CLOSE = {"rtol": 2e-5, "atol": 2e-6}

INITIAL: WeakKeyDictionary[Network, Model] = WeakKeyDictionary()
"""The models with which networks were made."""


def data(shape: Sequence[int], samples: int, classes: int = 4, seed: int = 0) -> Samples:
    """Returns samples of the given shape with labels, both drawn from the seed."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, *shape)).astype(np.float32)
    return Samples(torch.from_numpy(x), torch.from_numpy(rng.integers(0, classes, samples)))


def client_phase(
    network: Network,
    samples: Samples,
    sizes: Sequence[int],
    training: LocalTraining,
    rows: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    lr: float = 0.1,
    start: Model | None = None,
    **shared: Model | torch.Tensor,
) -> ClientPhase:
    """Returns a stack of the clients in ``rows``; clients of the given sizes lie one after another in ``samples``."""
    starts = np.cumsum([0, *sizes])
    rows = range(len(sizes)) if rows is None else rows
    made_steps = [
        steps_of(sizes[i], training.batch_size, training.local_steps, training.local_epochs) for i in range(len(sizes))
    ]
    stack = Stack(
        ids=[10 + i for i in rows],
        indices=[np.arange(starts[i], starts[i + 1]) for i in rows],
        steps=[(made_steps if steps is None else steps)[i] for i in rows],
        weights=[1.0] * len(rows),
        gaps=[0] * len(rows),
    )
    start = INITIAL.setdefault(network, network.loaded()).clone() if start is None else start
    shared = {"x": start, "y": start.parameters.clone(), **shared}
    return ClientPhase(network, samples, training, stack, round=3, lr=lr, clients=50, shared=shared)


def packed(network: Network, modules: Sequence[nn.Module]) -> Model:
    """Returns the models of several modules as a stack."""
    return network.layout.model(torch.stack([network.layout.pack(module).row for module in modules]))


def plain_gradient(module: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Any = cross_entropy) -> dict[str, Any]:
    """Returns torch's own gradient of the mean loss, in the mode that ``module`` is in."""
    module.zero_grad(set_to_none=True)
    loss(module(x), y).mean().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


EVERYTHING: dict[str, Any] = {"momentum": 0.7, "weight_decay": 0.05, "grad_clip": 0.3}
SIZES = [23, 1, 9, 17, 4]


def trained(algorithm: Algorithm, client: ClientPhase) -> Carry:
    """Returns what the clients of a stack hold after all of their local steps."""
    return algorithm.local_steps(client, algorithm.begin(client))
