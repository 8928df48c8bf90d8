"""Watches torch's operations: which tensors they read or write into, also through views and detached tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode


def read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of the torch operation ``func(*args, **kwargs)``, also those in lists and
    tuples."""
    for each in (*args, *kwargs.values()):
        yield from (part for part in (each if isinstance(each, (list, tuple)) else [each]) if isinstance(part, Tensor))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of the torch operation ``func(*args, **kwargs)`` into which the operation
    writes, according to its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from read(func, [args[place] if place < len(args) else kwargs.get(argument.name)], {})


def address_of(tensor: Tensor) -> int | None:
    """Returns the address of the memory in which ``tensor`` lies. It is the same for a tensor and all its views, so it
    shows whether two tensors share memory. Returns None for tensors without such memory, such as sparse and empty ones.
    """
    if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base class of contexts that see, below autograd, each torch operation that is run in them. Subclasses
    override :meth:`run`."""

    def __init_subclass__(cls) -> None:
        """Takes the place of torch's method, which has no type annotations, and does nothing to classes that do not
        skip its compiler (:meth:`_should_skip_dynamo`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch loads its compiler here, which takes two seconds and 150 MB
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the torch operation ``func(*args, **kwargs)`` and returns its result. It is called for each operation
        within the context."""
        return func(*args, **kwargs)


class Watching(Mode):
    """A context that finds out which tensors are read, or written into, by the torch operations in it, also through
    views. Afterwards :meth:`has_met` answers this for a given tensor.

    Args:
        chosen: The function :func:`read` or :func:`written`, which yields these tensors for one operation.
    """

    def __init__(self, chosen: Callable[..., Iterable[Tensor]]) -> None:
        super().__init__()
        self._chosen = chosen
        self._addresses: set[int | None] = set()
        # memory that is freed may be given to other tensors
        self._alive: list[Tensor] = []

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for tensor in self._chosen(func, args, kwargs):
            self._addresses.add(address_of(tensor))
            self._alive.append(tensor)
        return super().run(func, args, kwargs)

    def has_met(self, tensor: Tensor) -> bool:
        """Returns whether a torch operation within the context has read ``tensor``, or another tensor in the same
        memory, such as a view. If ``chosen`` is :func:`written`, returns whether an operation has written into this
        memory."""
        return (address := address_of(tensor)) is not None and address in self._addresses
