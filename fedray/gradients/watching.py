"""Finds out which tensors torch's operations read, or write into, also through views and detached tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode


def read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that the operation ``func(*args, **kwargs)`` gets."""
    for each in (*args, *kwargs.values()):
        yield from (part for part in (each if isinstance(each, (list, tuple)) else [each]) if isinstance(part, Tensor))


class Mode(TorchDispatchMode):
    """A context that is shown torch's operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch loads its compiler here, which takes a second and 150 MB
        return False


class Watching(Mode):
    """A context that collects the memory of those arguments of operations that ``chosen(func, args, kwargs)`` yields:
    :func:`read`, or :func:`fedray.gradients.recording.written`."""

    def __init__(self, chosen: Callable[..., Iterable[Tensor]]) -> None:
        super().__init__()
        self._chosen = chosen
        self._storages: set[int] = set()
        # memory that is freed may be given to other tensors
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in self._chosen(func, args, kwargs or {}):
            if (storage := _storage(tensor)) is not None:
                self._storages.add(storage)
                self._alive.append(tensor)
        return func(*args, **(kwargs or {}))

    def has_met(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` lies in memory that was collected."""
        return _storage(tensor) in self._storages


def _storage(tensor: Tensor) -> int | None:
    """Returns the address of a tensor's memory; None if it has none of its own, as sparse ones."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()
