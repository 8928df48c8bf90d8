"""A model as one row of float32 numbers: its parameters, followed by its buffers."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn

from fedray.core import numbers
from fedray.core.norms import unit_vectors
from fedray.core.places import Places, tensors_of

ROW = 16
"""Rows are padded to a multiple of 16 floats (64 bytes), because the alignment of memory can change how kernels
round."""


@dataclass(frozen=True)
class Slot:
    """The place of one named tensor in the row of a :class:`Model`: ``size`` numbers from ``start`` on. For a buffer,
    these are entries of its :class:`Block`, counted from the beginning of the block. ``order`` lists the tensor's
    dimensions from the outermost in memory to the innermost. So tensors that are read from a row have the memory format
    of the module's, such as channels last; torch chooses kernels by it."""

    name: str
    shape: torch.Size
    start: int
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, vector: Tensor) -> Tensor:
        """Returns the tensor of this slot, in its own shape, as a view of ``vector``, which holds all tensors one after
        another: a model's row or gradient, or the entries of a :class:`Block`."""
        return self.shaped(vector[self.start : self.start + self.size])

    def shaped(self, piece: Tensor) -> Tensor:
        """Returns the slot's tensor in its own shape, given its numbers ``piece [size]`` in the order in which they lie
        in memory."""
        if self.plain:
            return piece.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return piece.view([self.shape[d] for d in self.order]).permute(inverse)

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns the numbers of ``tensor``, which has the slot's shape, as a vector ``[size]``, in their order in
        memory."""
        return (tensor if self.plain else tensor.permute(self.order)).reshape(-1)

    @cached_property
    def plain(self) -> bool:
        return self.order == tuple(range(len(self.order)))


class Model:
    """A model as one row of numbers, so that the formulas of algorithms can be written with + and -; or C models, one
    for each of C clients, as C rows.

    A plain tensor ``[..., width]`` is a direction between models. ``x - y`` of two models is the direction between
    their parameters; ``x + 0.5 * (y - x)`` is a model with the buffers of x. Shapes broadcast.

    Args:
        row: float32 ``[width + buffer_width]``, or ``[C, width + buffer_width]`` for C models: the trainable
            parameters, and then the buffers, such as running statistics, if there are any.
        width: the number of parameters, including padding.

    Example:
        direction = y - x
        halfway = x + 0.5 * direction
    """

    __slots__ = ("row", "width")

    def __init__(self, row: Tensor, width: int) -> None:
        self.row, self.width = row, width

    @property
    def parameters(self) -> Tensor:
        """The trainable parameters ``[..., width]``, as a view of the model's row."""
        return self.row[..., : self.width] if self.has_buffers else self.row

    @property
    def buffers(self) -> Tensor:
        """The buffers ``[..., buffer_width]``, such as running statistics, as a view of the model's row."""
        return self.row[..., self.width :]

    @property
    def has_buffers(self) -> bool:
        """Whether the model has any buffers."""
        return self.row.shape[-1] > self.width

    def with_parameters(self, parameters: Tensor) -> Model:
        """Returns a model, or several models, with ``parameters [..., width]`` and this model's buffers."""
        if not self.has_buffers:
            return Model(parameters, self.width)
        buffers = self.buffers.expand(*parameters.shape[:-1], -1)
        return Model(torch.cat([parameters, buffers], dim=-1), self.width)

    def with_buffers_of(self, other: Model) -> Model:
        """Returns a model with this model's parameters and the buffers of ``other``, for example the clients'
        average."""
        return other.with_parameters(self.parameters)

    def moved(self, direction: Tensor, by: float = 1.0) -> Model:
        """Moves the parameters: returns a model with the parameters w + by * direction, where w are this model's, and
        with this model's buffers. ``direction`` is ``[..., width]``."""
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
        """Moves the parameters towards those of ``target``: returns a model with the parameters x + weight (target -
        x), where x are this model's, and the buffers of ``target``. Algorithms use it at the server, where ``target``
        is the clients' average."""
        return target.with_parameters(self.parameters.lerp(target.parameters, weight))

    def zeros(self) -> Tensor:
        """Returns a vector of zeros in the shape of the model's parameters, ``[..., width]``, such as the start of a
        momentum."""
        return torch.zeros_like(self.parameters)

    def clone(self) -> Model:
        """Returns a copy of the model, or of the C models, in new memory."""
        return Model(self.row.clone(), self.width)

    def rows(self, count: int) -> Model:
        """Returns ``count`` copies of a single model as one :class:`Model` with ``count`` rows, for clients that all
        start from it. The copies share the memory of their parameters, but not of their buffers, because training
        updates buffers in place."""
        row = self.row.expand(count, -1)
        return Model(row.clone() if self.has_buffers else row, self.width)

    def __getitem__(self, place: int | slice) -> Model:
        return Model(self.row[place], self.width)

    @staticmethod
    def where(chosen: Tensor, one: Model, other: Model) -> Model:
        """Chooses between two models for each of C clients: returns C models, of which row i is that of ``one`` if
        ``chosen [C, 1]`` is true for client i, and otherwise that of ``other``."""
        return Model(torch.where(chosen, one.row, other.row), one.width)


