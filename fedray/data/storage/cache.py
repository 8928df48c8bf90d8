"""The user's cache: files that fedray can get again, and digests of files, so that these are hashed only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedray.util.files import write_whole

REMEMBERED = 1000
"""The number of digests, or groups of digests, that the cache keeps."""


def cache_folder() -> Path:
    """Returns the folder for files that fedray can get again: ``fedray`` in $XDG_CACHE_HOME, or else in ~/.cache.

    A user without a home folder has one in the folder for temporary files.
    """
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedray"
    return Path(tempfile.gettempdir()) / f"fedray-cache-{os.getuid()}"


def file_stamp(path: Path) -> tuple[str, int, int, int, int]:
    """Returns what tells whether another file has taken the place of a file.

    That is its path, its size, the time of its content and the time of its entry (both in nanoseconds), and its inode.
    Call this before the file is read, so that a change while it is read is noticed too.
    """
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def remembered(what: Any, make: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns what ``make()`` returned for the same ``what`` before, or else what it returns now.

    ``what`` names all that the digests depend on, as numbers and texts; for files that is
    :func:`file_stamp`.
    """
    memory = cache_folder() / "contents.json"
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    try:
        known: Any = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    if isinstance(known.get(key), dict):
        return dict(known[key])
    found = make()
    kept = dict(list(known.items())[-REMEMBERED:])
    # without a cache all is hashed again the next time, and nothing else is lost
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, json.dumps({**kept, key: found}))
    return found
