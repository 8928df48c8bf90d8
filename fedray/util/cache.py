"""Finds the folder of the user's cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Returns fedray's folder in the user's cache: ``fedray`` in $XDG_CACHE_HOME, or else in ~/.cache. It is for files
    that fedray can make or download again.

    For a user without a home folder it is in the system's folder for temporary files. The folder may not exist yet.
    """
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedray"
    return Path(tempfile.gettempdir()) / f"fedray-cache-{os.getuid()}"
