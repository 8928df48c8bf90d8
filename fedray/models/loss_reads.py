"""Finds out what a loss or a metric reads besides outputs and targets. It must not read from a model, because fedray
trains copies of the model and takes gradients only through the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedray.core.copying import parts
from fedray.core.places import same_bits
from fedray.core.structure import call_on_copies, leaves
from fedray.core.task import Loss
from fedray.errors import UserError
from fedray.gradients.watching import Watching, read


class OfModel:
    """The tensors of a model that no loss or metric may read: its trained parameters, and the tensors that a forward
    pass in training mode changes, or makes and leaves in the module. fedray trains copies of the model. So a loss that
    reads tensors of the original model would not see the numbers that are trained.

    Args:
        modules: The run's model and, if there is one, the module that the user passed from Python.
        x: Inputs ``[b, ...]`` for a forward pass of the first module, which shows what such a pass changes or makes.
    """

    def __init__(self, modules: Sequence[nn.Module], x: Any) -> None:
        first, self.modules = modules[0], modules
        kept = {id(tensor): tensor for _, tensor in _kept(first)}
        buffers = {name: buffer.clone() for name, buffer in first.named_buffers()}
        first.train()
        call_on_copies(first, x)
        self.passing = {name for name, tensor in _kept(first) if id(tensor) not in kept}
        now = dict(first.named_buffers())
        self.passing |= {name for name, value in buffers.items() if name in now and not same_bits(now[name], value)}

    def require_unread(self, what: str, function: Loss, outputs: Any, targets: Tensor) -> bool:
        """Checks that the loss or metric ``function`` reads none of these tensors of the model, by calling it with
        ``outputs`` and ``targets``.

        Returns whether the function has trainable parameters of its own. That is so if its values require a gradient,
        because ``outputs`` do not.

        Raises :class:`UserError` if the function reads such a tensor. ``what`` is the function's name in the message.
        """
        watch = Watching(read)
        with torch.enable_grad(), watch:
            values = function(outputs, targets)
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and watch.has_met(parameter):
                    raise UserError(
                        f"{what} uses the model's parameter {name}, but fedray trains copies of the model, and takes "
                        "the gradient of its outputs alone: let the model return what is needed of it as one more "
                        "output, [b, ...] (train.weight_decay is for the square of all parameters)"
                    )
            for name, tensor in (*_kept(module), *module.named_buffers()):
                if name in self.passing and watch.has_met(tensor):
                    raise UserError(
                        f"{what} uses {name}, which a forward pass leaves in the model, but fedray trains copies of "
                        "the model: let the model return it as one more output, [b, ...]"
                    )
        return any(isinstance(value, Tensor) and value.requires_grad for value in leaves(values))


def _kept(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of those attributes of a module's layers that are neither parameters nor buffers:
    tensors that a forward pass may have left there."""
    for prefix, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                name = f"{prefix}.{key}" if prefix else key
                yield from ((name, each) for each in parts(value) if isinstance(each, Tensor))
