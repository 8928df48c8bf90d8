"""Simulates clients: turns a task into its result. Holds nothing that a retry elsewhere would miss."""

from __future__ import annotations

import math
import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.algorithms.base import Result, Upload
from fedray.algorithms.server_state import ServerState
from fedray.core.batches import Batch
from fedray.core.client import ClientPhase, Stack
from fedray.core.clock import Clock
from fedray.core.local_data import Samples
from fedray.core.local_training import LocalTraining
from fedray.core.network import LoopNetwork, Network, StackNetwork
from fedray.core.seeds import SERVER, Purpose, stream
from fedray.core.tree import TreeSum, reduce_rows, subtree
from fedray.core.vectors import Layout, Model, Vector
from fedray.data.federated import FederatedData
from fedray.engine.determinism import nondeterministic_operations
from fedray.engine.evaluator import Evaluator
from fedray.engine.memory import Footprint, footprint, is_out_of_memory, too_large
from fedray.engine.output_check import check_same_forms, checked_forms
from fedray.engine.packing import Packed, tensor_over
from fedray.engine.states import StateFile, StateFolder
from fedray.engine.tasks import EvalResult, EvalTask, Handle, PartialSum, PhaseResult, PhaseTask, ScoreResult, Task
from fedray.errors import ClientError, StateLost, UserError, first_line
from fedray.experiment import Experiment


