"""The manifest of a remote folder: the list of its files with their digests. It is written last, so that all changes
since the last manifest become visible at once, as a new state of the folder.

A file with a new name is sent to its place, where nobody looks for it yet. A file that replaces another is sent to a
staging area, and moved to its place once the new manifest is there. So at any moment, even after a writer was killed,
all files that the manifest names exist: in their places, or in the staging area.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedray.errors import UserError
from fedray.remote.storage import Storage, in_parallel

FOLDER = ".mirror"
"""The folder, beside a run's or a sweep's files, for what belongs to the mirror."""

NAME = f"{FOLDER}/manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class File:
    """A file of a remote folder: its size in bytes, and its sha256 as hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The list of all files that a remote folder has in one state (version of its files). ``commit`` is the name of the
    state.

    ``files`` maps each file's path relative to the folder to its size and sha256. ``staged`` are the paths of those
    files that may not be at their paths yet, but in the staging area (a subfolder in which new contents of files wait
    until the manifest is written).
    """

    commit: str
    files: Mapping[str, File] = field(default_factory=dict)
    staged: frozenset[str] = frozenset()

    def write(self, storage: Storage) -> None:
        """Writes the manifest to ``storage``, so that others see this state of the remote folder from now on."""
        files = {name: [file.size, file.sha256] for name, file in self.files.items()}
        content = {"format": FORMAT, "commit": self.commit, "staged": sorted(self.staged), "files": files}
        storage.write(NAME, json.dumps(content).encode())

    def settle(self, storage: Storage) -> None:
        """Moves the files ``staged`` from the staging area of ``storage``, the subfolder to which they were sent at
        first, to their places. Must be called after :meth:`write`, which makes the new state visible."""
        in_parallel(lambda name: storage.move(staging(self.commit, name), name), sorted(self.staged))


def staging(commit: str, name: str) -> str:
    """Returns where the new content of the file ``name`` lies before it is moved to its place: the path, relative to
    the remote folder, of this file in the staging area (a subfolder) of the state ``commit``."""
    return f"{FOLDER}/{commit}/{name}"


def read_manifest(storage: Storage) -> Manifest | None:
    """Returns the manifest of the remote folder ``storage`` (the list of its files with their sha256), or None if there
    is none. Raises :class:`UserError` if it can't be read."""
    found = storage.read_object(NAME)
    if found is None:
        return None
    try:
        assert found["format"] == FORMAT
        files = {name: File(int(size), str(sha256)) for name, (size, sha256) in found["files"].items()}
        return Manifest(found["commit"], files, frozenset(found["staged"]))
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{storage.shown}/{NAME} is damaged, or another version of fedray wrote it") from None
