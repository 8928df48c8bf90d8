"""What an algorithm sees of a stack of clients (clients that are trained together) in a phase, a part of a round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedray.client.local_data import LocalData
from fedray.client.objective import Objective
from fedray.client.optimizer import Carry, LocalOptimizer
from fedray.client.private import PrivateRows
from fedray.core.batches import steps_of
from fedray.core.local_training import LocalTraining
from fedray.core.private import mask_of
from fedray.core.samples import Indices, Samples
from fedray.core.seeds import Purpose, torch_seed
from fedray.core.sending import column
from fedray.core.stopwatch import Stopwatch
from fedray.core.vectors import Model
from fedray.gradients.network import Network
from fedray.util.named import Named


def stacks(members: int, chunk: int) -> Sequence[tuple[int, int]]:
    """Divides a cohort of ``members`` clients into stacks, groups of at most ``chunk`` clients that are trained
    together. Returns the positions in the cohort at which each stack begins and ends, from 0: ``[(0, 2), (2, 5)]`` for
    5 clients and a ``chunk`` of 3. The sizes of stacks differ by one at most.

    The number of stacks is a power of two, so that two, four or eight workers have equal amounts of work; if that would
    make empty stacks, it is smaller.
    """
    count = 1
    while members > chunk * count:
        count *= 2
    starts = [members * place // count for place in range(count + 1)]
    return [(start, stop) for start, stop in pairwise(starts) if start < stop]


@dataclass
class Stack:
    """Describes a stack: C clients that are trained together. Every list has an entry for each of the clients.

    ``ids`` are the clients' numbers, ``indices`` the indices of each client's samples in the training set, ``steps``
    the clients' numbers of local steps, and ``weights`` their aggregation weights. ``gaps`` are the numbers of rounds
    since each client last took part, 0 if it never did. ``scalars`` are the numbers that the server sent to each
    client, as lists by name. ``purpose`` says what mini-batches are drawn for, usually local training; each purpose has
    random numbers of its own.
    """

    ids: Sequence[int]
    indices: Sequence[Indices]
    steps: Sequence[int]
    weights: Sequence[float]
    gaps: Sequence[int]
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    purpose: Purpose = Purpose.BATCHES


class ClientPhase:
    """What an algorithm sees of C clients that are trained together (a stack) in one phase of one round: the argument
    ``client`` of its methods.

    Attributes:
        data: The clients' samples and mini-batches (:class:`LocalData`).
        objective: Computes gradients and forward passes (:class:`Objective`).
        optimizer: Makes the clients' steps (:class:`LocalOptimizer`).
        shared: The server's broadcast: models and vectors by name.
        scalars: The server's numbers for each client by name, ``[C, 1]`` float32.
        known: Whether a client has kept something from an earlier round, such as its state or its private layers, bool
            ``[C, 1]``.
        private: The clients' private layers, None if the model has none.
        trained: The clients' models after their last local step, None before.
        state: The vectors ``[C, width]`` and models that the clients keep between rounds, by name. They are zeros
            before a client's first participation.
        kept: The values that an earlier phase of this round stored in ``Result.kept``, by name.
        received: The models that the clients received at their last participation, zeros before the first. Available
            only if the algorithm declares ``needs_received``.
        n, J, gap, p: The clients' numbers of samples, local steps and rounds since the last participation (0 if there
            was none), and their aggregation weights, each ``[C, 1]`` float32.
        N, members, size: The number of all clients that hold samples, of clients in the cohort, and of clients in the
            stack (C).
        round, lr: The round, from 1, and the clients' learning rate eta_l in it.

    Example:
        def begin(self, client):
            return Carry({"y": client.start("x")})
    """

    def __init__(
        self,
        network: Network,
        samples: Samples,
        training: LocalTraining,
        stack: Stack,
        *,
        round: int,
        lr: float,
        clients: int,
        shared: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        kept: Mapping[str, Any] | None = None,
        received: Model | None = None,
        members: int = 1,
        initial: Callable[[int | None], Model] | None = None,
        stopwatch: Stopwatch | None = None,
        kept_momentum: Mapping[str, Tensor] | None = None,
        known: Tensor | None = None,
        private: PrivateRows | None = None,
    ) -> None:
        self.data = LocalData(samples, training, stack.ids, stack.indices, stack.steps, round, stack.purpose, stopwatch)
        self.objective = Objective(network, self.data, stopwatch)
        decayed = None if training.decay_norms_and_biases else network.decayed
        self.optimizer = LocalOptimizer(training, lr, decayed, kept_momentum)
        self.stack, self.round, self.lr, self.N, self.members = stack, round, lr, clients, members
        self.private, self._writes = private, network.writes
        if private is not None:
            shared = {n: private.within(value) if isinstance(value, Model) else value for n, value in shared.items()}
        elif self._writes:
            # no forward pass may write into models that other clients receive too
            shared = {name: value.clone() if isinstance(value, Model) else value for name, value in shared.items()}
        self.shared, self.state, self.kept, self._received = (
            Named(shared),
            Named(state or {}),
            Named(kept or {}),
            received,
        )
        self._initial, self._device = initial, network.device
        self._masks: dict[tuple[str, ...], Tensor] = {}
        self.trained: Model | None = None
        self.scalars = {name: column(values, self._device) for name, values in stack.scalars.items()}
        self.size = len(stack.ids)
        self._known = known

    @property
    def n(self) -> Tensor:
        return self.data.n

    @property
    def J(self) -> Tensor:
        return self.data.J

    @cached_property
    def known(self) -> Tensor:
        if self._known is not None:
            return self._known
        return torch.zeros(self.size, 1, dtype=torch.bool, device=self._device)

    @cached_property
    def gap(self) -> Tensor:
        return column(self.stack.gaps, self._device)

    @cached_property
    def p(self) -> Tensor:
        return column(self.stack.weights, self._device)

    @property
    def received(self) -> Model:
        assert self._received is not None, "the algorithm does not declare needs_received"
        return self._received

    def start(self, name: str) -> Any:
        """Returns what local training starts from: C copies, one for each client, of the model or vector ``name`` in
        the server's broadcast. A model is returned as ``[C, row_width]``, with a row of parameters and buffers for each
        client, and a vector as ``[C, width]``, with a number for each parameter."""
        shared = self.shared[name]
        if not isinstance(shared, Model):
            return shared.expand(self.size, -1)
        if shared.row.dim() > 1:
            # with private layers each client has its own already
            return shared.clone()
        rows = shared.rows(self.size)
        # nor into the shared model, with which the client may compare its own
        return rows.clone() if self._writes and not rows.has_buffers else rows

    def further(self, steps: int | None = None, lr: float | None = None, epochs: int | None = None) -> ClientPhase:
        """Returns the same clients with mini-batches and an optimizer of their own, for local steps that an algorithm
        makes besides those of local training. They are not logged.

        Args:
            steps: How many steps each client makes; None for as many as in local training, or in ``epochs``.
            lr: The learning rate of these steps; None for that of local training.
            epochs: How many epochs each client makes, in place of ``steps``.

        Example:
            again = client.further(steps=10)
            carry = self.local_steps(again, Carry({"v": v}), self.personal_step)
        """
        training, stack = self.data.training, replace(self.stack, purpose=Purpose.FURTHER)
        if steps is not None or epochs is not None:
            training = replace(training, local_steps=steps, local_epochs=epochs)
            counts = [steps_of(len(indices), training.batch_size, steps, epochs) for indices in stack.indices]
            stack = replace(stack, steps=counts)
        made = copy(self)
        made.stack, made.lr, made.trained = stack, self.lr if lr is None else lr, None
        made.data = LocalData(
            self.data.samples,
            training,
            stack.ids,
            stack.indices,
            stack.steps,
            self.round,
            stack.purpose,
            self.data.stopwatch,
        )
        made.objective = Objective(self.objective.network, made.data, self.objective.stopwatch)
        made.optimizer = LocalOptimizer(training, made.lr, self.optimizer.decayed)
        return made

    def parameters_of(self, *layers: str) -> Tensor:
        """Returns a mask, bool ``[width]``, that is true for the parameters of a model that belong to ``layers``.
        Algorithms use it to treat some layers separately, such as private ones.

        Args:
            layers: Names of parameters and layers, patterns of names with ``*``, and shortcuts such as ``head``, as in
                ``model.private`` (:func:`fedray.core.private.private_names`).

        Raises:
            UserError: The model has no parameters and no layer of such a name.

        Example:
            head = client.parameters_of("head")
            carry = client.optimizer.descend(carry, "y", gradient, only=~head)
        """
        if layers not in self._masks:
            network = self.objective.network
            self._masks[layers] = mask_of(network.module, network.layout, layers).to(self._device)
        return self._masks[layers]

    def initial_models(self, per_client: bool) -> Model:
        """Returns C models, one for each client: copies of the initial model x^1 of the run, or, with ``per_client``, a
        different model for each client, with random initial weights that depend on the client's number."""
        assert self._initial is not None
        models = [self._initial(client if per_client else None) for client in self.stack.ids]
        return Model(torch.stack([model.row for model in models]), models[0].width)

    def generator(self, row: int, draw: int = 0) -> torch.Generator:
        """Returns a new torch generator on the CPU, from which a rule draws random numbers for the client in ``row`` of
        the stack.

        The generator's numbers depend only on ``run.seed``, the round, the client and ``draw``, a whole number that
        tells the draws of a round from each other, in whichever phase they are. They do not depend on which clients
        are trained together, as those of the global generators would.

        Example:
            noise = torch.stack([torch.randn(width, generator=client.generator(row)) for row in range(client.size)])
        """
        drawn = torch_seed(self.data.training.seed, Purpose.ALGORITHM, self.round, self.stack.ids[row], draw)
        return torch.Generator().manual_seed(drawn)

    def at_epochs(self, carry: Carry, j: int) -> Carry:
        """Resets momentum at the beginning of an epoch, if ``train.momentum_reset`` is ``epoch``: returns the carry
        with which local step ``j`` begins. In it the clients for which an epoch begins with step ``j`` have no
        momentum."""
        if self.optimizer.training.momentum_reset != "epoch":
            return carry
        return self.optimizer.reset(carry, self.data.begins_epoch(j))

    def finish(self, carry: Carry) -> None:
        """Stores what is needed after the last local step: the trained models of ``carry``, in the attribute
        ``trained``, and the momentum, if clients keep it between rounds."""
        with contextlib.suppress(LookupError):
            self.trained = carry.model
        self.optimizer.keep(carry)

    def hold(self, new: Carry, old: Carry, j: int) -> Carry:
        """Returns a carry that is ``new`` for the clients that make local step ``j`` (from 0), and ``old`` for those
        that have already made all their local steps.

        The clients of a stack make their steps together, but some make fewer. If a stack has two clients that make 3
        and 5 steps, the first client keeps its model and momentum after j = 2, while the second client continues.
        """
        if not isinstance(new, Carry):
            raise TypeError(
                f"a step must return a Carry, such as client.optimizer.descend(...) does, not {type(new).__name__}"
            )
        least = min(self.stack.steps)
        if j < least:
            # the next step needs these models for the clients that have made all their steps
            return new if j + 1 < least else new.released()
        return Carry.where(j < self.J, new, old)
