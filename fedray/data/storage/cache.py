"""Remembers digests of files in the user's cache, so that the files are hashed only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedray.util.cache import cache_folder
from fedray.util.files import write_whole

REMEMBERED = 1000
"""The number of digests, or groups of digests, that the cache keeps."""


def file_stamp(path: Path) -> tuple[str, int, int, int, int]:
    """Returns a tuple that changes when a file changes, so that its content need not be hashed to notice that.

    The tuple has the path, the size, the times of the last changes of the content and of the inode (in nanoseconds),
    and the inode number. Call this before the file is read, so that a change during the reading is noticed, too.
    """
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def remembered(what: Any, make: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns the digests that ``make()`` computes, a dict by name, and keeps them in the user's cache for later calls.

    If ``make()`` was called for the same ``what`` before, even by another process, the digests come from the cache and
    nothing is computed. ``what`` is a list of numbers and texts that contains everything on which the digests depend.
    For a file this is its :func:`file_stamp`.
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
    # if the cache can't be written, everything is hashed again the next time; nothing else is lost
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, json.dumps({**kept, key: found}))
    return found
