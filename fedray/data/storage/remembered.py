"""Digests of files, kept in a file of the cache, so that the files are hashed only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

from fedray.data.sources.find import cache_folder
from fedray.util.files import write_whole

REMEMBERED = 1000
"""The number of digests, or groups of digests, that the cache keeps."""


def remembered(what: Any, make: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns what ``make()`` returned for the same ``what`` before, or else what it returns now.

    ``what`` names all that the digests depend on, as numbers and texts; for files that is
    :func:`fedray.data.sources.find.file_stamp`.
    """
    memory = cache_folder() / "contents.json"
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    try:
        known: Any = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    if isinstance(known, dict) and isinstance(known.get(key), dict):
        return known[key]
    found = make()
    kept = dict(list(known.items())[-REMEMBERED:]) if isinstance(known, dict) else {}
    # without a cache all is hashed again the next time, and nothing else is lost
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, json.dumps({**kept, key: found}))
    return found
