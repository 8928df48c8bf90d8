"""The manifest: the list of a remote folder's files, which is written last and so makes a new state visible at once.

A file that the list did not have before is sent to its place, where nobody looks for it yet. One that replaces another
is sent to a staging area, and moved to its place once the manifest names it. So at any moment, also after a writer was
killed, the manifest names files that are all there: in their places, or in the staging area.
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
    """A file of a remote folder: its size in bytes and its sha256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A state of a remote folder, named by the text ``commit``: its ``files`` by name. Those whose names are in
    ``staged`` may still be in the staging area."""

    commit: str
    files: Mapping[str, File] = field(default_factory=dict)
    staged: frozenset[str] = frozenset()

    def write(self, storage: Storage) -> None:
        """Makes this state the visible one."""
        files = {name: [file.size, file.sha256] for name, file in self.files.items()}
        content = {"format": FORMAT, "commit": self.commit, "staged": sorted(self.staged), "files": files}
        storage.write(NAME, json.dumps(content).encode())

    def settle(self, storage: Storage) -> None:
        """Moves what is in the staging area to its place, after this state has become visible."""
        in_parallel(lambda name: storage.move(staging(self.commit, name), name), sorted(self.staged))


def staging(commit: str, name: str) -> str:
    """Returns the name of the file ``name`` in the staging area of the state ``commit``."""
    return f"{FOLDER}/{commit}/{name}"


def read_manifest(storage: Storage) -> Manifest | None:
    """Returns the visible state of the folder ``storage``, or None if there is none. Raises :class:`UserError` if its
    manifest can't be read."""
    found = storage.read_object(NAME)
    if found is None:
        return None
    try:
        assert found["format"] == FORMAT
        files = {name: File(int(size), str(sha256)) for name, (size, sha256) in found["files"].items()}
        return Manifest(found["commit"], files, frozenset(found["staged"]))
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{storage.shown}/{NAME} is damaged, or another version of fedray wrote it") from None
