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
from fedray.util.files import in_home, move_whole

Files = TypeVar("Files")


class PartlyThere(UserError):
    """Raised for a folder that has some of a data set's files, but not all that are needed."""


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


def find_files(
    name: str,
    root: str | None,
    look: Callable[[Path], Files],
    download: Callable[[Path], None] | None,
    wanted: str,
    address: str,
    system: Iterable[str] = (),
) -> Files:
    """Returns what ``look`` returns for the first folder that has the files of the data set ``name``.

    If ``root`` is not None, only that folder is searched. Otherwise $FEDRAY_DATA, the folders ``system`` and the user's
    cache are, and then the files are downloaded into the cache by ``download``, which is None where the publisher does
    not offer them to programs. ``look`` is called with a folder, and raises :class:`UserError` if the folder lacks some
    of the files; :class:`PartlyThere` if it has others.

    Raises :class:`UserError` if the files are nowhere; the message says which files are ``wanted``, and the ``address``
    at which their publisher offers them.
    """
    if root is not None:
        place = in_home(root)
        if not place.is_dir():
            raise UserError(f"data.root={place} is not a folder")
        return look(place)
    cache = cache_folder()
    places = [in_home(place) for place in (os.environ.get("FEDRAY_DATA"), *system) if place]
    partly: PartlyThere | None = None
    for place in [*places, cache]:
        try:
            return look(place)
        except PartlyThere as error:
            partly = partly or error
        except UserError:
            continue
    searched = ", ".join(map(str, [*places, cache]))
    advice = f"get {wanted} from {address}, put it into a folder, and give that as data.root or $FEDRAY_DATA"
    if partly is not None:
        raise UserError(f"{partly}; {advice}")
    if download is None:
        raise UserError(f"{name} is not in {searched}: {advice}")
    try:
        download(cache)
    except Exception as error:  # torchvision raises RuntimeError, URLError, OSError, ...
        raise UserError(
            f"{name} is not in {searched} and could not be downloaded ({first_sentence(error)}): {advice}"
        ) from None
    return look(cache)


def download_into(cache: Path, folder: str, fetch: Callable[[Path], Iterable[Path]]) -> None:
    """Downloads files, or folders of files, with ``fetch`` into a scratch folder, and then moves them to
    ``cache/folder``.

    There they are always whole, even if the download is cut short. ``fetch`` is called with the scratch folder, and
    returns the paths.
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
                # a folder can't be replaced as a file can; whoever was quicker has put it there
                if not (path.is_dir() and (target / path.name).is_dir()):
                    move_whole(path, target / path.name)
    finally:
        socket.setdefaulttimeout(before)
