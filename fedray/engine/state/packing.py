"""Converts models and vectors to plain arrays and back, to send them between processes and to write them to files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedray.core.structure import leaves, map_leaves
from fedray.core.vectors import Model, Vector, row_of


@dataclass(frozen=True)
class Packed:
    """Models and vectors as plain arrays, to be sent to other processes or written to files.

    ``arrays`` maps the name of each model or vector to a NumPy array or a tensor. A batch of inputs that has several
    parts is a tuple or dict of arrays instead. A model is a single row of numbers, first its parameters and then its
    buffers. ``widths`` maps the name of each model to the length of the part with the parameters.
    """

    arrays: dict[str, Any]
    widths: dict[str, int]

    @classmethod
    def pack(cls, vectors: Mapping[str, Vector]) -> Packed:
        """Packs models and vectors, given by name, as tensors on the devices where they are, without copying them."""
        rows = {name: row_of(value) for name, value in vectors.items()}
        return cls(rows, {name: value.width for name, value in vectors.items() if isinstance(value, Model)})

    @property
    def bytes(self) -> int:
        """The size of all arrays together, in bytes."""
        return sum(value.nbytes for value in leaves(self.arrays))

    def numpy(self) -> Packed:
        """Returns the same models and vectors packed as NumPy arrays, which can be sent to another process."""
        return Packed(map_leaves(lambda value: on_host(value).numpy(), self.arrays), self.widths)

    def unpack(self, device: torch.device) -> dict[str, Vector]:
        """Returns the models and vectors by name, as they were before :meth:`pack`, in fresh memory on ``device``. This
        memory is never that of the packed arrays, which may be shared with other processes, read-only or unaligned."""
        tensors = map_leaves(lambda value: _own(value, device), self.arrays)
        return {
            name: Model(tensor, self.widths[name]) if name in self.widths else tensor
            for name, tensor in tensors.items()
        }


@dataclass(frozen=True)
class Enclosed:
    """A handle (a reference by which tasks name a broadcast) that contains the broadcast itself, ``packed``: models and
    tensors for the clients. It is used for small broadcasts, which so travel within each task instead of through Ray's
    object store. ``number`` identifies the broadcast among those of its run."""

    number: int
    packed: Packed = field(compare=False)


def tensor_over(array: Any) -> Tensor:
    """Returns a tensor that shares the memory of the NumPy array ``array``. The tensor must only be read, because the
    memory may be shared with other processes or read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def on_host(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` in the memory of the CPU: a copy if it is on a GPU, and otherwise ``tensor`` itself.

    A GPU copies into pinned memory, because that is several times faster. torch reuses this memory after the
    copy is freed.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _own(value: Any, device: torch.device) -> Tensor:
    tensor = value if isinstance(value, Tensor) else tensor_over(value)
    return tensor.to(device) if tensor.device != device else tensor.clone()
