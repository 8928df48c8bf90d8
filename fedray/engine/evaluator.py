"""Evaluates models on the data of one worker: on blocks of samples, and on single clients' own test shares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedray.core.clock import Clock
from fedray.core.context import NO_STEP, Context, Samples, Stack
from fedray.core.seeds import SERVER, Purpose, torch_rng
from fedray.engine.tasks import GLOBAL, PERSONAL_PREFIX, EvalResult, EvalTask, ScoreResult, ScoreTask

if TYPE_CHECKING:
    from fedray.engine.worker import Worker

EVAL_BATCH = {"cpu": 50, "cuda": 250}
"""Samples per forward pass of an evaluation. Of more, the activations of a convolutional network leave a core's cache:
with 250 pfl-research's CNN takes 2.2 times as long on a CPU, ResNet-20 1.4 times (LeNet-5 0.9). On GPUs not tried."""


class Evaluator:
    """Runs the evaluation tasks of ``worker``, with its model and data."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.data, self.model, self.experiment = worker, worker.data, worker.model, worker.experiment

    def evaluate(self, task: EvalTask) -> EvalResult:
        """Sums over a block of samples for each model."""
        models = self.worker.shared(task.broadcast)
        if task.split == "test":
            samples, indices = self.worker.test, np.arange(task.start, task.stop)
        else:
            own = self.data.validation if task.split == "validation" else self.data.train_subset
            samples, indices = self.worker.train, own[task.start : task.stop]
        with self._draws(0, SERVER, task.start):
            return EvalResult(
                [self._evaluate(models[name], models.get(f"{name}/buffers"), samples, indices) for name in task.models]
            )

    def _draws(self, *coordinates: int) -> contextlib.AbstractContextManager[None]:
        """For a module that draws even in evaluation mode."""
        if not self.experiment.draws:
            return contextlib.nullcontext()
        return torch_rng(self.experiment.training.seed, Purpose.DROPOUT, *coordinates)

    @torch.no_grad()
    def _evaluate(self, model: Tensor, buffers: Tensor | None, samples: Samples, indices: Any) -> dict[str, float]:
        self.model.mode(training=False)
        self.model.load(model, buffers)
        sums = dict.fromkeys(("loss", "correct", *self.experiment.metrics), 0.0)
        size = EVAL_BATCH[self.worker.device.type]
        for start in range(0, len(indices), size):
            x, y = samples.gather(indices[start : start + size])
            logits = self.model.outputs(x, features=False).logits
            sums["loss"] += float(self.experiment.loss(logits, y).double().sum())
            sums["correct"] += float((logits.argmax(1) == y).sum())
            for name, metric in self.experiment.metrics.items():
                sums[name] += float(metric(logits, y).double().sum())
        return sums

    def score(self, task: ScoreTask) -> ScoreResult:
        """How many samples of its own test share each client's models, and those of all, get right."""
        models = self.worker.shared(task.broadcast)
        correct: dict[str, list[float]] = {}
        row = 0
        for _, size in self.worker.stacks(task.blocks):
            rows = slice(row, row + size)
            row += size
            # of each client's own models: [C, width], and buffers [C, buffer_width] if there are any
            own: dict[str, tuple[Tensor, Tensor | None]] = {}
            if task.personal:
                own["personal"] = self._personal(task, rows, models)
            if task.finetune_steps:
                own["finetuned"] = self._finetuned(task, rows, models)
            for place, client in enumerate(task.ids[rows]):
                indices = self.data.client_test(client)
                of_all = {name: (models[name], models.get(f"{name}/buffers")) for name in task.models}
                of_client = {name: (w[place], None if b is None else b[place]) for name, (w, b) in own.items()}
                for name, (model, buffers) in (of_all | of_client).items():
                    with self._draws(task.round, client, NO_STEP):
                        right = self._evaluate(model, buffers, self.worker.test, indices)["correct"]
                    correct.setdefault(name, []).append(right)
        return ScoreResult(correct)

    def _own_context(
        self, task: ScoreTask, rows: slice, shared: Mapping[str, Tensor], steps: int, **rest: Any
    ) -> Context:
        """Some clients of a task, as they would train ``steps`` local steps beside the run's own training."""
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
        ctx = self.worker.context(stack, round=task.round, shared=shared, training=training, **rest)
        # all of it counts as evaluation
        ctx.clock = Clock()
        return ctx

    @torch.no_grad()
    def _personal(self, task: ScoreTask, rows: slice, models: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The algorithm's personal models of some clients of a task."""
        prefix = PERSONAL_PREFIX
        shared = {name.removeprefix(prefix): value for name, value in models.items() if name.startswith(prefix)}
        state = self.worker.client_states(task.states[rows]) if task.states else None
        ctx = self._own_context(task, rows, shared, 1, lr=0.0, state=state)
        model = self.worker.algorithm.personal_model(ctx)
        return model, ctx.buffers

    def _finetuned(self, task: ScoreTask, rows: slice, models: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The global model after local SGD on the data of each of some clients of a task, whatever the algorithm."""
        shared = {"x": models[GLOBAL]}
        if f"{GLOBAL}/buffers" in models:
            shared["buffers"] = models[f"{GLOBAL}/buffers"]
        ctx = self._own_context(task, rows, shared, task.finetune_steps, lr=task.lr)
        carry = {"y": ctx.start("x")}
        for batch in ctx.batches():
            carry = {"y": ctx.descend(carry["y"], ctx.grad(carry["y"], batch))}
        return carry["y"], ctx.buffers
