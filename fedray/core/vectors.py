"""A model as one row of float32 numbers: its parameters, followed by its buffers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn

ROW = 16
"""Rows are padded to a multiple of 16 floats (64 bytes), because kernels round differently on rows that are aligned
differently."""


@dataclass(frozen=True)
class Slot:
    """Says where one named tensor lies in a row.

    ``order`` lists the tensor's dimensions from the outermost in memory to the innermost. It keeps a module's memory
    format, such as channels last, which decides what kernels are run.
    """

    name: str
    shape: torch.Size
    start: int
    dtype: torch.dtype
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, vector: Tensor) -> Tensor:
        """Returns the tensor as a view into ``vector [width]``."""
        return self.shaped(vector[self.start : self.start + self.size])

    def shaped(self, piece: Tensor) -> Tensor:
        """Returns the tensor, given its numbers ``piece [size]`` in memory order."""
        if self.plain:
            return piece.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return piece.view([self.shape[d] for d in self.order]).permute(inverse)

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns the numbers ``[size]`` of ``tensor`` in memory order."""
        return (tensor if self.plain else tensor.permute(self.order)).reshape(-1)

    @cached_property
    def plain(self) -> bool:
        return self.order == tuple(range(len(self.order)))


class Model:
    """A model, or the C models of a stack. ``row [..., width + buffer_width]`` float32 holds the trainable parameters
    first, and then the buffers, such as running statistics, if there are any.

    Models are points, and plain tensors ``[..., width]`` are directions. The difference of two models is the direction
    between their parameters. A model plus a direction is a model with the same buffers. Shapes broadcast.
    """

    __slots__ = ("row", "width")

    def __init__(self, row: Tensor, width: int) -> None:
        self.row, self.width = row, width

    @property
    def parameters(self) -> Tensor:
        """The trainable parameters ``[..., width]``, as a view."""
        return self.row[..., : self.width] if self.has_buffers else self.row

    @property
    def buffers(self) -> Tensor:
        """The buffers ``[..., buffer_width]``, as a view."""
        return self.row[..., self.width :]

    @property
    def has_buffers(self) -> bool:
        """Whether the model has any buffers."""
        return self.row.shape[-1] > self.width

    def with_parameters(self, parameters: Tensor) -> Model:
        """Returns a model with ``parameters [..., width]`` and this model's buffers."""
        if not self.has_buffers:
            return Model(parameters, self.width)
        buffers = self.buffers.expand(*parameters.shape[:-1], -1)
        return Model(torch.cat([parameters, buffers], dim=-1), self.width)

    def with_buffers_of(self, other: Model) -> Model:
        """Returns a model with this model's parameters and the buffers of ``other``."""
        return other.with_parameters(self.parameters)

    def moved(self, direction: Tensor, by: float = 1.0) -> Model:
        """Returns the model plus ``by`` times ``direction [..., width]``."""
        return self.with_parameters(self.parameters.add(direction, alpha=by))

    def __add__(self, direction: Tensor) -> Model:
        return self.with_parameters(self.parameters + direction)

    @overload
    def __sub__(self, other: Model) -> Tensor: ...

    @overload
    def __sub__(self, other: Tensor) -> Model: ...

    def __sub__(self, other: Model | Tensor) -> Tensor | Model:
        if isinstance(other, Model):
            return self.parameters - other.parameters
        return self.with_parameters(self.parameters - other)

    def lerp(self, target: Model, weight: float) -> Model:
        """Returns the model whose parameters lie the fraction ``weight`` of the way to those of ``target``. Its buffers
        are those of ``target``, because they are averages of statistics already."""
        return target.with_parameters(self.parameters.lerp(target.parameters, weight))

    def zeros(self) -> Tensor:
        """Returns the direction of length zero."""
        return torch.zeros_like(self.parameters)

    def clone(self) -> Model:
        """Returns a copy in fresh memory."""
        return Model(self.row.clone(), self.width)

    def rows(self, count: int) -> Model:
        """Returns ``count`` copies of a single model as a stack. Each copy has its own memory for buffers, because
        training updates them in place."""
        row = self.row.expand(count, -1)
        return Model(row.clone() if self.has_buffers else row, self.width)

    def __getitem__(self, place: int | slice) -> Model:
        return Model(self.row[place], self.width)

    @staticmethod
    def where(chosen: Tensor, one: Model, other: Model) -> Model:
        """Returns for each client of a stack the model in ``one`` if ``chosen [C, 1]`` is true, and the one in
        ``other`` if not."""
        return Model(torch.where(chosen, one.row, other.row), one.width)