class Worker:
    """A network and the data on one device, and what is needed to run any task on them.

    ``states`` is where new states of clients go; ``fetch`` gives what a handle names.
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
        kind = StackNetwork if experiment.vectorize else LoopNetwork
        self.network: Network = kind(
            experiment.build_model(), experiment.loss, self.device, experiment.precision, experiment.draws
        )
        self.train = self._samples(data.x, data.y)
        self.test = self._samples(data.x_test, data.y_test)
        self.evaluator = Evaluator(self)
        self._shared: tuple[Handle, dict[str, Vector]] | None = None
        self._kept: dict[tuple[int, int, int], dict[str, Vector]] = {}

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

    def shared(self, handle: Handle) -> dict[str, Vector]:
        """A broadcast's models and tensors in this process's own, aligned memory; the last one is kept."""
        if self._shared is None or self._shared[0] != handle:
            with self.clock.on("transport"):
                vectors = self.fetch(handle).own(self.device)
            self._shared = handle, vectors
        return self._shared[1]

    def phase(self, task: PhaseTask) -> PhaseResult:
        """One phase of some clients: stack by stack, summed along the tree."""
        self._kept = {key: value for key, value in self._kept.items() if key[0] == task.round}
        trees: dict[str, TreeSum] = {}
        merged = PhaseResult({}, {}, {})
        row = 0
        for position, size in self.stacks(task.blocks):
            # a call of its own: what a stack leaves behind is gone before the next begins
            self._stack(task, position, slice(row, row + size), trees, merged)
            row += size
        for name, tree in trees.items():
            merged.sums[name].nodes = {node: value.cpu().numpy() for node, value in tree.nodes.items()}
        return merged

    def _stack(
        self, task: PhaseTask, position: int, rows: slice, trees: dict[str, TreeSum], merged: PhaseResult
    ) -> None:
        """Run a phase for the stack from ``position`` on, which has ``rows`` of the task, and add what it gives to
        ``trees`` and ``merged``."""
        try:
            result, client = self._phase(task, task.phase, position, rows)
        except (StateLost, UserError):
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise UserError(self._too_large(task, rows.stop - rows.start, error)) from None
            clients = ", ".join(map(str, task.ids[rows]))
            where = f"phase {self.algorithm.phases[task.phase]} of round {task.round} on {platform.node()}"
            raise ClientError(f"client {clients} failed in {where}\n{traceback.format_exc()}") from None
        phase = self.algorithm.phases[task.phase]
        forms = checked_forms(result, self.algorithm, phase, client.size, self.network.layout)
        check_same_forms(forms, merged.forms, self.algorithm, phase)
        merged.forms = forms
        if result.state:
            with self.clock.on("transport"):
                merged.states += self._written(task, rows, result.state)

        nothing = [math.nan] * len(task.ids)
        node = subtree(position, client.size)
        for name, upload in result.uploads.items():
            leaves = self._leaves(upload, client, position, task.members)
            trees.setdefault(name, TreeSum(task.members)).add(node, reduce_rows(leaves))
            own = PartialSum({}, upload.weights, isinstance(upload.value, Model))
            whole = merged.sums.setdefault(name, own)
            if upload.scale is not None:
                whole.scale = whole.scale or list(nothing)
                whole.scale[rows] = _column(upload.scale)
        for name, scalar in result.scalars.items():
            merged.scalars.setdefault(name, list(nothing))[rows] = _column(scalar)
        for name, values in client.objective.logged().items():
            merged.log.setdefault(name, list(nothing))[rows] = values

    def _state_width(self) -> int:
        layout, algorithm = self.network.layout, self.algorithm
        return len(algorithm.client_state) * layout.width + len(algorithm.client_models) * layout.row_width

    def _too_large(self, task: PhaseTask, clients: int, error: BaseException) -> str:
        own = self.data.client(task.ids[0])
        batch = own[: self.experiment.training.batch_size or len(own)]
        return too_large(self.network, clients, self.train.gather(batch)[0], self._state_width(), first_line(error))

    def footprint(self) -> Footprint:
        """What this process takes of its GPU with a chunk of the largest clients."""
        clients = (self.experiment.chunk or 1) if self.experiment.vectorize else 1
        largest = self.data.client(int(self.data.sizes().argmax()))
        own = largest[: self.experiment.training.batch_size or len(largest)]
        x, y = self.train.gather(np.broadcast_to(own, (clients, len(own))))
        try:
            return footprint(self.network, Batch(x, y, 0), self._state_width())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = too_large(self.network, clients, x[0], self._state_width(), first_line(error))
            raise UserError(f"{found}, and engine.device=cpu does without a GPU") from None

    def _written(self, task: PhaseTask, rows: slice, state: Mapping[str, Vector]) -> list[StateFile]:
        """The files of the new states ``[C, ...]`` of a stack."""
        arrays = Packed.of(state).numpy().arrays
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

    def _leaves(self, upload: Upload, client: ClientPhase, position: int, members: int) -> Tensor:
        """What the clients of the stack from ``position`` on add to the sum of an upload, ``[C, ...]``: in double
        precision, as the weights are."""
        if not isinstance(upload.value, Model):
            return upload.value.to(torch.float64, copy=True).mul_(self._weights(upload, client, members))
        row = upload.value.row
        leaves = row.to(torch.float64, copy=True).mul_(self._weights(upload, client, members))
        for place in self.network.layout.whole_numbers:
            leaves[:, place] = 0
            if position == 0:
                leaves[0, place] = row[0, place].double()
        return leaves

    def _weights(self, upload: Upload, client: ClientPhase, members: int) -> Tensor:
        """The float64 weights ``[C, 1]`` of an upload's leaves."""
        if upload.weights == "weighted_mean":
            return torch.tensor(client.stack.weights, dtype=torch.float64, device=self.device)[:, None]
        if upload.weights == "uniform_mean":
            return torch.full((client.size, 1), 1 / members, dtype=torch.float64, device=self.device)
        if upload.weights == "sum":
            return torch.ones(client.size, 1, dtype=torch.float64, device=self.device)
        assert upload.scale is not None
        return upload.scale.double()

    def _phase(self, task: PhaseTask, phase: int, position: int, rows: slice) -> tuple[Result, ClientPhase]:
        """Run one phase for one stack; an earlier one whose remains are gone is run again first."""
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
        client = self.client(
            stack, round=task.round, lr=task.lr, shared=self.shared(task.broadcasts[phase]), kept=kept,
            state=self.client_states(task.states[rows]) if task.states else None,
            received=self._received(task.received[rows]) if task.received else None,
            members=task.members,
        )  # fmt: skip
        result: Result = getattr(self.algorithm, name)(client)
        if phase + 1 < len(self.algorithm.phases):
            self._kept[key] = {**kept, **result.kept}
        return result, client

    def client(self, stack: Stack, training: LocalTraining | None = None, **rest: Any) -> ClientPhase:
        """A phase of the clients of ``stack``; ``training`` in place of the run's own."""
        return ClientPhase(
            self.network, self.train, training or self.experiment.training, stack, clients=self.data.active,
            initial=self._initial, **{"clock": self.clock, **rest},
        )  # fmt: skip

    def client_states(self, handles: Sequence[Handle | None]) -> dict[str, Vector]:
        """The stack's states by name, ``[C, ...]`` in own memory; zeros for a client that has none yet."""
        layout, algorithm = self.network.layout, self.algorithm
        widths = dict.fromkeys(algorithm.client_state, layout.width)
        rows = self._stacked(handles, widths | dict.fromkeys(algorithm.client_models, layout.row_width))
        return {name: layout.model(row) if name in algorithm.client_models else row for name, row in rows.items()}

    def _received(self, handles: Sequence[Handle | None]) -> Model:
        layout = self.network.layout
        return layout.model(self._stacked(handles, {"x": layout.row_width})["x"])

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

    def _initial(self, client: int | None) -> Model:
        """The initial model of the run, or one drawn for a client."""
        module = self.experiment.build_model(client)
        layout = Layout(module)
        return layout.model(layout.pack(module).row.to(self.device))

    def draw_inputs(self, server: ServerState, size: int, source: str) -> Tensor:
        """A batch of ``size`` inputs of the set ``source`` (public or test), or all of a smaller one, drawn anew each
        round."""
        samples = self.train if source == "public" else self.test
        indices = self.data.public if source == "public" else np.arange(len(self.data.y_test))
        if size < len(indices):
            rng = stream(server.seed, Purpose.PROBE, server.round)
            indices = np.sort(rng.choice(indices, size, replace=False))
        return samples.gather(indices)[0]

    def server_as_client(self, server: ServerState, steps: int) -> ClientPhase:
        """The server as a client whose data is the public set, of which it takes ``steps`` batches."""
        stack = Stack([SERVER], [self.data.public], [steps], [1.0], [0], purpose=Purpose.REPRESENTATION)
        training = replace(self.experiment.training, local_steps=steps, local_epochs=None)
        return self.client(stack, training, round=server.round, lr=server.lr, shared=server.vectors)


def _column(values: Tensor) -> list[float]:
    return [float(value) for value in values.reshape(-1).tolist()]
