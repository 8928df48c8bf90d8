"""Runs a phase of the algorithm for the clients of a task, and adds up what they upload."""

from __future__ import annotations

import math
import platform
import traceback
from collections.abc import Mapping

import torch
from torch import Tensor

from fedray.algorithms.base import Result, Upload
from fedray.core.client import ClientPhase, Stack
from fedray.core.tree import LeafSum, TreeSum
from fedray.core.vectors import Model, Vector
from fedray.engine.clients import Clients
from fedray.engine.determinism import is_refused
from fedray.engine.memory import is_out_of_memory, too_large_for
from fedray.engine.output_check import check_same_forms, checked_forms
from fedray.engine.packing import Packed
from fedray.engine.states import StateFile
from fedray.engine.tasks import PartialSum, PhaseResult, PhaseTask
from fedray.errors import ClientError, StateLost, UserError


class PhaseRunner:
    """Runs the phases of the algorithm for ``clients``, stack by stack.

    It keeps what an earlier phase of the round kept (``Result.kept``) for the later phases. If an actor was lost
    together with what it kept, the earlier phase is run again, so that a task needs nothing but itself.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients, self.data, self.algorithm = clients, clients.data, clients.algorithm
        self._kept: dict[tuple[int, int, int], dict[str, Vector]] = {}

    def run(self, task: PhaseTask) -> PhaseResult:
        """Returns the result of a task: the uploads of its clients, summed along the summation tree, and their new
        states."""
        self._kept = {key: value for key, value in self._kept.items() if key[0] == task.round}
        leaves: dict[str, LeafSum] = {}
        merged = PhaseResult({}, {}, {})
        row = 0
        for position, size in self.clients.stacks(task.blocks):
            # a call of its own: what a stack leaves behind is gone before the next begins
            self._stack(task, position, slice(row, row + size), leaves, merged)
            row += size
        for name, own in leaves.items():
            own.finish()
            merged.sums[name].nodes = {node: value.cpu().numpy() for node, value in own.tree.nodes.items()}
        return merged

    def _stack(
        self, task: PhaseTask, position: int, rows: slice, leaves: dict[str, LeafSum], merged: PhaseResult
    ) -> None:
        """Runs a phase for the stack whose first client is at ``position`` in the cohort; its clients are ``rows`` of
        the task. Adds what the phase returns to ``leaves`` and ``merged``."""
        try:
            result, client = self._phase(task, task.phase, position, rows)
        except (StateLost, UserError):
            raise
        except (Exception, SystemExit) as error:
            if is_refused(error):
                raise
            if is_out_of_memory(error):
                raise UserError(too_large_for(self.clients, task.ids[rows], error)) from None
            clients = ", ".join(map(str, task.ids[rows]))
            where = f"phase {self.algorithm.phases[task.phase]} of round {task.round} on {platform.node()}"
            raise ClientError(f"client {clients} failed in {where}\n{traceback.format_exc()}") from None
        self.clients.network.unload()
        phase = self.algorithm.phases[task.phase]
        forms = checked_forms(result, self.algorithm, phase, client.size, self.clients.network.layout)
        check_same_forms(forms, merged.forms, self.algorithm, phase)
        merged.forms = forms
        if result.state:
            with self.clients.clock.on("transport"):
                merged.states += self._written(task, rows, result.state)

        nothing = [math.nan] * len(task.ids)
        for name, upload in result.uploads.items():
            is_model = isinstance(upload.value, Model)
            counts = self.clients.network.layout.whole_numbers if is_model else ()
            value = upload.value.row if isinstance(upload.value, Model) else upload.value
            own = leaves.setdefault(name, LeafSum(TreeSum(task.members), counts))
            own.add(position, value, self._weights(upload, client, task.members))
            whole = merged.sums.setdefault(name, PartialSum({}, upload.weights, is_model))
            if upload.scale is not None:
                whole.scale = whole.scale or list(nothing)
                whole.scale[rows] = _column(upload.scale)
        for name, scalar in result.scalars.items():
            merged.scalars.setdefault(name, list(nothing))[rows] = _column(scalar)
        for name, values in client.objective.logged().items():
            merged.log.setdefault(name, [None] * len(task.ids))[rows] = values

    def _written(self, task: PhaseTask, rows: slice, state: Mapping[str, Vector]) -> list[StateFile]:
        """Writes the new states ``[C, ...]`` of a stack, and returns their files."""
        arrays = Packed.of(state).numpy().arrays
        return [
            self.clients.states.write(
                f"client-{client}-{task.round}-{task.phase}", {name: array[row] for name, array in arrays.items()}
            )
            for row, client in enumerate(task.ids[rows])
        ]

    def _weights(self, upload: Upload, client: ClientPhase, members: int) -> Tensor:
        """Returns the float64 weights ``[C, 1]`` by which an upload's values are multiplied."""
        if upload.weights == "weighted_mean":
            return torch.tensor(client.stack.weights, dtype=torch.float64, device=self.clients.device)[:, None]
        if upload.weights == "uniform_mean":
            return torch.full((client.size, 1), 1 / members, dtype=torch.float64, device=self.clients.device)
        if upload.weights == "sum":
            return torch.ones(client.size, 1, dtype=torch.float64, device=self.clients.device)
        assert upload.scale is not None
        return upload.scale.double()

    def _phase(self, task: PhaseTask, phase: int, position: int, rows: slice) -> tuple[Result, ClientPhase]:
        """Runs one phase for one stack. An earlier phase of the round whose kept values are not here is run first."""
        name = self.algorithm.phases[phase]
        key = (task.round, position, phase)
        kept: dict[str, Vector] = {}
        if phase:
            before = (*key[:2], phase - 1)
            if before not in self._kept:
                self._phase(task, phase - 1, position, rows)
            kept = self._kept[before]
        stack = Stack(
            ids=task.ids[rows],
            indices=[self.data.client(client) for client in task.ids[rows]],
            steps=task.steps[rows],
            weights=task.weights[rows],
            gaps=task.gaps[rows],
            scalars={name: values[rows] for name, values in task.scalars[phase].items()},
        )
        client = self.clients.of(
            stack, round=task.round, lr=task.lr, shared=self.clients.broadcast(task.broadcasts[phase]), kept=kept,
            state=self.clients.states_of(task.states[rows]) if task.states else None,
            received=self.clients.received(task.received[rows]) if task.received else None,
            members=task.members,
        )  # fmt: skip
        result: Result = getattr(self.algorithm, name)(client)
        if task.keeps and phase + 1 < len(self.algorithm.phases):
            self._kept[key] = {**kept, **result.kept}
        return result, client


def _column(values: Tensor) -> list[float]:
    return [float(value) for value in values.reshape(-1).tolist()]
