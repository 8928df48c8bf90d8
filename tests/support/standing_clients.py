"""Clients whose own objective is zero, so that what is left of a local step is the algorithm's own term."""

import numpy as np
import torch
from traced_runs import SEED, Point, half_square

from fedray.algorithms import ClientPhase, find_algorithm
from fedray.client.phase import Stack
from fedray.core.local_training import LocalTraining
from fedray.core.samples import Samples
from fedray.core.task import Task
from fedray.gradients.loop import LoopNetwork

MODELS = ("x", "x_rep")
"""Of what servers send, the models; the rest are vectors."""


def standing(dimension=1, clients=1, lr=0.5, steps=1, gap=0, members=1, N=1, shared=None, state=None, scalars=None):
    """Returns clients with f = 0; models and vectors have ``dimension`` numbers, and ``scalars`` go by client."""
    network = LoopNetwork(Point(np.zeros(dimension)), Task(loss=half_square))
    samples = Samples(torch.zeros(1, 2 * dimension), torch.zeros(1, dtype=torch.int64))
    stack = Stack(
        ids=range(clients),
        indices=[np.zeros(1, np.int64)] * clients,
        steps=[steps] * clients,
        weights=[1 / clients] * clients,
        gaps=[gap] * clients,
        scalars=scalars or {},
    )
    vectors = {name: padded(numbers, network) for name, numbers in (shared or {}).items()}
    return ClientPhase(
        network,
        samples,
        LocalTraining(SEED, batch_size=None, local_steps=steps),
        stack,
        round=12,
        lr=lr,
        clients=N,
        members=members,
        shared={name: network.layout.model(row) if name in MODELS else row for name, row in vectors.items()},
        state={name: padded(numbers, network).expand(clients, -1) for name, numbers in (state or {}).items()},
    )


def padded(numbers, network):
    row = torch.zeros(network.layout.width)
    row[: np.size(numbers)] = torch.as_tensor(numbers)
    return row


def made(name, **hyper):
    algorithm = find_algorithm(name)
    return algorithm(algorithm.Hyper(**hyper))
