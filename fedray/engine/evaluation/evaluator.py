"""Evaluates models on blocks of samples, and on the test shares of single clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.client.objective import NO_STEP
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase, Stack
from fedray.core.samples import Samples
from fedray.core.seeds import SERVER, Purpose
from fedray.core.stopwatch import Stopwatch
from fedray.core.vectors import Model, Vector
from fedray.engine.clients import Clients
from fedray.engine.state.packing import on_host
from fedray.engine.tasks import GLOBAL, PERSONAL_PREFIX, EvalResult, EvalTask, ScoreResult, ScoreTask
from fedray.models.inspection import ModelFacts
from fedray.robust.attackers import DisguisedSamples

FEWEST, MOST, ENOUGH_FLOPS = 50, 500, 4e8
"""The number of samples in a forward pass of an evaluation on a CPU: as many as take ``ENOUGH_FLOPS``, but at least
``FEWEST`` and at most ``MOST``.

Small models spend most of a small pass starting operations: an MLP takes 0.48 times as long with 500 samples as with
50, and LeNet-5 0.73 times. With larger models, the activations of many samples no longer fit into a core's cache: a
network with convolutions of 64 channels takes 1.8 times as long with 500 samples. Measured by
analysis/benchmarks/evaluation.py.
"""

ON_GPU = 250
"""The number of samples in a forward pass of an evaluation on a GPU. It is a guess and has not been measured."""

Sums = tuple[float, float]
"""The two sums over samples, numerator and denominator, from which a metric follows
(:meth:`fedray.core.task.Task.sums`)."""


def samples_of_pass(model: ModelFacts, device: str) -> int:
    """Returns how many samples of an evaluation go through the model in one forward pass.

    ``model`` describes the model, with its FLOPs for example, and ``device`` is "cpu" or "cuda". The number depends on
    nothing else, because another number changes the last digits of losses and metrics.
    """
    if device != "cpu":
        return ON_GPU
    if model.uncounted:
        return FEWEST
    return int(min(MOST, max(FEWEST, ENOUGH_FLOPS / max(model.flops, 1.0))))


class Evaluator:
    """Evaluates models for the tasks of a worker, with the network and the data of ``clients``: on ranges of samples
    (:meth:`evaluate`), and on the test shares of single clients (:meth:`score`)."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.data = clients, clients.data
        self.network, self.experiment = clients.network, clients.experiment
        self.size = samples_of_pass(self.experiment.facts, clients.device.type)
        robust = self.experiment.robust
        self.attack = None if robust is None else robust.attack

    def evaluate(self, task: EvalTask) -> EvalResult:
        """Evaluates each model of ``task`` on the task's range of samples. The result has two sums for the loss and for
        each metric, a numerator and a denominator, so that the results for all ranges of a data set can be added up."""
        models: Mapping[str, Any] = self.clients.broadcast(task.broadcast)
        samples: Samples | DisguisedSamples = self.clients.test
        if task.split == "test":
            indices = np.arange(task.start, task.stop)
        elif task.split == "backdoor":
            assert self.attack is not None
            samples = DisguisedSamples(self.clients.test, self.attack)
            indices = np.asarray(self.attack.victims(), np.int64)[task.start : task.stop]
        else:
            chosen = self.data.validation if task.split == "validation" else self.data.train_subset
            samples, indices = self.clients.train, chosen[task.start : task.stop]
        with self.draws(0, SERVER, task.start):
            found = [self.sums_over(models[name], samples, indices) for name in task.models]
        return EvalResult([sums for sums, _ in found], [each for _, each in found] if task.each else [])

    def draws(self, *coordinates: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which to evaluate a module that draws random numbers even in evaluation mode. The
        numbers are seeded by the run's seed and ``coordinates``, integers that identify the evaluation (such as the
        numbers of a round and a client), so that the evaluation can be repeated. For other modules the context does
        nothing."""
        if not self.network.draws:
            return contextlib.nullcontext()
        return self.network.rng(self.experiment.training.seed, Purpose.DROPOUT, *coordinates)

    @torch.no_grad()
    def sums_over(
        self, model: Model, samples: Samples | DisguisedSamples, indices: Any
    ) -> tuple[dict[str, Sums], NDArray[np.float64]]:
        """Evaluates ``model`` on the samples that are at ``indices`` in ``samples``.

        Returns a dict and an array. The dict has the keys "loss" and the names of the metrics; each value is a pair of
        a numerator and a denominator, both summed over the samples. The array ``[n, 2]`` has the numerator and the
        denominator of the main metric for each of the n samples.
        """
        task = self.experiment.task
        found = {name: [0.0, 0.0] for name in ("loss", *task.metrics)}
        each = np.ones((len(indices), 2))
        for rows, outputs, y in self.passes(model, samples, indices):
            for name, sums in found.items():
                total, count = task.sums(name, outputs, y)
                sums[0] += float(total.double().sum())
                sums[1] += len(y) if count is None else float(count.double().sum())
                if name == task.main:
                    each[rows, 0] = total.double().cpu().numpy()
                    if count is not None:
                        each[rows, 1] = count.double().cpu().numpy()
        return {name: (total, count) for name, (total, count) in found.items()}, each

    def passes(
        self, model: Model, samples: Samples | DisguisedSamples, indices: NDArray[np.int64]
    ) -> Iterator[tuple[slice, Any, Tensor]]:
        """Runs ``model`` forward, batch by batch, over the samples that are at ``indices`` in ``samples``. Yields three
        things for each batch: the slice of ``indices`` that the batch covers, the model's outputs, and the samples'
        targets ``[b, ...]``."""
        network = self.network
        network.load(model)
        network.mode(training=False)
        changes = network.writes or network.layout.buffers
        for start in range(0, len(indices), self.size):
            if start and changes:
                # a batch must not depend on the other batches that this process evaluates
                network.load(model)
            rows = slice(start, min(start + self.size, len(indices)))
            x, y = samples.gather(indices[rows])
            yield rows, network.outputs(x, features=False).logits, y

    def score(self, task: ScoreTask) -> ScoreResult:
        """Evaluates the models of single clients, each on its client's test share (the samples of the test set that
        serve as this client's test data). There are two kinds: the personal models that the algorithm makes, and the
        global model fine-tuned on each client's data.

        The result has a list for each kind that ``task`` asks for. The list has a pair for each of the task's clients,
        the numerator and the denominator of the main metric. If ``task`` wants the models themselves, it has these.
        """
        shared = self.clients.broadcast(task.broadcast)
        found: dict[str, list[Sums]] = {}
        kept: dict[int, NDArray[np.float32]] = {}
        row = 0
        for _, size in self.clients.stacks(task.blocks):
            rows = slice(row, row + size)
            row += size
            made: dict[str, Model] = {}
            if task.personal:
                made["personal"] = self._personal(task, rows, shared)
            if task.finetune_steps:
                made["finetuned"] = self._finetuned(task, rows, shared)
            if task.models:
                kept |= dict(zip(task.ids[rows], on_host(made["personal"].row).numpy().copy(), strict=True))
                continue
            for place, client in enumerate(task.ids[rows]):
                share = self.data.client_test(client)
                for name, models in made.items():
                    with self.draws(task.round, client, NO_STEP):
                        sums, _ = self.sums_over(models[place], self.clients.test, share)
                    found.setdefault(name, []).append(sums[self.experiment.task.main])
        return ScoreResult(found, kept)

    def _client(
        self, task: ScoreTask, rows: slice, shared: Mapping[str, Vector], steps: int, **rest: Any
    ) -> ClientPhase:
        """Returns the clients of ``task`` in ``rows``, prepared for ``steps`` local steps that are not part of the
        run's training."""
        ids = task.ids[rows]
        stack = Stack(
            ids=ids,
            indices=[self.data.client(client) for client in ids],
            steps=[steps] * len(ids),
            weights=[1.0] * len(ids),
            gaps=task.gaps[rows],
            scalars={name: values[rows] for name, values in task.scalars.items()},
            purpose=Purpose.FINETUNE,
        )
        training = replace(self.experiment.training, local_steps=steps, local_epochs=None)
        # a stopwatch of its own, because all of this time counts as evaluation
        return self.clients.phase_of(stack, training, round=task.round, shared=shared, stopwatch=Stopwatch(), **rest)

    def _personal(self, task: ScoreTask, rows: slice, found: Mapping[str, Vector]) -> Model:
        """Returns the personal models of the clients of ``task`` in ``rows``, one row for each client."""
        prefix = PERSONAL_PREFIX
        shared = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        rest = self.clients.remembered(task.states[rows], task.round)
        return self.clients.algorithm.personal_model(self._client(task, rows, shared, 1, lr=0.0, **rest))

    def _finetuned(self, task: ScoreTask, rows: slice, found: Mapping[str, Vector]) -> Model:
        """Returns, for each client of ``task`` in ``rows``, the global model after plain local steps on the
        client's data. Private layers are the client's own.

        The global models of all algorithms are fine-tuned with FedAvg's local steps, so that differences between the
        scores come from the global models alone.
        """
        private = self.clients.private_rows(task.states[rows], task.round) if task.states else None
        client = self._client(task, rows, {"x": found[GLOBAL]}, task.finetune_steps, lr=task.lr, private=private)
        layers = self.experiment.config.run.finetune_layers
        only = client.parameters_of(*layers) if layers else None
        carry = Carry({"y": client.start("x")})
        for batch in client.data.batches():
            carry = client.at_epochs(carry, batch.step)
            carry = client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch), only)
        tuned: Model = carry["y"]
        return tuned
