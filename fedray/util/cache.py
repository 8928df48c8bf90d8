"""Finds the folder of the user's cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of the user's cache, for files that fedray can make again: ``fedray`` in $XDG_CACHE_HOME, or
    else in ~/.cache.

    For a user without a home folder the cache is in the system's folder for temporary files.
    """
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedray"
    return Path(tempfile.gettempdir()) / f"fedray-cache-{os.getuid()}"
