"""Where a data set's files are: in a folder of the user's, elsewhere on this machine, or downloaded into a cache."""

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
    """The folder in which fedray keeps what it can get again: in $XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedray"


def file_stamp(path: Path) -> tuple[str, int, int, int, int]:
    """What tells a file from one that takes its place: path, size, the times in nanoseconds of its content and of its
    entry, inode. Take it before the file is read."""
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def find_files(
    name: str,
    root: str | None,
    look: Callable[[Path], Files],
    download: Callable[[Path], None],
    wanted: str,
    system: Iterable[str] = (),
) -> Files:
    """What ``look`` finds in ``root`` if that is given, and nowhere else.

    Otherwise in $FEDRAY_DATA, the folders ``system``, the user's cache, or the cache after ``download`` into it.
    ``look`` raises UserError if a folder lacks some of the files; ``wanted`` names them when they are nowhere.
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
    try:
        download(cache)
    except Exception as error:  # torchvision raises RuntimeError, URLError, OSError, ...
        searched = ", ".join(map(str, [*places, cache]))
        raise UserError(
            f"{name} is not in {searched} and could not be downloaded ({first_sentence(error)}): put {wanted} "
            "into a folder and give it as data.root or $FEDRAY_DATA"
        ) from None
    return look(cache)


def download_into(cache: Path, folder: str, fetch: Callable[[Path], Iterable[Path]]) -> None:
    """Moves the files that ``fetch`` got into a scratch folder to ``cache/folder``, so that none is ever half there."""
    cache.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # torchvision sets none, and would wait for ever behind a silent firewall
    try:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fetched = fetch(Path(scratch))
            target = cache / folder
            target.mkdir(parents=True, exist_ok=True)
            for path in fetched:
                move_whole(path, target / path.name)
    finally:
        socket.setdefaulttimeout(before)
