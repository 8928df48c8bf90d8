"""Makes the next element of an iterator in a thread, while the one before is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Element = TypeVar("Element")


def ahead(made: Iterator[Element]) -> Iterator[Element]:
    """Yields what ``made`` yields, in the same order. While an element is used, the next one is made in a thread."""
    over = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        coming = thread.submit(next, made, over)
        while (element := coming.result()) is not over:
            coming = thread.submit(next, made, over)
            yield element  # type: ignore[misc]
