"""Counts what a round costs the simulated clients in bytes and FLOPs; what the simulator itself moves does not count.

It also counts as two papers do, as far as that follows from their tables: FedTrip (X. Li et al., IPDPS 2023) and GHBM
(R. Zaccone et al., TMLR 2025).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedray.algorithms import Algorithm, Cohort, ServerState, Traffic, Work
from fedray.algorithms.mime import Mime
from fedray.core.batches import steps_of
from fedray.core.local_training import LocalTraining
from fedray.core.structure import arguments
from fedray.models.inspection import ModelFacts

BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Load:
    """The amount of local training in a round, summed over ``clients``.

    ``samples`` are the n_i that they hold, ``steps`` their J_i local steps, and ``seen`` the samples in all their
    mini-batches. The numbers of a mean client need not be whole.
    """

    samples: float
    steps: float
    seen: float
    clients: float = 1


def load_of(samples: int, training: LocalTraining) -> Load:
    """Returns the load of one client that holds so many samples."""
    steps = steps_of(samples, training.batch_size, training.local_steps, training.local_epochs)
    if training.local_steps is None:
        return Load(samples, steps, (training.local_epochs or 0) * samples)
    return Load(samples, steps, steps * min(training.batch_size or samples, samples))


def mean_load(sizes: Iterable[int], training: LocalTraining) -> Load:
    """Returns the load of the mean client, over all clients that hold samples, because the others never take part."""
    loads = [load_of(int(size), training) for size in sizes if size]
    samples, steps, seen = (
        sum(numbers) / len(loads)
        for numbers in zip(*((load.samples, load.steps, load.seen) for load in loads), strict=True)
    )
    return Load(samples, steps, seen)


def overhead(traffic: Traffic) -> float:
    """Returns the communication of an algorithm as a multiple of FedAvg's: (down + up) / 2, counted in models."""
    down, up = traffic.models_down + traffic.vectors_down, traffic.models_up + traffic.vectors_up
    return (down + up) / 2


def bytes_per_client(traffic: Traffic, facts: ModelFacts) -> tuple[int, int]:
    """Returns the bytes that one client receives and sends in one round.

    Models count with their buffers; state vectors have none.
    """
    model = BYTES_PER_NUMBER * (facts.parameters + facts.buffers)
    vector = BYTES_PER_NUMBER * facts.parameters
    down = traffic.models_down * model + traffic.vectors_down * vector
    up = traffic.models_up * model + traffic.vectors_up * vector
    return round(down), round(up)


def client_flops(work: Work, facts: ModelFacts, load: Load) -> float:
    """Returns the FLOPs of the clients in a round.

    They are those of the forward and backward passes (3 forwards) of all mini-batches, and of the algorithm's extra
    work.
    """
    passes = (3 + work.forwards + 2 * work.backwards) * load.seen + 3 * work.full_gradients * load.samples
    predictions = 3 * work.predictions * load.seen
    return facts.flops * passes + facts.prediction_flops * predictions + facts.parameters * _arithmetic(work, load)


def flops_of_round(algorithm: Algorithm, server: ServerState, facts: ModelFacts, samples: float) -> float:
    """Returns the FLOPs of a round: those of its clients and those of the server.

    ``samples`` is the number of samples in all mini-batches of the clients.
    """
    cohort = server.cohort
    load = Load(sum(cohort.sizes), sum(cohort.steps), samples, len(cohort.ids))
    return client_flops(algorithm.work, facts, load) + algorithm.server_flops(server, facts.flops)


def _arithmetic(work: Work, load: Load) -> float:
    """Returns the operations of an algorithm for each parameter, beside the passes."""
    return work.per_step * load.steps + work.once * load.clients


def server_of_mean_clients(
    training: LocalTraining, sizes: Iterable[int], cohort: int, public_samples: int, test_samples: int
) -> ServerState:
    """Returns a server in a round in which each of the ``cohort`` clients is the mean client.

    It has no data, so that its work can only be counted.
    """
    sizes = list(map(int, sizes))
    load = mean_load(sizes, training)

    def absent(*arguments: Any) -> NoReturn:
        raise NotImplementedError("this server has no data")

    return ServerState(
        vectors={},
        N=len(sizes),
        seed=0,
        server_lr=1.0,
        as_client=absent,
        draw_inputs=absent,
        model_of=absent,
        total_samples=sum(sizes),
        batch_size=training.batch_size,
        public_samples=public_samples,
        test_samples=test_samples,
        round=1,
        cohort=Cohort(
            ids=range(cohort),
            sizes=[round(load.samples)] * cohort,
            weights=[1 / cohort] * cohort,
            steps=[round(load.steps)] * cohort,
            gaps=[0] * cohort,
        ),
    )


def fedtrip_forward(module: nn.Module, facts: ModelFacts, example: Any) -> float:
    """Returns FedTrip's F: the operations of one sample's forward pass, for the inputs
    ``example [b, ...]``.

    They are the multiply-adds, and an addition for each output of a convolution with bias; biases of linear layers do
    not count. No other way of counting leads to the numbers of the paper's Table V.
    """
    biases = 0

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal biases
        biases += output[0].numel()

    biased = [layer for layer in module.modules() if isinstance(layer, _ConvNd) and layer.bias is not None]
    hooks = [layer.register_forward_hook(count) for layer in biased]
    with torch.no_grad():
        # some normalisation layers need two samples
        args, named = arguments(example)
        module.eval()
        module(*args, **named)
    for hook in hooks:
        hook.remove()
    return facts.flops / 2 + biases


def fedtrip_flops(work: Work, forward: float, parameters: int, load: Load) -> float:
    """Returns the cost of a round in FedTrip's Table V: n F (1 + P) + J a |w|.

    F is ``forward``, P the number of extra forward passes, a the operations for each parameter and step, and n the
    samples in all mini-batches, which in the paper's one epoch are those that the client holds. Backward passes are not
    counted, also not those of full-batch gradients.
    """
    passes = (1 + work.forwards) * load.seen + work.full_gradients * load.samples
    return forward * passes + parameters * _arithmetic(work, load)


def fedtrip_attached(work: Work, forward: float, parameters: int, load: Load) -> float:
    """Returns the cost that FedTrip's Table VIII adds to FedAvg's round, with FP = F (``forward``) and BP = 2 FP."""
    passes = (work.forwards + 2 * work.backwards) * load.seen + 3 * work.full_gradients * load.samples
    return forward * passes + parameters * _arithmetic(work, load)


def fedtrip_communication(traffic: Traffic) -> float:
    """Returns the extra communication of a round in FedTrip's Table VIII, in |w|."""
    return 2 * overhead(traffic) - 2


def ghbm_overhead(algorithm: Algorithm) -> float:
    """Returns the overhead in GHBM's cost table, in models for each direction."""
    # Mime exchanges 2.5 models, but in two exchanges, for which the table charges 3
    return 3.0 if isinstance(algorithm, Mime) else overhead(algorithm.traffic)


def ghbm_bytes(algorithm: Algorithm, parameters: int, rounds: int) -> float:
    """Returns the bytes in GHBM's cost table: those of one client that takes part in every round, in one direction."""
    return BYTES_PER_NUMBER * parameters * rounds * ghbm_overhead(algorithm)
