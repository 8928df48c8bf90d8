"""The clients' optimizer (SGD, Adam or AdamW, with clipping and weight decay), and the values that local training
carries from one local step to the next."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedray.core.local_training import LocalTraining
from fedray.core.vectors import Model
from fedray.errors import near_miss
from fedray.gradients.rows import by_rows


class Memory(NamedTuple):
    """What the optimizer of C clients has stored about its earlier steps of one of their models. ``buffers`` maps names
    such as ``momentum`` to vectors ``[C, width]``, and ``steps`` is the number of steps that Adam has made (0 for
    SGD)."""

    buffers: Mapping[str, Tensor] = MappingProxyType({})
    steps: int = 0

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Returns the optimizer's vector ``name``, such as ``momentum``, ``[C, width]``; before the first step, zeros
        in the shape of ``like``."""
        found = self.buffers.get(name)
        return torch.zeros_like(like) if found is None else found


NEW = Memory()


class Carry:
    """What local training carries from one local step to the next: the algorithm's models and vectors of C clients, and
    what the clients' optimizer has stored about each model that it trains, such as momentum.

    A carry is never changed; each step makes a new one. Only the models in ``overwritable`` may be changed in place, by
    the next step.

    Args:
        values: Models and vectors by name. A model is a :class:`Model` ``[C, row_width]`` with a row of parameters and
            buffers for each client, a vector a tensor ``[C, width]`` with a number for each parameter. The first model
            is the one that local training is for.
        memories: For each model by name, what the optimizer has stored about it, such as momentum.
        overwritable: The names of the models that the next step may overwrite.

    Example:
        carry = Carry({"y": client.start("x")})
        y = carry["y"]
    """

    __slots__ = ("_values", "memories", "overwritable")

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        memories: Mapping[str, Memory] = MappingProxyType({}),
        overwritable: frozenset[str] = frozenset(),
    ) -> None:
        self._values, self.memories, self.overwritable = values, memories, overwritable

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"the carry has no {name!r}{near_miss(name, self._values)}")
        return self._values[name]

    @property
    def model(self) -> Model:
        """The C clients' models that are trained: the first model among the values of the carry. Raises
        :class:`LookupError` if there is none."""
        found = [value for value in self._values.values() if isinstance(value, Model)]
        if not found:
            raise LookupError("the carry has no model")
        return found[0]

    def update(self, **values: Any) -> Carry:
        """Returns a new carry in which ``values``, models or vectors by name, are added or replace those of the same
        names: ``carry.update(total=total)``. Everything else, including what the optimizer has stored, is that of this
        carry."""
        kept = self.overwritable - values.keys()
        return Carry({**self._values, **values}, memories=self.memories, overwritable=kept)

    def moved(self, name: str, direction: Tensor, by: float, in_place: bool) -> Carry:
        """Makes a step of the C models ``name``: returns a carry in which ``by`` times ``direction [C, width]`` is
        added to their parameters.

        The models of this carry are overwritten if ``overwritable`` contains ``name``; the result is then this carry
        itself. Otherwise new models are made. ``in_place`` says whether the next step may overwrite these new models,
        which is faster.
        """
        if name in self.overwritable:
            self[name].parameters.add_(direction, alpha=by)
            return self
        carry = self.update(**{name: self[name].moved(direction, by)})
        if in_place:
            carry.overwritable |= {name}
        return carry

    def released(self) -> Carry:
        """Protects the models of this carry from being overwritten, because the caller still needs them: returns a
        carry with the same values, none of which the next step may overwrite."""
        return Carry(self._values, memories=self.memories) if self.overwritable else self

    def memory(self, name: str) -> Memory:
        """Returns what the optimizer has stored about the steps of the model ``name``, such as its momentum. Before the
        first step it is an empty :class:`Memory`."""
        return self.memories.get(name, NEW)

    def remember(self, name: str, buffers: Mapping[str, Tensor], steps: int = 0) -> Carry:
        """Stores what the optimizer needs in the next step of the model ``name``: returns a carry with ``buffers``,
        vectors ``[C, width]`` by name, and ``steps``, the number of steps that Adam has made. The optimizer calls it at
        each step. An algorithm can call it before the first step, to begin with another momentum than zero:
        ``carry.remember("y", {"momentum": b})``."""
        memories = {**self.memories, name: Memory(buffers, steps)}
        return Carry(self._values, memories=memories, overwritable=self.overwritable)

    @staticmethod
    def where(chosen: Tensor, one: Carry, other: Carry) -> Carry:
        """Chooses between two carries for each client, when some clients of a stack have made all their local steps:
        returns a carry with the values of ``one`` for the clients for which ``chosen [C, 1]`` is true, and those of
        ``other`` for the others.

        Clients that get the values of ``other`` make no further steps, so the numbers of the optimizer's steps are
        those of ``one``.
        """
        memories = {}
        for name, (buffers, steps) in one.memories.items():
            before = other.memory(name)
            held = {key: torch.where(chosen, value, before.buffer(key, value)) for key, value in buffers.items()}
            memories[name] = Memory(held, steps)
        values = {name: _where(chosen, value, other[name]) for name, value in one._values.items()}
        return Carry(values, memories=memories)


