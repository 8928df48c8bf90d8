"""What the machine has."""

from __future__ import annotations

import os

MUCH = 0.25
"""The part of the machine's memory beyond which samples are read one by one under ``data.access: auto``."""


def memory_of_machine() -> int:
    """Returns the bytes of memory of this machine, whether they are free or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_much(size: float) -> bool:
    """Returns whether samples of ``size`` bytes are left where they are, and read one by one, unless the user wants
    them elsewhere."""
    return size > MUCH * memory_of_machine()
