"""Models and vectors as plain arrays, in which form they travel between processes and lie in files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedray.core.vectors import Model, Vector


@dataclass(frozen=True)
class Packed:
    """Models and vectors by name: ``arrays``, and the ``widths`` of those that are models."""

    arrays: dict[str, Any]
    widths: dict[str, int]

    @classmethod
    def of(cls, vectors: Mapping[str, Vector]) -> Packed:
        """As tensors, on their own devices."""
        rows = {name: value.row if isinstance(value, Model) else value for name, value in vectors.items()}
        return cls(rows, {name: value.width for name, value in vectors.items() if isinstance(value, Model)})

    def numpy(self) -> Packed:
        """As numpy arrays."""
        return Packed({name: value.cpu().numpy() for name, value in self.arrays.items()}, self.widths)

    def own(self, device: torch.device) -> dict[str, Vector]:
        """The models and vectors, in fresh memory of this process: what came may be shared, read-only and
        unaligned."""
        tensors = {name: _own(value, device) for name, value in self.arrays.items()}
        return {
            name: Model(tensor, self.widths[name]) if name in self.widths else tensor
            for name, tensor in tensors.items()
        }


def tensor_over(array: Any) -> Tensor:
    """A tensor over ``array``'s memory, which may be read-only and shared: it must only be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _own(value: Any, device: torch.device) -> Tensor:
    tensor = value if isinstance(value, Tensor) else tensor_over(value)
    return tensor.to(device) if tensor.device != device else tensor.clone()
