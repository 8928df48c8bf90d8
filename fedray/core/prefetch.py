"""Makes the next element of an iterator in a thread while the caller uses the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Element = TypeVar("Element")


def prefetched(made: Iterator[Element]) -> Iterator[Element]:
    """Yields the elements of the iterator ``made`` in order, and makes each of them ahead of time: while the caller
    uses one element, a thread produces the next. It is used for mini-batches that take long to read."""
    over = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        coming = thread.submit(next, made, over)
        while (element := coming.result()) is not over:
            coming = thread.submit(next, made, over)
            yield element  # type: ignore[misc]
