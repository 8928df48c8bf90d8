"""Runs a phase of the algorithm for the clients of a task, and adds up what they upload."""

from __future__ import annotations

import contextlib
import math
import platform
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms.base import Result, Upload
from fedray.algorithms.messages import MEANS
from fedray.client.phase import ClientPhase, Stack
from fedray.core.sending import column
from fedray.core.tree import LeafRows, LeafSum, Rows, TreeSum
from fedray.core.vectors import Model, Vector, row_of
from fedray.engine.clients import MOMENTUM, PRIVATE, Clients
from fedray.engine.clipping import clipped
from fedray.engine.determinism import is_refused
from fedray.engine.memory import is_out_of_memory, too_large
from fedray.engine.output_check import check_same_forms, checked_forms
from fedray.engine.row_check import mixing_phase
from fedray.engine.state.packing import on_host
from fedray.engine.tasks import CANDIDATES, Handle, PartialSum, PhaseResult, PhaseTask
from fedray.engine.upload_steps import UploadSteps
from fedray.errors import ClientError, StateLost, Unreachable, UserError, first_line
from fedray.gradients.rows import RowByRow

BY_ROWS = "fedray.gradients.rows.by_rows computes it of each row"


class _Apart(Exception):
    """Raised if the clients of a stack must be trained again in stacks of ``lanes`` clients. Either there was not
    enough memory for all of them, or the algorithm's rule does not treat each client by itself. ``why`` is the reason
    in words for the user."""

    def __init__(self, lanes: int, why: str) -> None:
        super().__init__(lanes, why)
        self.lanes, self.why = lanes, why


