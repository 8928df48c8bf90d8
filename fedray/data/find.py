"""Finds the files of a data set: in the user's folder, elsewhere on this machine, or by a download into a cache."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from fedray.errors import UserError, first_sentence
from fedray.files import move_whole

Files = TypeVar("Files")


def cache_folder() -> Path:
    """Returns the folder for files that fedray can get again: ``fedray`` in $XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedray"


def file_stamp(path: Path) -> tuple[str, int, int, int, int]:
    """Returns what tells whether another file has taken the place of a file.

    That is its path, its size, the time of its content and the time of its entry (both in nanoseconds), and its inode.
    Call this before the file is read, so that a change while it is read is noticed too.
    """
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def find_files(
    name: str,
    root: str | None,
    look: Callable[[Path], Files],
    download: Callable[[Path], None] | None,
    wanted: str,
    system: Iterable[str] = (),
) -> Files:
    """Returns what ``look`` returns for the first folder that has the files of the data set ``name``.

    If ``root`` is not None, only that folder is searched. Otherwise $FEDRAY_DATA, the folders ``system`` and the user's
    cache are, and then the files are downloaded into the cache by ``download``, which is None where the publisher does
    not offer them to programs. ``look`` is called with a folder, and raises :class:`UserError` if the folder lacks some
    of the files.

    Raises :class:`UserError` if the files are nowhere; the message says which files are ``wanted``.
    """
    if root is not None:
        place = Path(root).expanduser()
        if not place.is_dir():
            raise UserError(f"data.root={place} is not a folder")
        return look(place)
    cache = cache_folder()
    places = [Path(place).expanduser() for place in (os.environ.get("FEDRAY_DATA"), *system) if place]
    for place in [*places, cache]:
        with contextlib.suppress(UserError):
            return look(place)
    searched = ", ".join(map(str, [*places, cache]))
    if download is None:
        raise UserError(
            f"{name} is not in {searched}: put {wanted} into a folder and give it as data.root or $FEDRAY_DATA"
        )
    try:
        download(cache)
    except Exception as error:  # torchvision raises RuntimeError, URLError, OSError, ...
        raise UserError(
            f"{name} is not in {searched} and could not be downloaded ({first_sentence(error)}): put {wanted} "
            "into a folder and give it as data.root or $FEDRAY_DATA"
        ) from None
    return look(cache)


def download_into(cache: Path, folder: str, fetch: Callable[[Path], Iterable[Path]]) -> None:
    """Downloads files with ``fetch`` into a scratch folder, and then moves them to ``cache/folder``.

    There they are always whole, even if the download is cut short. ``fetch`` is called with the scratch folder, and
    returns the files' paths.
    """
    cache.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    # torchvision sets no time limit, and would wait for ever behind a firewall that answers nothing
    socket.setdefaulttimeout(30)
    try:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fetched = fetch(Path(scratch))
            target = cache / folder
            target.mkdir(parents=True, exist_ok=True)
            for path in fetched:
                move_whole(path, target / path.name)
    finally:
        socket.setdefaulttimeout(before)
