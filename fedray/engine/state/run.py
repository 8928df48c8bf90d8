"""The state of a run: everything that changes from round to round and is saved in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from fedray.algorithms import Algorithm, Broadcast, ServerState
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Layout, Model
from fedray.data.federated import FederatedData
from fedray.engine.driver import Order
from fedray.engine.pool import Pool
from fedray.engine.server_rules import server_rule
from fedray.engine.state.checkpoint import Checkpoint
from fedray.engine.state.packing import Packed, on_host
from fedray.engine.state.pending import Pending
from fedray.engine.state.states import StateFile, StateFolder
from fedray.engine.tasks import Handle
from fedray.engine.worker import Worker
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment


class EarlierModels:
    """Keeps the models of earlier rounds for algorithms that use them, such as GHBM: x^s is the model with which round
    s began. Each is kept as long as clients or the server may need it, which ``algorithm`` says.

    ``pool`` stores the models. The attribute ``handles`` maps the number of a round to a handle, a reference by which
    ``pool`` finds the round's model. ``layout`` (where the parameters are in a model's row of numbers) and ``device``
    are those of the models that :meth:`model_of` returns.
    """

    def __init__(self, algorithm: Algorithm, pool: Pool, layout: Layout, device: torch.device) -> None:
        self.algorithm, self.pool, self.layout, self.device = algorithm, pool, layout, device
        self.handles: dict[int, Handle] = {}

    def remember(self, number: int, model: Model) -> None:
        """Keeps ``model``, with which round ``number`` begins. Does nothing if the algorithm does not use
        earlier models."""
        if self.algorithm.needs_received or self.algorithm.earlier_models:
            self.handles[number] = self.pool.keep(f"model-{number}", {"x": on_host(model.row).numpy()})

    def model_of(self, number: int) -> Model:
        """Returns the model with which round ``number`` began. Raises ValueError if it was not kept."""
        if number not in self.handles:
            raise ValueError(
                f"server.model_of({number}) is not one of the earlier_models={self.algorithm.earlier_models} kept"
            )
        row = torch.tensor(self.pool.fetch(self.handles[number])["x"], device=self.device)
        return self.layout.model(row)

    def received(self, number: int, gap: int) -> Handle | None:
        """Returns a handle (a reference with which a worker gets the data) of the model that a client received when it
        last took part. This was ``gap`` rounds before round ``number``. Returns None if that model is not kept, or if
        ``gap`` is 0, which means that the client never took part."""
        return self.handles.get(number - gap) if gap else None

    def forget(self, number: int, last_rounds: Mapping[int, int]) -> None:
        """Drops the models that neither clients nor the server need any more after round ``number``. ``last_rounds``
        has, by client, the last round in which the client took part."""
        following = number + 1
        needed = set(range(following - self.algorithm.earlier_models, following))
        if self.algorithm.needs_received:
            needed |= set(last_rounds.values())
        self.pool.drop([self.handles.pop(old) for old in self.handles.keys() - needed])


class RunState:
    """Everything in a run that changes from round to round. ``server`` is the server's state, and ``earlier`` has the
    models of earlier rounds. The attribute ``clients`` maps each client's number to the file with its state, and the
    attribute ``costs`` has the costs so far. ``by_hand`` says in which rounds the user has changed what, ``order``
    what is wanted of the next round, and ``attempt`` how often the run has gone back to a checkpoint.

    The other arguments do not change: ``sizes`` has the number of samples of each client, ``layout`` says where the
    parameters are in a model's row of numbers, and ``device`` is the server's. ``as_cohort(server, broadcast)`` returns
    all clients of the round's cohort, after they have received ``broadcast`` from the server, as one
    :class:`ClientPhase`. It trains them together, in the server's process.
    """

    def __init__(
        self,
        server: ServerState,
        earlier: EarlierModels,
        sizes: NDArray[np.int64],
        layout: Layout,
        device: torch.device,
        as_cohort: Callable[[ServerState, Broadcast], ClientPhase],
    ) -> None:
        self.server, self.earlier, self.sizes, self.layout, self.device = server, earlier, sizes, layout, device
        self.as_cohort = as_cohort
        self.clients: dict[int, StateFile] = {}
        self.pending = Pending(layout)
        self.private: Tensor | None = None
        self.private_from = 1
        self.order = Order()
        self.attempt = 0
        self.by_hand: dict[int, list[str]] = {}
        self.costs: dict[str, Any] = {"iterations": 0, "bytes_down": 0, "bytes_up": 0, "flops": 0.0}

    @classmethod
    def first(cls, experiment: Experiment, data: FederatedData, worker: Worker, pool: Pool) -> RunState:
        """Returns the state of a run before its first round. ``worker`` is the server's worker, which has the initial
        model and the clients' data. ``pool`` stores the models of earlier rounds."""
        algorithm, layout, sizes = experiment.algorithm, worker.clients.network.layout, data.sizes()
        earlier = EarlierModels(algorithm, pool, layout, worker.clients.device)
        x = worker.clients.network.loaded()

        def initial_model(number: int) -> Model:
            model = worker.clients.initial(number)
            if torch.equal(model.row, x.row):
                raise UserError(
                    f"algorithm.name={experiment.config.algorithm.name}: its models begin with the same weights, and "
                    "would stay the same: set model.init=default"
                )
            return model

        server = ServerState(
            vectors={"x": x},
            N=data.active,
            seed=experiment.config.run.seed,
            server_lr=experiment.config.train.server_lr,
            as_client=worker.server_as_client,
            draw_inputs=worker.draw_inputs,
            parameters_of=worker.clients.parameters_of,
            initial_model=initial_model,
            model_of=earlier.model_of,
            batch_size=experiment.training.batch_size,
            public_samples=len(data.public),
            weighting=experiment.weighting,
            total_samples=int(sizes.sum()),
            test_samples=len(data.y_test),
        )
        worker.clients.network.unload()
        with server_rule(algorithm, "init_server", server):
            algorithm.init_server(server)
        state = cls(server, earlier, sizes, layout, worker.clients.device, worker.cohort_as_stack)
        state.private, state.private_from = worker.clients.private, algorithm.private_from
        # pools that never go back to a checkpoint do not count
        state.attempt = getattr(pool, "attempt", 0)
        return state

    def begin(self, number: int, experiment: Experiment) -> None:
        """Begins round ``number`` (from 1) at the server: sets its learning rates, and keeps its model if clients may
        still need it in later rounds."""
        server = self.server
        server.round, server.client_scalars = number, {}
        server.lr, server.server_lr = experiment.rates(number)
        self.earlier.remember(number, server["x"])

    def with_private(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the ``sums`` of what clients have sent, with the server's own private layers in models, of which
        clients send nothing."""
        if self.private is None or self.server.round < self.private_from:
            return sums
        for value in sums.values():
            if isinstance(value, Model):
                value.row[..., self.private] = self.server["x"].row[self.private]
        return sums

    def is_finite(self) -> bool:
        """Returns whether all numbers of the server's parameters and vectors are finite. If they are not, the run ends.
        Buffers are not checked, because constant ones, such as attention masks, may contain infinities."""
        values = self.server.vectors.values()
        return all(_is_finite(value.parameters if isinstance(value, Model) else value) for value in values)

    def commit(self, number: int, states: Mapping[int, StateFile], pool: Pool, ids: Iterable[int]) -> None:
        """Ends round ``number``, in which the clients ``ids`` have taken part. ``states`` maps the numbers of clients
        to the files with their new states, which replace the old ones. ``pool`` deletes the old files, and the models
        of earlier rounds that nobody needs any more."""
        self.server.last_round |= dict.fromkeys(ids, number)
        self.earlier.forget(number, self.server.last_round)
        pool.drop([self.clients[client] for client in states if client in self.clients])
        self.clients |= states

    def restore(self, saved: Checkpoint, pool: Pool, folder: StateFolder) -> None:
        """Goes back to the checkpoint ``saved``. The clients' states are linked or copied from there into ``folder``,
        the folder with clients' states on the server's node, and ``pool`` stores the models of earlier rounds."""
        server = self.server
        vectors = saved.vectors.unpack(self.device)
        self.pending.restore(vectors, saved.record.get("pending", {}))
        server.vectors, server.round = vectors, saved.round
        server.table = _by_client(saved.record["table"])
        server.last_round = {int(client): number for client, number in saved.record["last_round"].items()}
        self.costs = saved.record["costs"]
        self.by_hand = {int(number): what for number, what in saved.record.get("by_hand", {}).items()}
        pool.drop([*self.clients.values(), *self.earlier.handles.values()])
        self.clients = {client: folder.adopt(path) for client, path in saved.states.items()}
        self.earlier.handles = {number: pool.keep(path.name, load_file(path)) for number, path in saved.past.items()}

    def vectors(self) -> Packed:
        """Returns the server's models and vectors, packed for a checkpoint."""
        return Packed.pack(self.server.vectors | self.pending.vectors())

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint stores as JSON, as a dict: ``table`` has the numbers that the server keeps for each
        client, ``last_round`` the last round in which each client took part, and ``costs`` the costs so far."""
        return {
            "table": self.server.table,
            "last_round": self.server.last_round,
            "costs": self.costs,
            "by_hand": self.by_hand,
            "pending": self.pending.record(),
        }


def _is_finite(tensor: Tensor) -> bool:
    # a sum needs no second tensor, but the sum of large finite numbers may be infinite
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _by_client(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    return {name: {int(client): value for client, value in column.items()} for name, column in table.items()}
