"""Downloads runs and sweeps from a URI, such as ``s3://bucket/runs``, so that they can be read or continued on this
machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from fedray.errors import UserError
from fedray.remote.local import COMMIT, FIRST, commits_of, note_commits, scan
from fedray.remote.manifest import NAME, File, Manifest, read_manifest, staging
from fedray.remote.storage import Storage, in_parallel, reason_of
from fedray.util.arguments import place_of
from fedray.util.cache import cache_folder
from fedray.util.files import sha256_of_file
from fedray.util.uris import above, below, cache_name, is_uri, shown

CHANGES = 10
"""How often a folder may change while it is read. After each change what is missing is read of the newer state."""

PARTLY = "partly"
"""Stands in a folder for the name of a state of which some files are missing."""


def fetch(storage: Storage, folder: Path, wanted: Callable[[str], bool] = lambda name: True, note: str = "") -> None:
    """Downloads a run or sweep from ``storage``, so that ``folder`` has the same files. Files that are there already
    are not downloaded again. All other files that :func:`scan` finds in ``folder`` are removed.

    ``folder`` records which state (version of the remote files) it has. If that is the present state of ``storage``,
    nothing is done.

    Args:
        storage: the remote folder of the run or sweep.
        folder: the folder on this machine.
        wanted: ``wanted(name)`` says whether a file should be downloaded, by its relative name.
        note: the name that ``folder`` records for the state that it has now; "" for the name that the remote folder
            gives to this state.

    Raises:
        UserError: fedray has written nothing to the remote folder, or files differ from what its manifest (the list of
            its files with their sha256) says.
    """
    for _ in range(CHANGES):
        manifest = read_manifest(storage)
        if manifest is None:
            raise UserError(f"there is nothing at {storage.shown} that fedray has written")
        if manifest.commit in commits_of(folder):
            return
        # noted before there are files, so that the mirror of a folder above leaves them out
        folder.mkdir(parents=True, exist_ok=True)
        note_commits(folder, PARTLY)
        files = {name: file for name, file in manifest.files.items() if wanted(name)}
        damaged = _take(storage, manifest, files, folder)
        if not damaged:
            note_commits(folder, note or manifest.commit)
            return
        # a writer may have replaced what this manifest names
        time.sleep(0.5)
    raise UserError(f"{storage.shown}: {damaged[0]} is damaged or gone: it is not what {NAME} says")


def _take(storage: Storage, manifest: Manifest, files: dict[str, File], folder: Path) -> list[str]:
    """Downloads ``files``, those of the state ``manifest``, into ``folder``, and removes all others there. Returns the
    names of the files that ``storage`` does not have in this state."""
    there = scan(folder)
    for name in there.keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
    damaged: list[str] = []

    def take(name: str) -> None:
        file, path = files[name], folder / name
        if name in there and there[name].size == file.size and sha256_of_file(path) == file.sha256:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        places = [name, staging(manifest.commit, name)] if name in manifest.staged else [name]
        if not any(storage.download(place, path, file.sha256) for place in places):
            damaged.append(name)

    in_parallel(take, files)
    return damaged


def fetch_new(uri: str, folder: Path) -> None:
    """Downloads the runs below ``uri`` that ``folder`` does not have yet, such as trials of a sweep, without their
    checkpoints. A run gets the same relative path in ``folder``. Raises :class:`UserError` if the storage can't be
    read."""
    with _reading(uri):
        storage = Storage(uri)
        for name in _mirrored(storage):
            if not (folder / name).exists():
                fetch(storage.below(*name.parts), folder / name, _is_for_reading, PARTLY)


DEEP = r"/((personal|local/round-\d+)/)?[^/]+$"
"""The place of a file in the folder of a run: clients' models are in folders within it."""


def fetched_place(uri: str) -> Path:
    """Returns the folder in the user's cache into which :func:`fetched` downloads the results at ``uri``."""
    return cache_folder() / "fetched" / cache_name(uri)


def fetched(uri: str) -> Path:
    """Downloads all runs and sweeps at ``uri`` and below it, without their checkpoints, so that commands can read them.
    Returns the folder on this machine that holds them, in place of ``uri``.

    Raises :class:`UserError` if there are none, or the storage can't be read.
    """
    folder = fetched_place(uri)
    with _reading(uri):
        storage = Storage(uri)
        found = {folder / name: storage.below(*name.parts) for name in _mirrored(storage)}
        for old in [path.parent for path in folder.rglob(COMMIT)]:
            # a sweep's trials go with it
            if old not in found and old.exists():
                shutil.rmtree(old)
        for each, there in found.items():
            fetch(there, each, _is_for_reading)
    if not found:
        raise UserError(f"there is no run or sweep at {shown(uri)}")
    return folder


def as_path(named: str | os.PathLike[str]) -> Path:
    """Returns the path on this machine of results that a user names by a path or by a URI. The results are a folder, or
    a file in a folder.

    A path is returned as it is. For a URI the results are downloaded first (:func:`fetched`). If it is the URI of a
    file, which ends in .safetensors or .yaml, the whole run or sweep that contains the file is downloaded; clients'
    models are in folders of the run. Raises :class:`UserError` if ``named`` is neither, or nothing can be
    downloaded.
    """
    place = place_of(named)
    if not is_uri(place):
        return Path(place)
    if not shown(place).endswith((".safetensors", ".yaml")):
        return fetched(place)
    inside = re.search(DEEP, shown(place))
    rest = [unquote(name) for name in inside[0].strip("/").split("/")] if inside else []
    for _ in rest:
        place = above(place)
    return fetched(place).joinpath(*rest)


def publish(uri: str, folder: Path, paths: Iterable[Path]) -> list[str]:
    """Sends files that a command has made from downloaded results, such as a report, to where the results are. Returns
    the files' URIs.

    ``uri`` is where the results are, ``folder`` is where they were downloaded to, and ``paths`` are files in
    ``folder``. They get the same relative paths below ``uri``. Raises :class:`UserError` if the storage can't be
    written to.
    """
    storage = Storage(uri)
    names = [path.relative_to(folder).as_posix() for path in paths]
    try:
        for name in names:
            storage.write(name, (folder / name).read_bytes())
    except OSError as error:
        raise UserError(f"can't write to {shown(uri)}: {reason_of(error)}; what was made is in {folder}") from None
    return [shown(below(uri, *name.split("/"))) for name in names]


@contextlib.contextmanager
def _reading(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"can't read {shown(uri)}: {reason_of(error)}") from None


def _is_for_reading(name: str) -> bool:
    return FIRST not in name.split("/")


def _mirrored(storage: Storage) -> list[Path]:
    """Returns the relative paths of all folders below ``storage`` that hold a run or sweep, the upper ones first."""
    return [Path(name).parents[1] for name in sorted(storage.names()) if f"/{name}".endswith(f"/{NAME}")]
