"""Makes the clients' personal models at the end of a run, to save them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedray.client.phase import stacks
from fedray.core.vectors import Layout, Model
from fedray.data.federated import FederatedData
from fedray.engine.cutting import cut_into_tasks
from fedray.engine.evaluation.client_scores import members_of
from fedray.engine.server_rules import personal_broadcast
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import PERSONAL_PREFIX, ScoreResult, ScoreTask, positions
from fedray.experiment.experiment import Experiment

AT_ONCE = 1 << 27
"""About how many bytes of models a worker returns at once."""


def make_personal_models(
    ids: Sequence[int],
    experiment: Experiment,
    state: RunState,
    data: FederatedData,
    queue: TaskQueue,
    take: Callable[[int, Model], None],
) -> None:
    """Makes the personal models of the clients ``ids``, and calls ``take(client, model)`` with each. Workers make them
    from the clients' states, as for an evaluation."""
    members = members_of(state.server, data, list(ids))
    broadcast = personal_broadcast(experiment.algorithm, replace(state.server, cohort=members))
    handle = queue.pool.publish({PERSONAL_PREFIX + name: value for name, value in broadcast.shared.items()})
    undivided = stacks(len(ids), experiment.chunk) if experiment.vectorize and experiment.chunk else None
    tasks = []
    each = 4 * state.layout.row_width
    for blocks in cut_into_tasks([each] * len(ids), queue.pool.slots, undivided=undivided, longest=AT_ONCE):
        places = positions(blocks)
        of_task = [members.ids[place] for place in places]
        tasks.append(
            ScoreTask(
                round=state.server.round,
                lr=state.server.lr,
                blocks=blocks,
                ids=of_task,
                gaps=[members.gaps[place] for place in places],
                broadcast=handle,
                personal=True,
                finetune_steps=0,
                scalars={name: [each[place] for place in places] for name, each in broadcast.scalars.items()},
                states=[state.clients.get(client) for client in of_task] if experiment.keeps_states else (),
                models=True,
            )
        )
    layout: Layout = state.layout

    def take_all(task: ScoreTask, result: ScoreResult) -> None:
        for client, row in result.models.items():
            take(client, layout.model(torch.from_numpy(row)))

    queue.later(tasks, take_all)
    queue.finish()
