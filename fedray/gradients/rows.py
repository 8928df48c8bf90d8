"""Checks that an algorithm's rule treats each client of a stack separately.

An operation such as a sum over a client's row may be computed in another order if there are more rows, and give other
bits. So if an algorithm's rule applies such an operation to all clients at once, clients that are side by side on a GPU
(:mod:`fedray.gradients.lanes`) are trained again one after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode_temporarily

from fedray.core.stopwatch import Stopwatch
from fedray.gradients.watching import Mode, read

MOVING = frozenset({
    "_local_scalar_dense", "_pin_memory", "_to_copy", "all", "any", "cat", "clone", "copy_", "empty_like",
    "fill_", "full_like", "index_select", "is_nonzero", "is_pinned", "lift_fresh", "new_empty", "new_full",
    "new_ones", "new_zeros", "ones_like", "pin_memory", "repeat", "stack", "zero_", "zeros_like",
})  # fmt: skip
"""The names of torch operations, besides views and those that work number by number, whose results do not depend on the
number of rows. Some of them serve decisions for the whole stack, which an algorithm may make."""


class RowByRow(Mode):
    """A context that watches whether an algorithm treats each of ``clients`` clients separately.

    It looks for torch operations on tensors with a row for each client that may combine the numbers of a row, such as
    ``sum``: the bits of their results may depend on the number of clients. After the context, ``found`` is the name of
    the first such operation, or None.

    The algorithm must use the context's attribute ``stopwatch``. Operations in ``with`` blocks of
    its method ``on(...)``, such as gradients, are not watched. Their time is passed on to the argument ``stopwatch``.
    """

    def __init__(self, clients: int, stopwatch: Stopwatch) -> None:
        super().__init__()
        self._clients, self.stopwatch = clients, _Aside(stopwatch)
        self.found: str | None = None

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.found is None and not _keeps_rows(func) and any(map(self._has_all, read(func, args, kwargs))):
            self.found = str(func.overloadpacket).rpartition(".")[2]
        return super().run(func, args, kwargs)

    def _has_all(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == self._clients


class _Aside(Stopwatch):
    """Hides the operations in its ``with`` blocks from a :class:`RowByRow`. ``stopwatch`` gets the times."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self._stopwatch = stopwatch

    def on(self, purpose: str) -> Any:
        return self._without_mode(purpose)

    @contextlib.contextmanager
    def _without_mode(self, purpose: str) -> Iterator[None]:
        is_on = torch._C._len_torch_dispatch_stack() > 0
        with self._stopwatch.on(purpose), _pop_mode_temporarily() if is_on else contextlib.nullcontext():
            yield


def _keeps_rows(func: Any) -> bool:
    if torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in MOVING:
        return True
    # a view: its result lies in the memory of an argument, into which it does not write
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def by_rows(function: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    """Applies ``function`` to each client separately, so that the bits of its results do not depend on the number of
    clients. Returns the results as one tensor ``[C, ...]``. It is for norms, inner products and other operations that
    combine the numbers of a row.

    Args:
        function: Takes one client's row ``[1, ...]`` of each of ``vectors``, and returns a tensor ``[1, ...]``.
        *vectors: Tensors ``[C, ...]`` with a row for each client.
    """
    return torch.cat([function(*rows) for rows in zip(*(torch.split(each, 1) for each in vectors), strict=True)])


def squared_norms(vectors: Tensor) -> Tensor:
    """Returns the squared length of each client's vector, float64 ``[C, 1]``, of ``vectors [C, width]``. Each is
    computed by itself (:func:`by_rows`)."""
    return by_rows(lambda row: row.double().square().sum(dim=1, keepdim=True), vectors)