def _where(chosen: Tensor, one: Any, other: Any) -> Any:
    return Model.where(chosen, one, other) if isinstance(one, Model) else torch.where(chosen, one, other)


class LocalOptimizer:
    """The optimizer of C clients that are trained together: SGD, Adam or AdamW, with clipping and weight decay.
    Algorithms reach it as ``client.optimizer``. What it stores from step to step, such as momentum, is in the
    :class:`Carry` that goes through local training. Momentum begins at zero in each round, unless
    ``train.momentum_reset`` says otherwise.

    If the attribute ``in_place`` is true, a step overwrites the models that the step before it made, which is faster
    than making new ones. The attribute ``momentum_to_keep`` is a dict that after local training maps the name of each
    model to the momentum ``[C, width]`` that the clients keep for the next round. It is empty if they keep none.

    Args:
        training: The settings of local training, which have the optimizer's name and hyper-parameters.
        lr: The learning rate eta_l of this round.
        decayed: Which parameters weight decay pulls to 0, as ones and zeros ``[width]``; None stands for all.
        kept_momentum: The momentum ``[C, width]`` that the clients have kept since they last took part, by the name of
            the model. None if they keep none.

    Example:
        gradient = client.objective.gradient(carry["y"], batch)
        carry = client.optimizer.descend(carry, "y", gradient)
    """

    in_place = False

    def __init__(
        self,
        training: LocalTraining,
        lr: float,
        decayed: Tensor | None = None,
        kept_momentum: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.training, self.lr, self.decayed = training, lr, decayed
        self._kept_momentum = kept_momentum
        self.momentum_to_keep: dict[str, Tensor] = {}

    def resume(self, carry: Carry) -> Carry:
        """Restores momentum at the beginning of local training: returns a carry in which each model has the momentum
        that its clients have kept since they last took part (``train.momentum_reset: never``). If they keep none,
        ``carry`` is unchanged."""
        for name, momentum in (self._kept_momentum or {}).items():
            carry = carry.remember(name, {"momentum": momentum})
        return carry

    def reset(self, carry: Carry, chosen: Tensor) -> Carry:
        """Returns a carry in which what the optimizer has stored, such as momentum, is 0 again for the clients for
        which ``chosen [C, 1]`` is true."""
        for name, memory in carry.memories.items():
            kept = {key: torch.where(chosen, 0.0, buffer) for key, buffer in memory.buffers.items()}
            carry = carry.remember(name, kept, memory.steps)
        return carry

    def keep(self, carry: Carry) -> None:
        """Stores the momentum in ``momentum_to_keep`` after the last local step, if the clients keep it for the next
        round in which they take part."""
        if self._kept_momentum is not None:
            self.momentum_to_keep |= {name: memory.buffers["momentum"] for name, memory in carry.memories.items()}

    def direction(self, carry: Carry, name: str, gradient: Tensor) -> tuple[Tensor, Carry]:
        """Computes a step of the models ``carry[name]`` without making it: returns the direction ``[C, width]`` of the
        step, and a carry with the optimizer's new momentum (or Adam's averages). The models in the carry are not
        changed.

        The gradient is clipped, weight decay is added to it, and the sum goes to SGD or Adam. AdamW adds weight decay
        to the direction instead.

        Args:
            carry: The models, and what the optimizer has stored about their earlier steps.
            name: The name of the models in the carry.
            gradient: The gradients ``[C, width]``, which the algorithm may have corrected.
        """
        training = self.training
        if training.grad_clip:
            norm = by_rows(lambda row: row.norm(dim=1, keepdim=True), gradient)
            gradient = gradient * (training.grad_clip / norm.clamp(min=training.grad_clip))
        if training.optimizer == "adamw":
            direction, carry = self._adam(carry, name, gradient)
            return self._with_decay(direction, carry[name]), carry
        gradient = self._with_decay(gradient, carry[name])
        return self._adam(carry, name, gradient) if training.optimizer == "adam" else self._sgd(carry, name, gradient)

    def _with_decay(self, vector: Tensor, model: Model) -> Tensor:
        if not self.training.weight_decay:
            return vector
        pulled = model.parameters if self.decayed is None else model.parameters * self.decayed
        return vector.add(pulled, alpha=self.training.weight_decay)

    def _sgd(self, carry: Carry, name: str, g: Tensor) -> tuple[Tensor, Carry]:
        """Returns the direction of a step of SGD for the gradient ``g``, and a carry with the new momentum: b <- m b +
        g, where m is ``momentum``, as in torch.optim.SGD. The direction is b, or g + m b in Nesterov's form."""
        m = self.training.momentum
        if not m:
            return g, carry
        b = g.add(carry.memory(name).buffer("momentum", g), alpha=m)
        return g.add(b, alpha=m) if self.training.nesterov else b, carry.remember(name, {"momentum": b})

    def _adam(self, carry: Carry, name: str, g: Tensor) -> tuple[Tensor, Carry]:
        """Returns the direction of a step of Adam for the gradient ``g``, and a carry with the new averages: m <- beta1
        m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2. The direction of step t is m / (1 - beta1^t) / (sqrt(v / (1 -
        beta2^t)) + epsilon) (Kingma and Ba, ICLR 2015)."""
        before = carry.memory(name)
        beta1, beta2, t = self.training.beta1, self.training.beta2, before.steps + 1
        m = torch.lerp(before.buffer("m", g), g, 1 - beta1)
        v = (before.buffer("v", g) * beta2).addcmul(g, g, value=1 - beta2)
        scale = v.sqrt() / (1 - beta2**t) ** 0.5 + self.training.epsilon
        return m / (1 - beta1**t) / scale, carry.remember(name, {"m": m, "v": v}, t)

    def descend(self, carry: Carry, name: str, gradient: Tensor, only: Tensor | None = None) -> Carry:
        """Makes one local step of the models ``carry[name]``: returns a carry in which each of their parameters w has
        become w - eta_l * direction. The direction comes from :meth:`direction`; for plain SGD it is the gradient.

        Args:
            carry: The models, and what the optimizer has stored about their earlier steps.
            name: The name of the models in the carry.
            gradient: The gradients ``[C, width]``, which the algorithm may have corrected.
            only: Which parameters move, bool ``[width]`` (:meth:`ClientPhase.parameters_of`). The others stay as they
                are, also under weight decay. None stands for all.
        """
        if only is not None:
            gradient = torch.where(only, gradient, 0)
        direction, carry = self.direction(carry, name, gradient)
        if only is not None:
            direction = torch.where(only, direction, 0)
        return carry.moved(name, direction, -self.lr, self.in_place)
