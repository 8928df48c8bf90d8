"""Compares the steps of the clients' optimizer with those of torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedray.client.optimizer import Carry, LocalOptimizer


def checked_direction(
    direction: Callable[..., tuple[Tensor, Carry]], steps: list[str]
) -> Callable[..., tuple[Tensor, Carry]]:
    """Wraps the method ``direction`` of :class:`LocalOptimizer` for a test: the wrapped method also asserts that its
    result is that of torch.optim.SGD, and notes the name of the model that makes the step in ``steps``.

    Each client optimizer has torch optimizers for comparison, one for each model. What a client optimizer remembers
    before its first step comes from the algorithm, and the torch optimizers start with the same momentum.
    """
    torchs: dict[LocalOptimizer, dict[str, tuple[nn.Parameter, torch.optim.SGD]]] = {}

    def checked(self: LocalOptimizer, carry: Carry, name: str, gradient: Tensor) -> tuple[Tensor, Carry]:
        steps.append(name)
        found, after = direction(self, carry, name, gradient)
        training, known = self.training, torchs.setdefault(self, {})
        for each in (name,) if known else {name, *carry.memories}:
            model = nn.Parameter(carry[each].parameters.double().clone())
            sgd = torch.optim.SGD(
                [model], 1, training.momentum, weight_decay=training.weight_decay, nesterov=training.nesterov
            )
            if each in carry.memories and not known:
                sgd.state[model]["momentum_buffer"] = carry.memory(each).buffer("momentum", gradient).double().clone()
            known.setdefault(each, (model, sgd))
        model, sgd = known[name]
        with torch.no_grad():
            model.copy_(carry[name].parameters)
        model.grad = gradient.double().clone()
        if training.grad_clip:
            torch.nn.utils.clip_grad_norm_([model], training.grad_clip)
        sgd.step()
        expected = carry[name].parameters.double() - model.detach()
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-4, atol=1e-5,
            msg=f"a step of the model {name!r} is not that of SGD with the gradients and the momentum of this model",
        )  # fmt: skip
        return found, after

    return checked