Vector: TypeAlias = Model | Tensor
"""The type of values that may be a model, or a direction as a plain tensor ``[..., width]``."""


def row_of(vector: Vector) -> Tensor:
    """Returns the row of a model, or another tensor as it is."""
    return vector.row if isinstance(vector, Model) else vector


@dataclass(frozen=True)
class Block:
    """The place of the buffers of one type, such as int64, in the row of a :class:`Model`, where they lie next to each
    other.

    Args:
        dtype: the type of the buffers.
        slots: for each buffer a :class:`Slot`, which says where its entries are among those of the block.
        start: where the block begins, counted from the first number of the row that belongs to a buffer.
        count: how many entries (numbers of type ``dtype``) the block has. Each takes ``parts`` numbers of the row.
        units: the names of buffers that are vectors of length 1. A mean of such vectors is shorter, so they are scaled
            to length 1 when they are read.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    start: int
    count: int
    units: frozenset[str] = frozenset()

    @property
    def parts(self) -> int:
        """The number of float32 numbers that each entry of the block's buffers takes in a model's row."""
        return numbers.parts_of(self.dtype)

    @property
    def place(self) -> slice:
        """The slice of the block's numbers in a vector ``[buffer_width]`` that holds a model's buffers."""
        return slice(self.start, self.start + self.parts * self.count)

    def read(self, buffers: Tensor) -> dict[str, Tensor]:
        """Returns the block's buffers as a dict of tensors by name, in their own types and shapes. They are read from
        ``buffers [buffer_width]``, the end of a model's row. Buffers of float32 are views, unless they are among
        ``units``."""
        entries = buffers[self.place]
        if self.dtype is not torch.float32:
            entries = numbers.join(entries.view(self.parts, self.count), self.dtype)
        found = {slot.name: slot.view(entries) for slot in self.slots}
        found.update((name, _scaled_to_length_1(found[name])) for name in self.units)
        return found

    def numbers_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Converts the block's buffers, whose values are in ``tensors`` (by name), to the float32 numbers ``[parts *
        count]`` that stand for them in a model's row. Other tensors in ``tensors`` are ignored."""
        entries = torch.cat([slot.flat(tensors[slot.name]) for slot in self.slots])
        return entries if self.dtype is torch.float32 else numbers.split(entries.to(self.dtype)).view(-1)

    def write(self, buffers: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Writes the block's buffers, whose values are in ``tensors`` (by name), into their places in ``buffers
        [buffer_width]``, the end of a model's row. Other tensors in ``tensors`` are ignored."""
        if self.dtype is torch.float32:
            entries = buffers[self.place]
            for slot in self.slots:
                slot.view(entries).copy_(tensors[slot.name])
        else:
            buffers[self.place] = self.numbers_of(tensors)

    def rounded(self, total: Tensor) -> Tensor:
        """Converts the block's part of a float64 sum over clients' rows, ``total [parts * count]``, to float32 numbers
        of a row, ``[parts * count]``. The float32 parts of a float64 buffer are added up and split again, which keeps
        its precision."""
        if not self.dtype.is_floating_point or self.parts == 1:
            return total.float()
        # a GPU may add three numbers in another order
        return numbers.split(total.view(self.parts, self.count).cpu().sum(0)).reshape(-1)


def _scaled_to_length_1(vector: Tensor) -> Tensor:
    """Returns ``vector [n]`` scaled to length 1. If its length is 1 up to rounding, it is returned unchanged."""
    length = vector.norm()
    return vector / torch.where((length - 1).abs() < 1e-5, 1, length.clamp(min=1e-12))


class Layout:
    """The places of a module's tensors in the row of a :class:`Model`: the trainable parameters come first, then the
    buffers.

    The trainable parameters take ``parameters`` numbers of the row, and ``width`` together with padding by zeros. The
    buffers take ``buffers`` numbers, and ``buffer_width`` with padding. Buffers of other types than float32 are stored
    as float32 numbers without losing a bit (:mod:`fedray.core.numbers`).

    Tensors that never change are not in the row. These are frozen parameters, and the buffers that are not named in
    ``changing`` (the dict ``constants``). A frozen parameter that forward passes change, such as a moving average, must
    be named in ``changing``, and is treated as a buffer. If ``changing`` is None, all buffers are in the row.
    """

    def __init__(self, module: nn.Module, changing: Collection[str] | None = None) -> None:
        places = Places(module)
        trainable = ((name, p) for name, p in places.parameters.items() if p.requires_grad)
        self.slots, self.parameters = _lay_out(trainable)
        moving = {n: p for n, p in places.parameters.items() if not p.requires_grad and n in (changing or ())}
        in_row = {name: b for name, b in places.buffers.items() if changing is None or name in changing} | moving
        self._buffer_names = [*places.buffers, *moving]
        self.constants = {name: b for name, b in places.buffers.items() if name not in in_row}
        self.blocks, self.buffers = _blocks(in_row, unit_vectors(module))
        self.width = -(-self.parameters // ROW) * ROW
        self.buffer_width = -(-self.buffers // ROW) * ROW
        self.sizes = [slot.size for slot in self.slots] + [self.width - self.parameters]

    @property
    def row_width(self) -> int:
        """The number of float32 numbers in a model's row: ``width`` for parameters and ``buffer_width`` for buffers."""
        return self.width + self.buffer_width

    def model(self, row: Tensor) -> Model:
        """Returns a :class:`Model` with the numbers of ``row``: the ``[row_width]`` numbers of one model, or ``[C,
        row_width]`` of C models."""
        return Model(row, self.width)

    @cached_property
    def whole_numbers(self) -> list[slice]:
        """The slices of a model's row that hold buffers of whole numbers, such as ``num_batches_tracked``. These
        buffers count something, so they are not averaged over clients."""
        whole = [block.place for block in self.blocks if not (block.dtype.is_floating_point or block.dtype.is_complex)]
        return [slice(self.width + place.start, self.width + place.stop) for place in whole]

    def pack(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> Model:
        """Returns the parameters of ``module``, and the buffers that may change, as a single :class:`Model`. Its row
        ``[row_width]`` is a copy, of type ``dtype`` and on the CPU."""
        row, tensors = torch.zeros(self.row_width, dtype=dtype), tensors_of(module)
        for slot in self.slots:
            slot.view(row).copy_(tensors[slot.name].detach())
        self.write_buffers(row[self.width :], {name: tensor.detach() for name, tensor in tensors.items()})
        return Model(row, self.width)

    def named(self, model: Model) -> dict[str, Tensor]:
        """Returns the tensors of a single ``model`` as a dict by name, in their own shapes: trainable parameters and
        all buffers, including those that never change. Tensors of float32 are views of the model's row."""
        buffers = {**self.constants, **self.split_buffers(model.buffers)}
        return {slot.name: slot.view(model.row) for slot in self.slots} | {n: buffers[n] for n in self._buffer_names}

    def split_buffers(self, buffers: Tensor) -> dict[str, Tensor]:
        """Reads a model's buffers from ``buffers [buffer_width]``, the end of its row, and returns them as a dict of
        tensors by name, in their own types and shapes. Buffers that never change are left out. Buffers of float32 are
        views."""
        return {name: tensor for block in self.blocks for name, tensor in block.read(buffers).items()}

    def write_buffers(self, buffers: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Writes the values of the buffers that may change, taken from ``tensors`` (by name), into ``buffers
        [buffer_width]``, the end of a model's row. Other tensors in ``tensors`` are ignored."""
        for block in self.blocks:
            block.write(buffers, tensors)

    def join_buffers(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Makes the vector ``[buffer_width]`` at the end of a model's row from ``tensors``, the buffers by name. Its
        padding is copied from ``like``, another such vector. Other tensors in ``tensors`` are ignored. In contrast to
        :meth:`write_buffers`, this changes nothing in place, so it can be used in functions that are compiled."""
        if not self.blocks:
            return like
        return torch.cat([*(block.numbers_of(tensors) for block in self.blocks), like[self.buffers :]])

    def rounded(self, total: Tensor) -> Model:
        """Converts ``total [row_width]``, a float64 sum over the rows of clients' models, to float32, and returns it as
        a model."""
        row = total.float()
        for block in self.blocks:
            place = slice(self.width + block.place.start, self.width + block.place.stop)
            row[place] = block.rounded(total[place])
        return Model(row, self.width)

    def gather(self, pieces: Sequence[Tensor | None], out: Tensor, written: Container[int] = ()) -> None:
        """Writes the gradients of all parameters into one vector ``[width]``, ``out``.

        Args:
            pieces: the gradient of each parameter, in the order of the module's parameters; None for zeros.
            out: the vector ``[width]``.
            written: the indices in ``pieces`` of parameters whose places in ``out`` already hold a gradient, to which
                the piece is added.
        """
        flat: list[Tensor] = []
        start = stop = 0
        for number, (slot, piece) in enumerate(zip(self.slots, pieces, strict=True)):
            if piece is not None and piece.layout is not torch.strided:
                # the gradient of nn.Embedding(sparse=True)
                piece = piece.to_dense()
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
        """Returns the trainable parameters in ``vector [width]`` as a dict of tensors by name, in their own shapes. The
        tensors are views through which autograd can differentiate."""
        pieces = vector.split_with_sizes(self.sizes)
        return {slot.name: slot.shaped(piece) for slot, piece in zip(self.slots, pieces, strict=False)}


def _lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Slot], int]:
    slots, start = [], 0
    for name, tensor in tensors:
        dimensions = tuple(range(tensor.dim()))
        dense = tensor.is_contiguous() or tensor.permute(_memory_order(tensor)).is_contiguous()
        order = _memory_order(tensor) if dense else dimensions
        slots.append(Slot(name, tensor.shape, start, order))
        start += tensor.numel()
    return slots, start


def _blocks(buffers: Mapping[str, Tensor], units: Collection[str]) -> tuple[list[Block], int]:
    """Returns the blocks of ``buffers`` (by name), grouped by type, float32 first; and how many numbers of a row they
    take."""
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {torch.float32: []}
    for name, tensor in buffers.items():
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
    blocks: list[Block] = []
    start = 0
    for dtype, of_type in by_dtype.items():
        slots, count = _lay_out(of_type)
        if slots:
            blocks.append(Block(dtype, tuple(slots), start, count, frozenset(units) & {name for name, _ in of_type}))
            start = blocks[-1].place.stop
    return blocks, start


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    strides, shape = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -shape[d], d)))
