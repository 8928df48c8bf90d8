"""Reads ahead: a thread makes the next element of an iterator while the caller uses the current one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Element = TypeVar("Element")


def prefetched(made: Iterator[Element]) -> Iterator[Element]:
    """Reads ahead in a thread: yields the elements of the iterator ``made`` in order, and lets a thread produce the
    next element while the caller uses the current one. It is used for mini-batches that take long to read."""
    over = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        coming = thread.submit(next, made, over)
        while (element := coming.result()) is not over:
            coming = thread.submit(next, made, over)
            yield element  # type: ignore[misc]
