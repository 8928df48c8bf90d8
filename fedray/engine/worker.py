"""Simulates clients: turns a task into its result. Holds nothing that a retry elsewhere would miss."""

from __future__ import annotations

import math
import platform
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.algorithms.base import Result, Upload, total
from fedray.algorithms.server import Server
from fedray.core.batches import Batch
from fedray.core.clock import Clock
from fedray.core.context import Context, LocalTraining, Samples, Stack
from fedray.core.model import FlatModel, LoopModel, VmapModel
from fedray.core.seeds import SERVER, Purpose
from fedray.core.tree import TreeSum, reduce_rows, subtree
from fedray.core.vectors import Layout
from fedray.data.federated import FederatedData
from fedray.engine.determinism import nondeterministic_operations
from fedray.engine.evaluator import Evaluator
from fedray.engine.memory import Footprint, footprint, is_out_of_memory, too_large
from fedray.engine.states import StateFile, StateFolder
from fedray.engine.tasks import EvalResult, EvalTask, Handle, PhaseResult, PhaseTask, ScoreResult, Task
from fedray.errors import ClientError, StateLost, UserError
from fedray.resolve import Experiment


class Worker:
    """A model and the data on one device, and what is needed to run any task on them.

    ``states`` is where new states of clients go; ``fetch`` turns a handle into a dict of tensors or arrays.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData,
        states: StateFolder,
        device: str = "cpu",
        fetch: Callable[[Handle], Any] = lambda handle: handle,
    ) -> None:
        self.experiment, self.data, self.states, self.fetch = experiment, data, states, fetch
        self.algorithm = experiment.algorithm
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda" and experiment.config.engine.profile
        self.clock = Clock(torch.cuda.synchronize) if on_gpu else Clock()
        kind = VmapModel if experiment.vectorize else LoopModel
        self.model: FlatModel = kind(
            experiment.build_model(), experiment.loss, self.device, experiment.precision, experiment.draws
        )
        self.train = self._samples(data.x, data.y)
        self.test = self._samples(data.x_test, data.y_test)
        self.evaluator = Evaluator(self)
        self._shared: tuple[Handle, dict[str, Tensor]] | None = None
        self._kept: dict[tuple[int, int, int], dict[str, Tensor]] = {}

    def _samples(self, x: Any, y: Any) -> Samples:
        scale, shift = (
            None if a is None else torch.tensor(a, device=self.device) for a in (self.data.scale, self.data.shift)
        )
        return Samples(tensor_over(x).to(self.device), tensor_over(y).to(self.device), scale, shift)

    def run(self, task: Task) -> PhaseResult | EvalResult | ScoreResult:
        """The result of ``task``."""
        result: PhaseResult | EvalResult | ScoreResult
        with self.clock.on("algorithm" if isinstance(task, PhaseTask) else "evaluation"):
            if isinstance(task, PhaseTask):
                result = self.phase(task)
            elif isinstance(task, EvalTask):
                result = self.evaluator.evaluate(task)
            else:
                result = self.evaluator.score(task)
        result.seconds, result.nondeterministic = self.clock.take(), nondeterministic_operations()
        return result

    def shared(self, handle: Handle) -> dict[str, Tensor]:
        """A broadcast's tensors in this process's own, aligned memory; the last one is kept."""
        if self._shared is None or self._shared[0] != handle:
            with self.clock.on("transport"):
                tensors = {name: _own(value, self.device) for name, value in self.fetch(handle).items()}
            self._shared = handle, tensors
        return self._shared[1]

    def phase(self, task: PhaseTask) -> PhaseResult:
        """One phase of some clients: stack by stack, summed along the tree."""
        self._kept = {key: value for key, value in self._kept.items() if key[0] == task.round}
        sums: dict[str, TreeSum] = {}
        merged = PhaseResult({}, {}, {}, {})
        row = 0
        for position, size in self.stacks(task.blocks):
            # a call of its own: what a stack leaves behind is gone before the next begins
            self._stack(task, position, slice(row, row + size), sums, merged)
            row += size
        merged.sums = {
            name: {node: value.cpu().numpy() for node, value in tree.nodes.items()} for name, tree in sums.items()
        }
        return merged

    def _stack(
        self, task: PhaseTask, position: int, rows: slice, sums: dict[str, TreeSum], merged: PhaseResult
    ) -> None:
        """Run a phase for the stack from ``position`` on, which has ``rows`` of the task, and add what it gives to
        ``sums`` and ``merged``."""
        try:
            result, ctx = self._phase(task, task.phase, position, rows)
        except (StateLost, UserError):
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise UserError(self._too_large(task, rows.stop - rows.start, error)) from None
            clients = ", ".join(str(client) for client in task.ids[rows])
            where = f"phase {self.algorithm.phases[task.phase]} of round {task.round} on {platform.node()}"
            raise ClientError(f"client {clients} failed in {where}\n{traceback.format_exc()}") from None
        if result.state:
            with self.clock.on("transport"):
                merged.states += self._given(task, rows, result.state)

        def given(columns: dict[str, list[float]], name: str, values: list[float]) -> None:
            columns.setdefault(name, [math.nan] * len(task.ids))[rows] = values

        node = subtree(position, ctx.size)
        for name, upload in result.uploads.items():
            # in double precision, as the weights are
            leaves = upload.value.to(torch.float64, copy=True).mul_(self._leaf_weights(upload, ctx, task.members))
            sums.setdefault(name, TreeSum(task.members)).add(node, reduce_rows(leaves))
            merged.weights[name] = upload.weights
            if upload.weights == "weighted":
                given(merged.scalars, f"{name}/scale", _column(upload.scale))
        for name, scalar in result.scalars.items():
            given(merged.scalars, name, _column(scalar))
        for name, values in ctx.training_scalars().items():
            given(merged.log, name, values)

    def _state_width(self) -> int:
        layout, algorithm = self.model.layout, self.algorithm
        whole = layout.width + layout.buffer_width
        return len(algorithm.client_state) * layout.width + len(algorithm.client_models) * whole

    def _too_large(self, task: PhaseTask, clients: int, error: BaseException) -> str:
        own = self.data.client(task.ids[0])
        batch = own[: self.experiment.training.batch_size or len(own)]
        return too_large(self.model, clients, self.train.gather(batch)[0], self._state_width(), _reason(error))

    def footprint(self) -> Footprint:
        """What this process takes of its GPU with a chunk of the largest clients."""
        clients = (self.experiment.chunk or 1) if self.experiment.vectorize else 1
        largest = self.data.client(int(self.data.sizes().argmax()))
        own = largest[: self.experiment.training.batch_size or len(largest)]
        x, y = self.train.gather(np.broadcast_to(own, (clients, len(own))))
        try:
            return footprint(self.model, Batch(x, y, 0), self._state_width())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = too_large(self.model, clients, x[0], self._state_width(), _reason(error))
            raise UserError(f"{found}, and engine.device=cpu does without a GPU") from None

    def _given(self, task: PhaseTask, rows: slice, state: Mapping[str, Tensor]) -> list[StateFile]:
        """The new states ``[C, ...]`` of a stack, written."""
        arrays = {name: value.cpu().numpy() for name, value in state.items()}
        return [
            self.states.write(
                f"client-{client}-{task.round}-{task.phase}", {name: array[row] for name, array in arrays.items()}
            )
            for row, client in enumerate(task.ids[rows])
        ]

    def stacks(self, blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """First positions and sizes of what is trained together: everybody in a vectorised block, else one by one."""
        for start, stop in blocks:
            size = stop - start if self.experiment.vectorize else 1
            yield from ((position, size) for position in range(start, stop, size))

    def _leaf_weights(self, upload: Upload, ctx: Context, members: int) -> Tensor:
        """The float64 leaf weights ``[C, 1]`` of an upload."""
        if upload.weights == "mean":
            column = torch.tensor(ctx.stack.weights, dtype=torch.float64, device=self.device)[:, None]
        elif upload.weights == "uniform":
            column = torch.full((ctx.size, 1), 1 / members, dtype=torch.float64, device=self.device)
        elif upload.weights == "sum":
            column = torch.ones(ctx.size, 1, dtype=torch.float64, device=self.device)
        else:
            assert upload.scale is not None
            column = upload.scale.double()
        return column

    def _phase(self, task: PhaseTask, phase: int, position: int, rows: slice) -> tuple[Result, Context]:
        """Run one phase for one stack; an earlier one whose remains are gone is run again first."""
        name = self.algorithm.phases[phase]
        key = (task.round, position, phase)
        kept: dict[str, Tensor] = {}
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
        ctx = self.context(
            stack, round=task.round, lr=task.lr, shared=self.shared(task.broadcasts[phase]), kept=kept,
            state=self.client_states(task.states[rows]) if task.states else None,
            past=self._past(task.past[rows]) if task.past else None,
            members=task.members,
        )  # fmt: skip
        result: Result = getattr(self.algorithm, name)(ctx)
        if ctx.buffers is not None and name == "train":
            result.uploads = {**result.uploads, "buffers": total(self._buffer_leaves(ctx, position))}
        if phase + 1 < len(self.algorithm.phases):
            carried = dict(kept) | dict(result.kept)
            if ctx.buffers is not None:
                carried["buffers"] = ctx.buffers
            self._kept[key] = carried
        return result, ctx

    def _buffer_leaves(self, ctx: Context, position: int) -> Tensor:
        """p_i times each client's buffers, in float64; whole-number ones are the first client's alone."""
        assert ctx.buffers is not None
        leaves = (
            ctx.buffers.double() * torch.tensor(ctx.stack.weights, dtype=torch.float64, device=self.device)[:, None]
        )
        for slot in self.model.layout.buffer_slots:
            if not slot.dtype.is_floating_point:
                place = slice(slot.start, slot.start + slot.size)
                leaves[:, place] = 0
                if position == 0:
                    leaves[0, place] = ctx.buffers[0, place].double()
        return leaves

    def context(
        self, stack: Stack, kept: Mapping[str, Tensor] | None = None, training: LocalTraining | None = None, **rest: Any
    ) -> Context:
        training = training or self.experiment.training
        ctx = Context(
            self.model, self.train, training, stack, clients=self.data.active, kept=kept, initial=self._initial,
            clock=self.clock, **rest,
        )  # fmt: skip
        if kept and "buffers" in kept:
            ctx.buffers = kept["buffers"]
        return ctx

    def client_states(self, handles: Sequence[Handle | None]) -> dict[str, Tensor]:
        """The stack's states by name, ``[C, ...]`` in own memory; zeros for a client that has none yet."""
        layout = self.model.layout
        whole = layout.width + layout.buffer_width
        widths = dict.fromkeys(self.algorithm.client_state, layout.width)
        return self._stacked(handles, widths | dict.fromkeys(self.algorithm.client_models, whole))

    def _past(self, handles: Sequence[Handle | None]) -> Tensor:
        return self._stacked(handles, {"x": self.model.layout.width})["x"]

    def _stacked(self, handles: Sequence[Handle | None], widths: Mapping[str, int]) -> dict[str, Tensor]:
        """The vectors of each handle by name, ``[C, width]`` in own memory; zeros where there is no handle."""
        stacked = {name: torch.zeros(len(handles), width, device=self.device) for name, width in widths.items()}
        with self.clock.on("transport"):
            for row, handle in enumerate(handles):
                if handle is not None:
                    found = self.states.read(handle) if isinstance(handle, StateFile) else self.fetch(handle)
                    for name, rows in stacked.items():
                        rows[row].copy_(tensor_over(found[name]))
        return stacked

    def _initial(self, client: int | None) -> Tensor:
        """The whole initial model of the run, or one drawn for a client."""
        module = self.experiment.build_model(client)
        return torch.cat(Layout(module).pack(module)).to(self.device)

    def public_context(self, server: Server, steps: int) -> Context:
        """The server as a client whose data is the public set, of which it takes ``steps`` batches."""
        stack = Stack([SERVER], [self.data.public], [steps], [1.0], [0], purpose=Purpose.REPRESENTATION)
        training = replace(self.experiment.training, local_steps=steps, local_epochs=None)
        return self.context(stack, round=server.round, lr=server.lr, shared=server.vectors, training=training)


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def tensor_over(array: Any) -> Tensor:
    """A tensor over ``array``'s memory, which may be read-only and shared: it must only be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _own(value: Any, device: torch.device) -> Tensor:
    """A copy in fresh memory of an array that may be shared, read-only and unaligned."""
    tensor = value if isinstance(value, Tensor) else tensor_over(value)
    return tensor.to(device) if tensor.device != device else tensor.clone()


def _column(values: Tensor | None) -> list[float]:
    assert values is not None
    return [float(value) for value in values.reshape(-1).tolist()]
