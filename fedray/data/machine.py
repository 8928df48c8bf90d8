"""What the machine has."""

from __future__ import annotations

import os


def memory_of_machine() -> int:
    """Returns the bytes of memory of this machine, whether they are free or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
