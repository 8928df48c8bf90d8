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
    """Returns a stamp of a file, which shows whether the file has changed without hashing its content.

    The stamp is a tuple of the path, the size, the times of the last changes of the content and of the inode (in
    nanoseconds), and the inode number. Call this before the file is read, so that a change during the reading is
    noticed, too.
    """
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def remembered(what: Any, make: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns the digests that ``make()`` computes, by name, and remembers these in the user's cache.

    If ``make()`` was called for the same ``what`` before, even by another process, the remembered digests are
    returned and nothing is computed. ``what`` names everything that the digests depend on, as numbers and texts. For
    files use :func:`file_stamp`.
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
