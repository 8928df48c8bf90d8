"""The evaluation at a round's end: what is asked of the pool, and what its answers make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedray.algorithms import Algorithm, Server
from fedray.data.federated import FederatedData
from fedray.engine.cohorts import positions, shares
from fedray.engine.pool import Pool
from fedray.engine.states import StateFile
from fedray.engine.tasks import EvalResult, EvalTask, PersonalTask

EVAL_BLOCK = 1000
"""Samples per evaluation task; fixed, so that sums over blocks do not depend on who evaluates them."""


class Evaluation:
    """All accuracies of the models as they are now, from ``tasks`` that may be run at any time, in any order.

    ``states`` are the clients' states, which must last until then. Without ``test`` the test set is left alone.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: Server,
        data: FederatedData,
        pool: Pool,
        states: Mapping[int, StateFile],
        test: bool,
    ) -> None:
        self.data = data
        models = {"test": algorithm.eval_model(server), **algorithm.monitors(server)}
        self.splits = {
            "test": (len(data.y_test) if test else 0, list(models)),
            "validation": (len(data.validation), ["test"]),
            "train": (len(data.train_subset), ["test"]),
        }
        buffers = {name: algorithm.eval_buffers(server, "" if name == "test" else name) for name in models}
        shared = models | {f"{name}/buffers": value for name, value in buffers.items() if value is not None}
        self.tasks: list[EvalTask | PersonalTask] = _blocks(pool.publish(shared), self.splits)
        self.personal = test and algorithm.has_personal_model()
        if self.personal:
            self.tasks += _personal(algorithm, server, data, pool, states)
        self.found: dict[tuple[str, int], tuple[EvalTask | PersonalTask, EvalResult]] = {}

    def take(self, task: EvalTask | PersonalTask, result: EvalResult) -> None:
        """The result of one of the tasks."""
        self.found[_key(task)] = task, result

    def row(self) -> dict[str, float]:
        """The columns of metrics.csv, once all results are there."""
        row: dict[str, float] = {}
        for split, (samples, names) in self.splits.items():
            if not samples:
                continue
            blocks = [self.found[split, start][1].sums for start in range(0, samples, EVAL_BLOCK)]
            for position, name in enumerate(names):
                means = {
                    key: math.fsum(block[position][key] for block in blocks) / samples for key in blocks[0][position]
                }
                label = split if name == "test" else name
                row[f"{label}_accuracy"] = means.pop("correct")
                loss = means.pop("loss")
                if label == "test":
                    row["test_loss"] = loss
                    row |= {f"test_{metric}": value for metric, value in means.items()}
        if self.personal:
            row["personalized_accuracy"] = self._personalized()
        return row

    def _personalized(self) -> float:
        """The mean over the cohort's clients of their personal models' accuracy on their own test shares."""
        accuracies = []
        for key in sorted(key for key in self.found if key[0] == "personal"):
            task, result = self.found[key]
            assert isinstance(task, PersonalTask)
            for client, sums in zip(task.ids, result.sums, strict=True):
                share = len(self.data.client_test(client))
                if share:
                    accuracies.append(sums["correct"] / share)
        return math.fsum(accuracies) / len(accuracies) if accuracies else math.nan


def _key(task: EvalTask | PersonalTask) -> tuple[str, int]:
    return (task.split if isinstance(task, EvalTask) else "personal"), task.start


def _blocks(handle: object, splits: Mapping[str, tuple[int, Sequence[str]]]) -> list[EvalTask | PersonalTask]:
    return [
        EvalTask(handle, names, split, start, min(start + EVAL_BLOCK, samples))
        for split, (samples, names) in splits.items()
        for start in range(0, samples, EVAL_BLOCK)
    ]


def _personal(
    algorithm: Algorithm, server: Server, data: FederatedData, pool: Pool, states: Mapping[int, StateFile]
) -> list[PersonalTask]:
    cohort, broadcast = server.cohort, algorithm.personal_broadcast(server)
    handle = pool.publish(with_buffers(broadcast.shared, server))
    tasks = []
    for blocks in shares([1 + len(data.client_test(client)) for client in cohort.ids], pool.slots):
        places = positions(blocks)
        ids, gaps = [cohort.ids[place] for place in places], [cohort.gaps[place] for place in places]
        scalars = {name: [values[place] for place in places] for name, values in broadcast.scalars.items()}
        held = [states.get(client) for client in ids] if algorithm.stateful else ()
        tasks.append(PersonalTask(server.round, places[0], ids, gaps, handle, scalars, held))
    return tasks


def with_buffers(shared: Mapping[str, Tensor], server: Server) -> dict[str, Tensor]:
    """What is broadcast, with the server's buffers unless the algorithm sends its own."""
    buffers = server.vectors.get("buffers")
    return dict(shared) if buffers is None else {"buffers": buffers, **shared}
