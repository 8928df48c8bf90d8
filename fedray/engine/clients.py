"""What one process needs to simulate clients: their data, their states, and the network that trains them."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.client.phase import ClientPhase, Stack, stacks
from fedray.client.private import PrivateRows
from fedray.core.local_training import LocalTraining
from fedray.core.private import mask_of, private_columns
from fedray.core.samples import ReadSamples, Samples
from fedray.core.seeds import every_rng
from fedray.core.stopwatch import Stopwatch
from fedray.core.structure import leaves, map_leaves
from fedray.core.vectors import Model, Vector
from fedray.data.federated import FederatedData
from fedray.data.storage.lazy import LazyItems
from fedray.data.storage.mapped import is_mapped
from fedray.engine.compiler import compiling
from fedray.engine.memory import HEADROOM, available, memory_of_client
from fedray.engine.process import return_free_memory
from fedray.engine.state.packing import tensor_over
from fedray.engine.state.states import StateFolder
from fedray.engine.state.traffic import StateTraffic
from fedray.engine.state.widths import state_widths
from fedray.engine.tasks import Blocks, Handle
from fedray.experiment.experiment import Experiment
from fedray.gradients.compiled import Compiled
from fedray.gradients.known_code import is_of_known, unknown_code
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.stack import StackNetwork

MOMENTUM = "momentum of "
"""The beginning of the names under which a client's state has the momentum that the client keeps of its models."""

PRIVATE = "private layers"
"""The name under which a client's state has the private layers of its model."""