class PhaseRunner:
    """Runs phases of the algorithm in a worker, for one stack after another. A phase is a part of a round: the clients
    receive a broadcast, compute, and upload. ``clients`` has the network, the data and the clients' states.

    The values that clients keep for later phases of the round (``Result.kept``) stay in this object. If they are
    missing, for example because another worker ran the earlier phase, that phase is run again. So a task can be done by
    any worker.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients, self.data, self.algorithm = clients, clients.data, clients.algorithm
        self._kept: dict[tuple[int, int, int, int, int], dict[str, Vector]] = {}
        # numbers are read after all stacks are launched, because reading one waits for the GPU
        self._later: deque[Callable[[], None]] = deque()
        self.upload_steps = UploadSteps(clients) if clients.experiment.upload else None
        self._robust = clients.experiment.robust is not None
        self._privacy = clients.experiment.privacy
        self._keeps_momentum = clients.experiment.training.momentum_reset == "never"
        to_try = clients.experiment.vectorize and clients.own_rule
        self._to_try = {*range(len(self.algorithm.phases))} if to_try else set()

    def run(self, task: PhaseTask, following: PhaseTask | None = None) -> PhaseResult:
        """Runs a phase of the algorithm for the clients of ``task``. The result has the sums of the clients' uploads,
        the numbers that each client sends to the server (``Result.scalars``), and the files with the clients' new
        states.

        While some clients train, the states of the clients that follow are read from files. ``following`` is the next
        task, if it is known, so that the states of its first clients can be read at the end of ``task``.
        """
        self._kept = {key: value for key, value in self._kept.items() if key[:2] == (task.attempt, task.round)}
        self._later.clear()
        leaves: dict[str, LeafSum | LeafRows] = {}
        merged = PhaseResult({}, {}, {})
        stacks = self._stacks(task)
        coming = [_kept_by(task, rows) for _, rows in stacks[1:]]
        coming.append(_kept_by(following, self._stacks(following)[0][1]) if following else [])
        for (position, rows), then in zip(stacks, coming, strict=True):
            self.clients.traffic.expect(then)
            self._together(task, position, rows, leaves, merged)
        for name, leaf in leaves.items():
            leaf.finish()
            merged.sums[name].nodes = leaf.tree.nodes
        while self._later:
            self._later.popleft()()
        return merged

    def _together(
        self, task: PhaseTask, position: int, rows: slice, leaves: dict[str, LeafSum | LeafRows], merged: PhaseResult
    ) -> None:
        """Runs :meth:`_stack`. If the stack's clients can't be trained side by side, it runs them again in
        smaller stacks."""
        try:
            # in a function of its own, so that a stack's tensors are freed before the next stack begins
            return self._stack(task, position, rows, leaves, merged)
        except _Apart as error:
            lanes, why = error.lanes, error.why
        self.clients.with_fewer_lanes(lanes, why)
        for start in range(rows.start, rows.stop, lanes):
            part = slice(start, min(start + lanes, rows.stop))
            self._together(task, position + start - rows.start, part, leaves, merged)

    def _in_lanes(self, rows: slice) -> bool:
        return rows.stop - rows.start > 1 and not self.clients.experiment.vectorize

    def _stack(
        self, task: PhaseTask, position: int, rows: slice, leaves: dict[str, LeafSum | LeafRows], merged: PhaseResult
    ) -> None:
        """Runs a phase for one stack, and adds the uploads to ``leaves`` and all other results to ``merged``. The
        stack's first client is at ``position`` in the cohort, and its clients are the entries ``rows`` of the
        task's lists."""
        if task.phase in self._to_try and rows.stop - rows.start > 1:
            self._to_try.remove(task.phase)
            self._try(task, position, rows)
        try:
            result, client = self._phase(task, task.phase, position, rows)
        except (StateLost, Unreachable, UserError, _Apart):
            raise
        except (Exception, SystemExit) as error:
            if is_refused(error):
                raise
            if is_out_of_memory(error):
                if self._in_lanes(rows):
                    clients = rows.stop - rows.start
                    raise _Apart(clients // 2, f"{clients} did not fit into its memory") from None
                ids = task.ids[rows]
                batch, width = self.clients.first_batch(ids[0])[0], self.clients.state_width()
                raise UserError(too_large(self.clients.network, len(ids), batch, width, first_line(error))) from None
            clients = ", ".join(map(str, task.ids[rows]))
            where = f"phase {self._name(task.phase)} of round {task.round} on {platform.node()}"
            raise ClientError(f"client {clients} failed in {where}\n{traceback.format_exc()}") from None
        self.clients.network.unload()
        phase = self._name(task.phase)
        forms = checked_forms(result, self.algorithm, phase, client.size, self.clients.network.layout)
        check_same_forms(forms, merged.forms, self.algorithm, phase)
        merged.forms = forms
        self._save_models(task, client, merged)
        if kept := _kept_besides(client):
            result = replace(result, state={**client.state, **result.state, **kept})
        result = self._as_sent(result, client, task, rows)
        if result.state and task.keeps:
            names = [f"client-{client}-{task.round}-{task.phase}" for client in task.ids[rows]]
            with self.clients.stopwatch.on("transport"):
                merged.states += self.clients.traffic.write(names, result.state)
        self._merge(task, result, client, position, rows, leaves, merged)
        self._later.append(partial(_write_log, merged.log, len(task.ids), rows, client.objective.logged))

    def _try(self, task: PhaseTask, position: int, rows: slice) -> None:
        """Tells the user if the algorithm's phase mixes the clients in ``rows``."""

        def run(few: PhaseTask, these: slice) -> tuple[Result, ClientPhase]:
            return self._phase(few, few.phase, position + these.start - rows.start, these)

        if line := mixing_phase(task, rows, f"{type(self.algorithm).__name__}.{self._name(task.phase)}", run):
            self.clients.say(line)
        self.clients.network.unload()

    def _as_sent(self, result: Result, client: ClientPhase, task: PhaseTask, rows: slice) -> Result:
        """Returns the result of a stack as its clients send it: after the steps of an upload, without private layers,
        and clipped if training is private."""
        width = self.clients.network.layout.width
        if self.upload_steps is not None:
            result = self.upload_steps.apply(result, client, self._name(task.phase), task.states[rows])
        if client.private is not None:
            uploads = {n: replace(u, value=client.private.without(u.value, width)) for n, u in result.uploads.items()}
            result = replace(result, uploads=uploads)
        if self._privacy is not None and task.phase != CANDIDATES:
            result = clipped(result, client, self._privacy.mechanism, width)
        return result

    def _merge(
        self,
        task: PhaseTask,
        result: Result,
        client: ClientPhase,
        position: int,
        rows: slice,
        leaves: dict[str, LeafSum | LeafRows],
        merged: PhaseResult,
    ) -> None:
        """Adds a stack's uploads to ``leaves``, and its scales and scalars to ``merged``."""
        nothing = [math.nan] * len(task.ids)
        for name, upload in result.uploads.items():
            is_model = isinstance(upload.value, Model)
            counts = self.clients.network.layout.whole_numbers if is_model else ()
            value = row_of(upload.value)
            gathers = upload.weights == "gather" or (self._robust and upload.weights in MEANS)
            if self._robust and not gathers:
                raise UserError(
                    f"train.aggregation, attack: {type(self.algorithm).__name__} uploads {name} as a {upload.weights}, "
                    "in whose place nothing else can be put"
                )
            empty = LeafRows(Rows(task.members)) if gathers else LeafSum(TreeSum(task.members), counts)
            leaf = leaves.setdefault(name, empty)
            leaf.add(position, value, self._weights(upload, client, task.members))
            whole = merged.sums.setdefault(name, PartialSum({}, upload.weights, is_model, None, gathers))
            if upload.scale is not None:
                whole.scale = whole.scale or list(nothing)
                self._later.append(partial(_write, whole.scale, rows, upload.scale))
        for name, scalar in result.scalars.items():
            self._later.append(partial(_write, merged.scalars.setdefault(name, list(nothing)), rows, scalar))

    def _save_models(self, task: PhaseTask, client: ClientPhase, merged: PhaseResult) -> None:
        """Adds those of the clients' trained models that are wanted to ``merged``."""
        if task.models_of and client.trained is not None:
            for row, number in enumerate(client.stack.ids):
                if number in task.models_of:
                    merged.models[number] = on_host(client.trained.row[row]).numpy().copy()

    def _stacks(self, task: PhaseTask) -> list[tuple[int, slice]]:
        """Returns the stacks of a task, each as the position of its first client in the cohort, and the slice of the
        task's lists that is about its clients."""
        stacks, row = [], 0
        for position, size in self.clients.stacks(task.blocks, self.clients.lanes):
            stacks.append((position, slice(row, row + size)))
            row += size
        return stacks

    def _weights(self, upload: Upload, client: ClientPhase, members: int) -> Tensor:
        """Returns the float64 weights ``[C, 1]`` by which the clients' values of ``upload`` are multiplied before they
        are summed. The cohort has ``members`` clients."""
        if upload.weights == "weighted_mean":
            return column(client.stack.weights, self.clients.device, torch.float64)
        if upload.weights == "uniform_mean":
            return torch.full((client.size, 1), 1 / members, dtype=torch.float64, device=self.clients.device)
        if upload.weights in ("sum", "gather"):
            return torch.ones(client.size, 1, dtype=torch.float64, device=self.clients.device)
        assert upload.scale is not None
        return upload.scale.double()

    def _name(self, phase: int) -> str:
        return "candidates" if phase == CANDIDATES else self.algorithm.phases[phase]

    def _phase(self, task: PhaseTask, phase: int, position: int, rows: slice) -> tuple[Result, ClientPhase]:
        """Runs one phase for one stack, and returns what the algorithm returned and the stack's :class:`ClientPhase`.
        If the values that the previous phase kept are missing, that phase is run first."""
        name = self._name(phase)
        key = (task.attempt, task.round, position, rows.stop - rows.start, phase)
        kept: dict[str, Vector] = {}
        if phase > 0:
            before = (*key[:4], phase - 1)
            if before not in self._kept:
                self._phase(task, phase - 1, position, rows)
            kept = self._kept[before]
        watch = RowByRow(len(task.ids[rows]), self.clients.stopwatch) if self._in_lanes(rows) else None
        stack = Stack(
            ids=task.ids[rows],
            indices=[self.data.client(client) for client in task.ids[rows]],
            steps=task.steps[rows],
            weights=task.weights[rows],
            gaps=task.gaps[rows],
            scalars={name: values[rows] for name, values in task.scalars[phase].items()},
        )
        client = self.clients.phase_of(
            stack, round=task.round, lr=task.lr, shared=self.clients.broadcast(task.broadcasts[phase]), kept=kept,
            received=self.clients.received(task.received[rows]) if task.received else None,
            members=task.members, stopwatch=watch.stopwatch if watch else self.clients.stopwatch,
            kept_momentum=self.clients.momentum(task.states[rows]) if self._keeps_momentum else None,
            **self.clients.remembered(task.states[rows], task.round),
        )  # fmt: skip
        # a forward pass may write into a model that it has for itself
        given = {} if self.clients.network.writes else _written(client)
        with watch or contextlib.nullcontext():
            result: Result = getattr(self.algorithm, name)(client)
        for read_only, times in given.items():
            if _written(client)[read_only] != times:
                raise UserError(
                    f"{type(self.algorithm).__name__}.{name} writes into {read_only}, which other clients read too: "
                    "compute a new one, or begin with a copy as client.start gives it"
                )
        if watch and watch.found:
            raise _Apart(1, f"the algorithm's rule computes {watch.found} of all their rows at once ({BY_ROWS})")
        if task.keeps and phase >= 0 and phase + 1 < len(self.algorithm.phases):
            self._kept[key] = {**kept, **result.kept}
        return result, client


def _written(client: ClientPhase) -> dict[str, int]:
    """Returns how often each tensor that the stack's clients may only read has been written."""
    return {f"client.shared[{name!r}]": row_of(value)._version for name, value in client.shared.items()}


def _kept_besides(client: ClientPhase) -> dict[str, Vector]:
    """Returns what clients keep between rounds besides what the algorithm says: momentum and private layers."""
    kept: dict[str, Vector] = {f"{MOMENTUM}{name}": value for name, value in client.optimizer.momentum_to_keep.items()}
    if client.private is not None and client.trained is not None:
        kept[PRIVATE] = client.private.of(client.trained)
    return kept


def _kept_by(task: PhaseTask, rows: slice) -> Sequence[Handle | None]:
    """Returns the handles of what the clients of ``task`` in ``rows`` need from earlier rounds: their states, and the
    models that they received last."""
    return [*task.states[rows], *task.received[rows]]


def _write(into: list[float], rows: slice, values: Tensor) -> None:
    into[rows] = [float(value) for value in values.reshape(-1).tolist()]


def _write_log(
    log: dict[str, list[float | None]], size: int, rows: slice, logged: Callable[[], Mapping[str, Any]]
) -> None:
    for name, values in logged().items():
        log.setdefault(name, [None] * size)[rows] = values
