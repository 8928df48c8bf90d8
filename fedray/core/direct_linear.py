"""Linear layers that write the gradient of their weights where it is wanted.

autograd makes a tensor for the gradient of each parameter, and these are then copied into one flat row. Of a model with
large linear layers, such as VGG-16, this copy takes a relevant part of a local step, and as much memory as the model.
Here the product that is the gradient of a layer's weights is computed into the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from fedray.core.vectors import Layout, Slot

LEAST = 200_000
"""The fewest weights of a layer for which this is worth its while. To look at each operation of a forward pass takes
microseconds."""


class DirectLinear(TorchFunctionMode):
    """A context in which linear layers with large weights among ``parameters``, those of ``layout``, write the gradient
    of their weights into the row ``out [width]`` of :meth:`begin`.

    autograd then returns None for these weights, or what other operations add to their gradient.
    """

    def __init__(self, layout: Layout, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._slots = {
            id(parameter): (number, slot)
            for number, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True))
            if parameter.dim() == 2 and parameter.numel() >= LEAST and slot.plain
        }
        self.written: set[int] = set()
        self._out: Tensor | None = None

    @property
    def pays(self) -> bool:
        """Whether there is any such layer."""
        return bool(self._slots)

    def begin(self, out: Tensor) -> None:
        """Begins with another gradient."""
        self._out, self.written = out, set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = self._slots.get(id(weight))
        if found is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        result: Tensor = _Linear.apply(input, weight, bias, self, *found)
        return result

    def write(self, number: int, slot: Slot, left: Tensor, right: Tensor) -> None:
        """Writes the product of two matrices as the gradient of the parameter ``number``, or adds it to what is there
        already."""
        assert self._out is not None
        place = slot.view(self._out)
        if number in self.written:
            place.addmm_(left, right)
        else:
            torch.mm(left, right, out=place)
            self.written.add(number)


class _Linear(Function):
    """A linear layer whose backward pass gives the gradient of its weights to a :class:`DirectLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, direct: DirectLinear, number: int, slot: Slot
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.direct, ctx.place, ctx.has_bias = direct, (number, slot), bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.direct.write(*ctx.place, rows.t(), x.reshape(-1, x.shape[-1]))
        of_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        return of_x, None, rows.sum(0) if ctx.has_bias else None, None, None, None
