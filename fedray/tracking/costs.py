"""Counts the bytes and FLOPs that a round would cost the clients. The traffic of the simulator itself is not
counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Algorithm, Cohort, ServerState, Traffic, Work
from fedray.core.batches import steps_of
from fedray.core.local_training import LocalTraining
from fedray.core.upload import BYTES_PER_NUMBER, UploadStep
from fedray.models.inspection import ModelFacts
from fedray.system.clock import PhaseCost


@dataclass(frozen=True)
class Load:
    """The amount of local training in a round, summed over ``clients`` clients. FLOPs are computed from it.

    ``samples`` is the number of samples that these clients hold, ``steps`` the number of their local steps, ``seen``
    the number of samples in all their mini-batches, and ``batch`` that in one mini-batch of each. If the numbers are
    means over clients, they need not be whole.
    """

    samples: float
    steps: float
    seen: float
    batch: float = 0
    clients: float = 1


def load_of(samples: int, training: LocalTraining) -> Load:
    """Returns how much one client that holds ``samples`` samples trains in a round: its number of local steps, and the
    number of samples in its mini-batches. FLOPs are computed from them.

    ``training`` has the settings of local training.
    """
    steps = steps_of(samples, training.batch_size, training.local_steps, training.local_epochs)
    batch = min(training.batch_size or samples, samples)
    seen = (training.local_epochs or 0) * samples if training.local_steps is None else steps * batch
    return Load(samples, steps, seen, batch)


def mean_load(sizes: Iterable[int], training: LocalTraining) -> Load:
    """Returns the amount of a client's local training in a round, averaged over all clients that hold samples.

    ``sizes`` are the clients' numbers of samples. Clients without samples never take part, and do not count.
    ``training`` has the settings of local training.
    """
    loads = [load_of(int(size), training) for size in sizes if size]
    numbers = zip(*((load.samples, load.steps, load.seen, load.batch) for load in loads), strict=True)
    return Load(*(sum(each) / len(loads) for each in numbers))


def overhead(traffic: Traffic) -> float:
    """Returns how much an algorithm communicates, as a multiple of FedAvg's communication: 1 means as much as FedAvg.

    ``traffic`` has the numbers of models and vectors that a client receives and sends in a round. A vector has as many
    numbers as the model has parameters, and counts as a model here. The result is the mean of the number received and
    the number sent. Both are 1 for FedAvg.
    """
    down, up = traffic.models_down + traffic.vectors_down, traffic.models_up + traffic.vectors_up
    return (down + up) / 2


def bytes_per_client(traffic: Traffic, facts: ModelFacts, upload: Sequence[UploadStep] = ()) -> tuple[int, int]:
    """Returns two numbers of bytes: how many one client receives in a round, and how many it sends.

    ``traffic`` says how many models and vectors go in each direction, and ``facts`` has the numbers of the model's
    parameters and buffers. A model is sent with its parameters and buffers. A vector, such as a gradient, has only as
    many numbers as the model has parameters. Each number takes 4 bytes, unless the steps of ``upload`` say otherwise of
    the parameters that clients send.
    """
    numbers = facts.parameters - facts.private_parameters
    vector, buffers = BYTES_PER_NUMBER * numbers, BYTES_PER_NUMBER * (facts.buffers - facts.private_buffers)
    sent: float = vector
    for step in upload:
        sent = step.wire_bytes(numbers, sent) if isinstance(step, UploadStep) else sent
    down, up = (BYTES_PER_NUMBER * others for others in traffic.numbers(facts))
    down += traffic.models_down * (vector + buffers) + traffic.vectors_down * vector
    up += traffic.models_up * (sent + buffers) + traffic.vectors_up * sent
    return round(down), round(up)


def client_flops(work: Work, facts: ModelFacts, load: Load, passes: float = 3) -> float:
    """Returns the number of FLOPs that clients compute in a round: those of a forward and a backward pass over each
    mini-batch, and those of the algorithm's additional ``work``. A backward pass counts as two forward passes.

    ``facts`` has the model's number of parameters and the FLOPs of its forward pass. ``load`` is the amount of local
    training, summed over the clients. ``passes`` is how many forward passes FedAvg's own pass over a mini-batch counts:
    3, or 0 for a phase in which it does not happen.
    """
    passes = (passes + work.forwards + 2 * work.backwards) * load.seen
    passes += (3 * (work.full_gradients + work.further_epochs) + work.full_losses) * load.samples
    passes += 3 * work.further * load.batch
    predictions = 3 * work.predictions * load.seen
    return facts.flops * passes + facts.prediction_flops * predictions + facts.parameters * arithmetic(work, load)


def costs_by_phase(
    algorithm: Algorithm,
    facts: ModelFacts,
    training: LocalTraining,
    sizes: NDArray[np.int64],
    upload: Sequence[UploadStep] = (),
) -> list[PhaseCost]:
    """Returns what clients receive, send and compute in each phase of a round, in the order of the phases. ``facts``
    describe the model, ``training`` has the settings of local training, ``sizes [N]`` are the clients' numbers of
    samples, and ``upload`` has the steps that uploads pass."""
    trains = "train" if "train" in algorithm.phases else algorithm.phases[0]
    traffic_in = algorithm.traffic_in or {trains: algorithm.traffic}
    work_in = algorithm.work_in or {trains: algorithm.work}
    different, places = np.unique(sizes, return_inverse=True)
    loads = [load_of(int(size), training) if size else Load(0, 0, 0) for size in different]
    found = []
    for phase in algorithm.phases:
        work, passes = work_in.get(phase), 3 if phase == trains else 0
        flops = np.array([client_flops(work, facts, load, passes) if work else 0.0 for load in loads])
        down, up = bytes_per_client(traffic_in[phase], facts, upload) if phase in traffic_in else (0, 0)
        found.append(PhaseCost(phase, down, up, flops[places]))
    return found


def flops_of_round(algorithm: Algorithm, server: ServerState, facts: ModelFacts, samples: float) -> float:
    """Returns the FLOPs of the server and of the cohort (the clients of a round) in the current round, for the column
    ``flops`` of metrics.csv.

    ``facts`` describe the model. ``samples`` is the number of samples in all mini-batches of the cohort's clients.
    """
    cohort = server.cohort
    batch = sum(min(server.batch_size or size, size) for size in cohort.sizes)
    load = Load(sum(cohort.sizes), sum(cohort.steps), samples, batch, len(cohort.ids))
    return client_flops(algorithm.work, facts, load) + algorithm.server_flops(server, facts.flops)


def of_choosing(
    asks: int, facts: ModelFacts, sizes: NDArray[np.int64], asked: Sequence[int] | None = None
) -> tuple[float, float, float]:
    """Returns what clients receive, send (in bytes) and compute (in FLOPs) in a round before its clients are chosen
    among them: candidates receive the model, compute its loss on all their samples, and send it.

    ``sizes`` are the numbers of samples of all clients, ``facts`` describe the model, and ``asked`` are the candidates.
    If these are not known, they are ``asks`` mean clients, or all if there are fewer.
    """
    count = min(asks, int(np.count_nonzero(sizes))) if asked is None else len(asked)
    if not count:
        return 0, 0, 0
    samples = count * float(sizes[sizes > 0].mean()) if asked is None else float(sizes[[*asked]].sum())
    return count * bytes_per_client(Traffic(), facts)[0], count * BYTES_PER_NUMBER, samples * facts.flops


def arithmetic(work: Work, load: Load) -> float:
    """Returns how many operations an algorithm's clients make for each parameter of the model in a round, in addition
    to forward and backward passes.

    ``work`` has the operations per local step and those that are made once, and ``load`` the numbers of steps and
    clients.
    """
    return work.per_step * load.steps + work.once * load.clients


def server_of_mean_clients(
    training: LocalTraining, sizes: Iterable[int], cohort: int, public_samples: int, test_samples: int
) -> ServerState:
    """Returns a stand-in for a run's server, so that an algorithm's server FLOPs can be counted without a run. The
    stand-in has no model and no data, so it can't be used for anything else.

    Its current round is one in which ``cohort`` clients take part, each with the average number of samples and the
    average number of local steps (:func:`mean_load`). ``sizes`` are the numbers of samples of all clients, and
    ``training`` has the settings of local training. ``public_samples`` and ``test_samples`` are the sizes of the public
    set (samples that belong to no client) and the test set.
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
        parameters_of=absent,
        initial_model=absent,
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
