"""The clients' own optimizer, which is SGD with clipping, weight decay and momentum; and what local training carries
from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedray.core.local_training import LocalTraining
from fedray.core.vectors import Model


class Carry:
    """What local training carries from one local step to the next: the algorithm's models and vectors of C clients by
    name, and the momentum buffer ``momentum [C, width]`` of the clients' optimizer, which is None before its first
    step.

    A carry never changes. Each step makes a new one.
    """

    __slots__ = ("_values", "momentum")

    def __init__(self, values: Mapping[str, Any], momentum: Tensor | None = None) -> None:
        self._values, self.momentum = values, momentum

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def update(self, **values: Any) -> Carry:
        """Returns the carry with these values in place of those with the same names."""
        return Carry({**self._values, **values}, self.momentum)

    @staticmethod
    def where(chosen: Tensor, one: Carry, other: Carry) -> Carry:
        """Returns ``one`` for the clients for which ``chosen [C, 1]`` is true, and ``other`` for the rest."""
        momentum = one.momentum
        if momentum is not None:
            before = torch.zeros_like(momentum) if other.momentum is None else other.momentum
            momentum = torch.where(chosen, momentum, before)
        return Carry({name: _where(chosen, value, other[name]) for name, value in one._values.items()}, momentum)


def _where(chosen: Tensor, one: Any, other: Any) -> Any:
    return Model.where(chosen, one, other) if isinstance(one, Model) else torch.where(chosen, one, other)


class LocalOptimizer:
    """SGD with the learning rate ``lr`` (eta_l), and with the clipping, weight decay and momentum of ``training``.

    ``decayed [width]`` is 1 for the parameters that weight decay pulls to 0, and 0 for the others; None means all.
    """

    def __init__(self, training: LocalTraining, lr: float, decayed: Tensor | None = None) -> None:
        self.training, self.lr, self.decayed = training, lr, decayed

    def direction(self, carry: Carry, name: str, gradient: Tensor) -> tuple[Tensor, Carry]:
        """Returns the direction ``[C, width]`` of a step of the models ``carry[name]``, and the carry with the new
        momentum buffer.

        ``gradient`` may have been corrected by the algorithm. First it is clipped, then weight decay is added, and the
        sum g goes through the momentum buffer b, as in torch.optim.SGD: b <- m b + g. The direction is b, or g + m b in
        Nesterov's form.
        """
        training = self.training
        if training.grad_clip:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (training.grad_clip / norm.clamp(min=training.grad_clip))
        if training.weight_decay:
            pulled = carry[name].parameters
            pulled = pulled if self.decayed is None else pulled * self.decayed
            gradient = gradient.add(pulled, alpha=training.weight_decay)
        if training.momentum:
            before = torch.zeros_like(gradient) if carry.momentum is None else carry.momentum
            buffer = gradient.add(before, alpha=training.momentum)
            gradient = gradient.add(buffer, alpha=training.momentum) if training.nesterov else buffer
            carry = Carry(carry._values, buffer)
        return gradient, carry

    def descend(self, carry: Carry, name: str, gradient: Tensor) -> Carry:
        """Makes one step of the models ``carry[name]``: w - eta_l * direction."""
        direction, carry = self.direction(carry, name, gradient)
        return carry.update(**{name: carry[name].moved(direction, -self.lr)})