Vector: TypeAlias = Model | Tensor
"""A model, or a plain tensor."""


class Layout:
    """Says how a module's tensors lie in the row of a :class:`Model`: the trainable parameters first, then the buffers.

    ``parameters`` is the number of trainable parameters. They take ``width`` numbers of the row, the last of which may
    be padding, which is zero. ``buffers`` and ``buffer_width`` are the same for buffers. A buffer of whole numbers is
    kept as floats and rounded when it is loaded. Frozen parameters never change, so they are not in the row.
    """

    def __init__(self, module: nn.Module) -> None:
        self.slots, self.parameters = _lay_out((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self.buffer_slots, self.buffers = _lay_out(module.named_buffers())
        self.width = -(-self.parameters // ROW) * ROW
        self.buffer_width = -(-self.buffers // ROW) * ROW
        self.sizes = [slot.size for slot in self.slots] + [self.width - self.parameters]

    @property
    def row_width(self) -> int:
        """How many numbers the row of a model has."""
        return self.width + self.buffer_width

    def model(self, row: Tensor) -> Model:
        """Returns the model, or the models, in ``row [..., row_width]``."""
        return Model(row, self.width)

    @cached_property
    def whole_numbers(self) -> list[slice]:
        """Where buffers of whole numbers lie in a row. They are counts, which have no average."""
        places = [(self.width + s.start, s.size) for s in self.buffer_slots if not s.dtype.is_floating_point]
        return [slice(start, start + size) for start, size in places]

    def pack(self, module: nn.Module) -> Model:
        """Returns a copy of the parameters and buffers of ``module``, on the CPU."""
        row, tensors = torch.zeros(self.row_width), tensors_of(module)
        for slots, vector in ((self.slots, row), (self.buffer_slots, row[self.width :])):
            for slot in slots:
                slot.view(vector).copy_(tensors[slot.name].detach())
        return Model(row, self.width)

    def named(self, model: Model) -> dict[str, Tensor]:
        """Returns the tensors of a single model by name. They are views, except for those of whole numbers."""
        return {slot.name: slot.view(model.row) for slot in self.slots} | self.named_buffers(model)

    def named_buffers(self, model: Model) -> dict[str, Tensor]:
        """Does the same for the buffers alone."""
        return self.split_buffers(model.buffers)

    def split_buffers(self, buffers: Tensor) -> dict[str, Tensor]:
        """Returns the tensors in ``buffers [buffer_width]`` by name. They are views, except for those of whole
        numbers."""
        named = {}
        for slot in self.buffer_slots:
            value = slot.view(buffers)
            named[slot.name] = value if slot.dtype.is_floating_point else value.round().to(slot.dtype)
        return named

    def join_buffers(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Returns the buffers among ``tensors`` as one row ``[buffer_width]``, whose padding is that of ``like``."""
        if not self.buffer_slots:
            return like
        flat = [slot.flat(tensors[slot.name]).to(like.dtype) for slot in self.buffer_slots]
        return torch.cat([*flat, like[self.buffers :]])

    def gather(self, pieces: Sequence[Tensor | None], out: Tensor, written: Container[int] = ()) -> None:
        """Writes gradients of the parameters, in the module's order, into ``out [width]``. None stands for a parameter
        that has none. To parameters that are ``written`` already, by their numbers, they are added."""
        flat: list[Tensor] = []
        start = stop = 0
        for number, (slot, piece) in enumerate(zip(self.slots, pieces, strict=True)):
            if number not in written:
                flat.append(out.new_zeros(slot.size) if piece is None else slot.flat(piece))
                stop = slot.start + slot.size
                continue
            if piece is not None:
                slot.view(out).add_(piece)
            if flat:
                torch.cat(flat, out=out[start:stop])
            flat, start = [], slot.start + slot.size
        if flat:
            torch.cat(flat, out=out[start:stop])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns the parameters in ``vector [width]`` by name, by one differentiable split."""
        pieces = vector.split(self.sizes)
        return {slot.name: slot.shaped(piece) for slot, piece in zip(self.slots, pieces, strict=False)}


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of ``module`` that are not trained, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of ``module`` by name. Each tensor is there once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Slot], int]:
    slots, start = [], 0
    for name, tensor in tensors:
        dimensions = tuple(range(tensor.dim()))
        dense = tensor.is_contiguous() or tensor.permute(_memory_order(tensor)).is_contiguous()
        order = _memory_order(tensor) if dense else dimensions
        slots.append(Slot(name, tensor.shape, start, tensor.dtype, order))
        start += tensor.numel()
    return slots, start


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    strides, shape = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -shape[d], d)))