class Clients:
    """Everything with which one process simulates clients on one device: the network, the data and the clients' states.
    For any clients, :meth:`phase_of` makes the :class:`~fedray.client.phase.ClientPhase`, the object through which an
    algorithm trains them.

    Args:
        experiment: The algorithm, the model and all settings of the run.
        data: The samples of the run, and which client holds each of them.
        states: The folder with the files of the clients' states, which clients keep from round to round.
        device: "cpu" or "cuda".
        fetch: A function that returns the object to which a handle refers, such as a broadcast. By default the handle
            is the object itself.

    The attribute ``network`` wraps the user's module, into which each client's model is loaded. ``train`` and ``test``
    have all samples of the data set.
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
        self.traffic = StateTraffic(states, self.device, lambda handle: self.fetch(handle))
        on_gpu = self.device.type == "cuda" and experiment.config.engine.profile
        self.stopwatch = Stopwatch(torch.cuda.synchronize) if on_gpu else Stopwatch()
        kind = StackNetwork if experiment.vectorize else LoopNetwork
        behaviour, module = experiment.facts.behaviour, experiment.build_model()
        user_defined = unknown_code(module, experiment.task) is not None
        # the user's code may draw for other mini-batches than those of the trial passes, or later
        draws = bool(behaviour.draws) or user_defined
        self.network: Network = kind(
            module, experiment.task, self.device, experiment.precision, draws,
            behaviour.changing, behaviour.writes, behaviour.overwrites,
        )  # fmt: skip
        robust = bool(experiment.robust is not None and experiment.robust.user_code)
        self.own_rule = not all(map(is_of_known, type(self.algorithm).__mro__))
        self.user_defined = user_defined or robust or self.own_rule or not all(map(is_of_known, experiment.upload))
        if behaviour.draws - {"torch"}:
            self.network.rng = every_rng
        if experiment.compile:
            self.network.compiled = Compiled(self.network.pure_gradient, self._shapes(), self._compiling)
        self.private: Tensor | None = None
        if experiment.private:
            columns = private_columns(self.network.module, self.network.layout, experiment.private)
            self.private = columns.to(self.device)
        # the module's own parameters were replaced by views into one row
        return_free_memory()
        self._lines: list[str] = []
        self.train = self._samples(data.x, data.y)
        self.test = self._samples(data.x_test, data.y_test)
        self.lanes = self._fitting_lanes()
        if experiment.replay:
            self.network.replay(self.lanes, self.say)
        self._last_broadcast: tuple[Handle, dict[str, Vector]] | None = None

    @property
    def largest(self) -> int:
        """The number (id) of the client with the most samples, for which memory is estimated."""
        return int(self.data.sizes().argmax())

    def first_batch(self, client: int, copies: int | None = None) -> tuple[Any, Tensor]:
        """Returns inputs ``[b, ...]`` and targets ``[b, ...]`` of a mini-batch of ``client`` (its number), with which
        the memory of a training step can be measured. With ``copies`` the mini-batch is repeated, as for that many
        clients that are trained together: ``[copies, b, ...]``."""
        indices = self.data.client(client)[: self.experiment.training.batch_size]
        return self.train.gather(indices if copies is None else np.broadcast_to(indices, (copies, len(indices))))

    def _samples(self, x: Any, y: Any) -> Samples:
        def here(array: Any) -> Tensor | None:
            return None if array is None else tensor_over(array).to(self.device)

        scale, shift = (map_leaves(here, tree) for tree in (self.data.scale, self.data.shift))
        if isinstance(x, LazyItems):
            return ReadSamples(x, tensor_over(y), scale, shift, self.device, self.experiment.training.seed)
        # mapped samples may be larger than a GPU's memory
        target = torch.device("cpu") if any(map(is_mapped, leaves(x))) else self.device
        stored, targets = map_leaves(lambda array: tensor_over(array).to(target), (x, y))
        return Samples(stored, targets, scale, shift, self.device)

    def _shapes(self) -> set[Any]:
        """Returns the shapes of the mini-batches whose gradients are compiled, which are full mini-batches: their
        number of samples, or, with stacks, pairs of the number of clients in a stack and the number of samples."""
        experiment, size = self.experiment, self.experiment.training.batch_size
        if not experiment.vectorize or experiment.chunk is None:
            return {size}
        return {(stop - start, size) for start, stop in stacks(experiment.cohort_size, experiment.chunk)}

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with self.stopwatch.on("compilation"), compiling(self.experiment.config.engine.threads):
            yield

    def broadcast(self, handle: Handle) -> dict[str, Vector]:
        """Returns the broadcast to which ``handle`` refers. A broadcast is what the server sends to all clients: a dict
        of models and tensors by name. They are in this process's own memory, on its device.

        The last broadcast stays in memory for the next call, because many tasks in a row have the same one.
        """
        if self._last_broadcast is None or self._last_broadcast[0] != handle:
            # the previous broadcast is freed first, because it may be as large
            self._last_broadcast = None
            with self.stopwatch.on("transport"):
                vectors = self.fetch(handle).unpack(self.device)
            self._last_broadcast = handle, vectors
        return self._last_broadcast[1]

    def _fitting_lanes(self) -> int:
        """Returns how many clients are trained side by side in this process: as many as the experiment asks for, or
        fewer if the memory of the GPU is not enough."""
        wanted = self.experiment.lanes
        if wanted == 1 or self.device.type != "cuda":
            return wanted
        each = memory_of_client(self.network, self.first_batch(self.largest)[0], self.state_width())
        lanes = max(1, min(wanted, int(HEADROOM * available(self.device) / each)))
        if lanes < wanted:
            self._lines.append(
                f"{_lanes(lanes)}, not {wanted}, because the free memory of the GPU is enough for no more"
            )
        return lanes

    def with_fewer_lanes(self, lanes: int, why: str) -> None:
        """Makes this process train at most ``lanes`` clients side by side from now on, because more were not possible.
        ``why`` is the reason in words, for a line that is shown to the user."""
        self.lanes = lanes
        self._lines.append(f"{_lanes(lanes)} from now on, because {why}")
        if self.experiment.replay:
            self.network.replay(lanes, self.say)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def say(self, line: str) -> None:
        """Keeps a line of text for the user, which the result of the current task brings along."""
        self._lines.append(line)

    def take_lines(self) -> tuple[str, ...]:
        """Returns the lines of text for the user that this process has collected since the last call."""
        lines = tuple(self._lines)
        self._lines.clear()
        return lines

    def stacks(self, blocks: Blocks, lanes: int = 1) -> Iterator[tuple[int, int]]:
        """Divides some clients of the cohort into stacks, groups of clients that are trained together. Yields each
        stack as a pair: the position of its first client in the cohort, and its number of clients.

        ``blocks`` are ranges ``(start, stop)`` of the clients' positions. With ``engine.vectorize`` each block is a
        stack. Otherwise a stack has at most ``lanes`` clients.
        """
        for start, stop in blocks:
            size = stop - start if self.experiment.vectorize else lanes
            yield from ((position, min(size, stop - position)) for position in range(start, stop, size))

    def phase_of(self, stack: Stack, training: LocalTraining | None = None, **rest: Any) -> ClientPhase:
        """Returns the object that an algorithm's methods get as the argument ``client``. It stands for the clients of
        ``stack``, which are trained together, in one phase of a round (a phase is one broadcast of the server and the
        work that clients do with it).

        ``training`` has the settings of their local training; None stands for the run's settings. ``rest`` are the
        other arguments of :class:`~fedray.client.phase.ClientPhase`, such as ``round``, ``lr`` and ``shared``.
        """
        return ClientPhase(
            self.network, self.train, training or self.experiment.training, stack, clients=self.data.active,
            initial=self.initial, **{"stopwatch": self.stopwatch, **rest},
        )  # fmt: skip

    def remembered(self, handles: Sequence[Handle | None], round: int) -> dict[str, Any]:
        """Returns what C clients, which are trained together in ``round``, have kept from earlier rounds, as arguments
        of :class:`~fedray.client.phase.ClientPhase`. ``handles`` has a reference to the state of each client, or None
        for a client without one; it is empty if clients keep nothing."""
        if not handles:
            return {}
        known = torch.tensor([[handle is not None] for handle in handles], device=self.device)
        private = self.private_rows(handles, round)
        return {"known": known, "private": private} | (
            {"state": self.states_of(handles)} if self.algorithm.stateful else {}
        )

    def states_of(self, handles: Sequence[Handle | None]) -> dict[str, Vector]:
        """Returns the states that C clients, which are trained together, have kept from earlier rounds: models and
        vectors by name, with a row for each client, ``[C, ...]``, in fresh memory.

        ``handles`` has a reference to the state of each client, such as a file. The reference is None for a client
        without a state, which gets zeros.
        """
        layout, algorithm = self.network.layout, self.algorithm
        rows = self._stacked(handles, state_widths(algorithm, layout))
        return {name: layout.model(row) if name in algorithm.client_models else row for name, row in rows.items()}

    def kept(self, handles: Sequence[Handle | None], name: str, width: int) -> Tensor:
        """Returns what a step of ``train.upload`` has stored under ``name`` for C clients that are trained together,
        when they last took part: vectors ``[C, width]``, a row for each client. ``handles`` has a reference to the
        state of each client, or None for a client that never took part, which gets zeros."""
        return self._stacked(handles, {name: width})[name]

    def private_rows(self, handles: Sequence[Handle | None], round: int) -> PrivateRows | None:
        """Returns the private layers of C clients that are trained together in ``round``, or None if the model has
        none. ``handles`` has a reference to the state of each client, or None for a client that never took part."""
        if self.private is None or round < self.algorithm.private_from:
            return None
        with self.stopwatch.on("transport"):
            files = [{} if handle is None else self.traffic.take(handle) for handle in handles]
        rows = torch.zeros(len(files), len(self.private), device=self.device)
        for row, file in zip(rows, files, strict=True):
            if PRIVATE in file:
                row.copy_(file[PRIVATE], non_blocking=True)
        return PrivateRows(self.private, rows, torch.tensor([[PRIVATE in file] for file in files], device=self.device))

    def momentum(self, handles: Sequence[Handle | None]) -> dict[str, Tensor]:
        """Returns the momentum that C clients, which are trained together, have kept since they last took part
        (``train.momentum_reset: never``). The result maps the name of each model that has momentum to vectors
        ``[C, width]``, with a row for each client. ``handles`` has a reference to the state of each client, or None for
        a client without a state. A client without momentum gets zeros."""
        with self.stopwatch.on("transport"):
            files = [{} if handle is None else self.traffic.take(handle) for handle in handles]
        names = sorted({name for file in files for name in file if name.startswith(MOMENTUM)})
        found = {name: torch.zeros(len(files), self.network.layout.width, device=self.device) for name in names}
        for row, file in enumerate(files):
            for name in file:
                if name in found:
                    found[name][row].copy_(file[name])
        return {name.removeprefix(MOMENTUM): rows for name, rows in found.items()}

    def received(self, handles: Sequence[Handle | None]) -> Model:
        """Returns the models that C clients, which are trained together, received when they last took part,
        ``[C, ...]``, a row for each client. Only algorithms that declare ``needs_received`` use them. ``handles`` has a
        reference to the model of each client, or None for a client that never took part, which gets zeros."""
        layout = self.network.layout
        return layout.model(self._stacked(handles, {"x": layout.row_width})["x"])

    def state_width(self) -> int:
        """Returns how many float32 numbers each client keeps from round to round: the algorithm's client states,
        the momentum of the client's model if it is kept, and private layers."""
        layout, algorithm = self.network.layout, self.algorithm
        momentum = layout.width * (self.experiment.training.momentum_reset == "never")
        private = 0 if self.private is None else len(self.private)
        return sum(state_widths(algorithm, layout).values()) + momentum + private

    def _stacked(self, handles: Sequence[Handle | None], widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the vectors to which the handles refer, by name, as ``[C, width]`` in fresh memory. A handle of None
        gives zeros."""
        stacked = {name: torch.zeros(len(handles), width, device=self.device) for name, width in widths.items()}
        with self.stopwatch.on("transport"):
            for row, handle in enumerate(handles):
                if handle is not None:
                    found = self.traffic.take(handle)
                    for name, rows in stacked.items():
                        rows[row].copy_(found[name], non_blocking=True)
        return stacked

    def parameters_of(self, *layers: str) -> Tensor:
        """Returns the mask of the parameters that belong to ``layers``, as
        :meth:`fedray.client.phase.ClientPhase.parameters_of` does."""
        return mask_of(self.network.module, self.network.layout, layers).to(self.device)

    def initial(self, client: int | None) -> Model:
        """Returns the model with which the run begins, or, if ``client`` is not None, an initial model that is drawn
        for this client."""
        layout = self.network.layout
        return layout.model(layout.pack(self.experiment.build_model(client)).row.to(self.device))


def _lanes(lanes: int) -> str:
    how = "one client after another is trained" if lanes == 1 else f"{lanes} clients are trained side by side"
    return f"engine.lanes: {how} on {platform.node()}"
