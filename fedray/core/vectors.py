"""Flat parameter vectors: all of a model's parameters as one contiguous float32 vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

ROW = 16
"""Rows are padded to 16 floats (64 bytes): kernels round differently on rows that are aligned differently."""


@dataclass(frozen=True)
class Slot:
    """Where one named tensor lies in a flat vector.

    ``order``: its dimensions from the outermost in memory to the innermost, so that a module's memory format (channels
    last, say) is kept: it decides which kernels run.
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
        """The tensor in ``vector [width]``."""
        return self.shaped(vector[self.start : self.start + self.size])

    def shaped(self, piece: Tensor) -> Tensor:
        """The tensor from its numbers ``piece [size]`` in memory order."""
        if self.plain:
            return piece.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return piece.view([self.shape[d] for d in self.order]).permute(inverse)

    def flat(self, tensor: Tensor) -> Tensor:
        """The numbers ``[size]`` of ``tensor`` in memory order."""
        return (tensor if self.plain else tensor.permute(self.order)).reshape(-1)

    @cached_property
    def plain(self) -> bool:
        return self.order == tuple(range(len(self.order)))


class Layout:
    """How a module's tensors lie in two flat vectors: trainable parameters, and buffers.

    ``parameters`` numbers (P) are trainable; a parameter vector has ``width`` >= P numbers, of which the last are
    padding and zero. ``buffers`` numbers are in buffers (a vector of ``buffer_width`` numbers); whole-number buffers
    are kept there as floats and rounded when they are loaded. Frozen parameters are in neither: they never change.
    """

    def __init__(self, module: nn.Module) -> None:
        self.slots, self.parameters = _lay_out((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self.buffer_slots, self.buffers = _lay_out(module.named_buffers())
        self.width = -(-self.parameters // ROW) * ROW
        self.buffer_width = -(-self.buffers // ROW) * ROW
        self.sizes = [slot.size for slot in self.slots] + [self.width - self.parameters]

    def split(self, model: Tensor) -> tuple[Tensor, Tensor | None]:
        """Parameters and buffers of a whole model ``[..., width + buffer_width]``; no buffers if it has none."""
        parameters, buffers = model[..., : self.width], model[..., self.width :]
        return parameters, buffers if buffers.shape[-1] else None

    def averaged(self, buffers: Tensor, kept: Tensor) -> Tensor:
        """``buffers [buffer_width]`` that come from averaging, but the whole-number ones of ``kept``."""
        result = buffers.clone()
        for slot in self.buffer_slots:
            if not slot.dtype.is_floating_point:
                slot.view(result).copy_(slot.view(kept))
        return result

    def pack(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The module's trainable parameters ``[width]`` and buffers ``[buffer_width]``, copied, float32 on the CPU."""
        tensors = tensors_of(module)
        return _pack(self.slots, tensors, self.width), _pack(self.buffer_slots, tensors, self.buffer_width)

    def named(self, vector: Tensor, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of ``vector [width]`` (and of ``buffers [buffer_width]``) by name: views, no copies."""
        named = {slot.name: slot.view(vector) for slot in self.slots}
        return named if buffers is None else named | self.others(buffers)

    def others(self, buffers: Tensor) -> dict[str, Tensor]:
        """The tensors of ``buffers [buffer_width]`` by name: views, but copies of whole-number ones."""
        named = {}
        for slot in self.buffer_slots:
            value = slot.view(buffers)
            named[slot.name] = value if slot.dtype.is_floating_point else value.round().to(slot.dtype)
        return named

    def gather(self, pieces: Sequence[Tensor | None], out: Tensor) -> None:
        """Write the gradients of the named parameters, None for one that has none, into ``out [width]``."""
        flat = [
            out.new_zeros(slot.size) if piece is None else slot.flat(piece)
            for slot, piece in zip(self.slots, pieces, strict=True)
        ]
        torch.cat(flat, out=out[: self.parameters])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """As :meth:`named`, by one differentiable split."""
        pieces = vector.split(self.sizes)
        return {slot.name: slot.shaped(piece) for slot, piece in zip(self.slots, pieces, strict=False)}


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters that are not trained, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name, each once."""
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


def _pack(slots: list[Slot], tensors: dict[str, Tensor], width: int) -> Tensor:
    vector = torch.zeros(width)
    for slot in slots:
        slot.view(vector).copy_(tensors[slot.name].detach())
    return vector
