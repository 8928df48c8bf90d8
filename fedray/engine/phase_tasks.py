"""Makes the tasks of a phase: what each worker is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.engine.state.run import RunState
from fedray.engine.tasks import Blocks, Handle, PhaseTask, positions
from fedray.experiment.experiment import Experiment


@dataclass(frozen=True)
class Sent:
    """What was broadcast in a phase: a handle of what all clients get, and the numbers for each client of the
    cohort."""

    shared: Handle
    scalars: Mapping[str, Sequence[float]]


def task_of(blocks: Blocks, work: float, sent: Sequence[Sent], state: RunState, experiment: Experiment) -> PhaseTask:
    """Returns the task of running a phase for the clients at the positions ``blocks`` of the cohort.

    ``sent`` holds what was broadcast in each phase of the round so far; the task is for the phase of the last one.
    ``work`` is the number of samples in all mini-batches of these clients.
    """
    server, places, algorithm = state.server, positions(blocks), experiment.algorithm
    cohort = server.cohort

    def of_task(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in places]

    ids, gaps = of_task(cohort.ids), of_task(cohort.gaps)
    return PhaseTask(
        round=server.round,
        phase=len(sent) - 1,
        blocks=blocks,
        members=len(cohort.ids),
        work=work,
        lr=server.lr,
        ids=ids,
        weights=of_task(cohort.weights),
        steps=of_task(cohort.steps),
        gaps=gaps,
        broadcasts=[each.shared for each in sent],
        scalars=[{name: of_task(values) for name, values in each.scalars.items()} for each in sent],
        states=[state.clients.get(client) for client in ids] if experiment.keeps_states else (),
        received=[state.earlier.received(server.round, gap) for gap in gaps] if algorithm.needs_received else (),
    )
