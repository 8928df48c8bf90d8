"""Finds the files of a data set: in the user's folder, elsewhere on this machine, or by a download into a cache."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedray.data.storage.cache import file_stamp
from fedray.errors import UserError, first_sentence
from fedray.util.cache import cache_folder
from fedray.util.files import in_home, move_whole


class Layout(NamedTuple):
    """One way in which the files of a data set can be arranged on a disk. All ``files`` must be in the same folder,
    which may be any of ``folders``.

    Args:
        folders: the folders that may hold the files, as paths below the folder in which the user keeps the data set.
        files: the files, as paths below one of ``folders``, or patterns such as ``*.txt``. They may also be gzipped
            (``.gz``).
        related: a pattern for the names of files that belong to other parts of the data set, such as another variant,
            or "" if there are none. If only such files are found, the error message lists them.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    related: str = ""


class Found(NamedTuple):
    """The files of a data set that were found on this machine.

    ``folder`` is the folder that holds them. ``files`` has a list of paths for each entry of :attr:`Layout.files`.
    ``stamps`` has the :func:`~fedray.data.storage.cache.file_stamp` of each file, which shows later whether it has
    changed.
    """

    folder: Path
    files: tuple[list[Path], ...]
    stamps: tuple[tuple[str, int, int, int, int], ...] = ()

    @property
    def paths(self) -> list[Path]:
        return [path for paths in self.files for path in paths]


class PartlyThere(UserError):
    """The error for a folder that has some files of a data set, but not all that are needed."""


@contextlib.contextmanager
def reading(path: Path, what: str, *damage: type[Exception]) -> Iterator[None]:
    """Turns errors that occur while a file is read into a :class:`UserError` of one line, in a ``with`` statement.

    Errors of the operating system become ``can't read PATH``. Errors of a type in ``damage`` become a line which says
    that the file is damaged or is not the expected kind of file. All other errors pass unchanged.

    Args:
        path: the file that is read.
        what: what the file should be, such as ``csv file``.
        damage: the types of errors that a damaged file causes.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"can't read {path}: {error.strerror}") from None
        if not isinstance(error, damage):
            raise
        raise UserError(f"{path} is damaged or no {what} ({first_sentence(error)}); get the file again") from None


def find_files(
    name: str,
    root: str | None,
    layouts: Sequence[Layout],
    wanted: str,
    address: str,
    download: Callable[[Path], object] | None = None,
    system: Sequence[str] = (),
    hint: str = "",
) -> Found:
    """Finds the files of a data set on this machine, or downloads them.

    If ``root`` is None, the folder $FEDRAY_DATA, the folders ``system`` and the user's cache are searched in this
    order. If the files are in none of them, they are downloaded into the cache. Raises :class:`UserError` if the files
    are not found; the message says which files are needed and where to get them.

    Args:
        name: what error messages call the data set.
        root: the only folder that is searched, if it is not None (``data.root``).
        layouts: the ways in which the files may be arranged in a folder.
        wanted: a description of the needed files, for error messages.
        address: the web address at which their publisher offers them, for error messages.
        download: a function that is called with a folder and puts the files there; None if the files can't be
            downloaded automatically.
        system: the folders in which packages of an operating system install the files.
        hint: a text that is added to the error message if a folder has only some of the files.
    """
    if root is not None:
        place = in_home(root)
        if not place.is_dir():
            raise UserError(f"data.root={place} is not a folder")
        return look(place, layouts, hint)
    cache = cache_folder()
    places = [*(in_home(place) for place in (os.environ.get("FEDRAY_DATA"), *system) if place), cache]
    partly: PartlyThere | None = None
    for place in places:
        try:
            return look(place, layouts, hint)
        except PartlyThere as error:
            partly = partly or error
        except UserError:
            continue
    searched = ", ".join(map(str, places))
    advice = f"get {wanted} from {address}, put it into a folder, and give that as data.root or $FEDRAY_DATA"
    if partly is not None:
        raise UserError(f"{partly}; {advice}")
    if download is None:
        raise UserError(f"{name} is not in {searched}: {advice}")
    try:
        _download_into(cache, layouts, download)
    except Exception as error:  # torchvision raises RuntimeError, URLError, OSError, ...
        raise UserError(
            f"{name} is not in {searched} and could not be downloaded ({first_sentence(error)}): {advice}"
        ) from None
    return look(cache, layouts, hint)


def look(place: Path, layouts: Sequence[Layout], hint: str = "") -> Found:
    """Searches the folder ``place`` for the files of a data set, and returns their paths.

    ``layouts`` are the ways in which the files may be arranged. The layout of which the most files are there is used,
    or the first of several with equally many. Raises :class:`PartlyThere`, with ``hint`` in its message, if only some
    files of this layout are there, or only files of other parts of the data set (:attr:`Layout.related`). Raises
    another :class:`UserError` if no file of the data set is there.
    """
    found = [
        (layout, Found(place / folder, tuple(_matching(place / folder, file) for file in layout.files)))
        for layout in layouts
        for folder in layout.folders
    ]
    layout, best = max(found, key=lambda each: sum(map(bool, each[1].files)))
    if all(best.files):
        return best._replace(stamps=tuple(map(file_stamp, best.paths)))
    lacking = next(file for file, paths in zip(layout.files, best.files, strict=True) if not paths)
    if best.paths:
        raise PartlyThere(f"data.root={place} lacks {lacking} (its companions are in {best.folder}{hint})")
    for layout, (folder, *_) in found:
        if layout.related and (related := sorted(path.name for path in folder.glob(layout.related))):
            raise PartlyThere(f"data.root={place} lacks {lacking} (there is {', '.join(related)}{hint})")
    firsts = " or ".join(dict.fromkeys(layout.files[0] for layout in layouts))
    folders = dict.fromkeys(folder for layout in layouts for folder in layout.folders if folder != ".")
    elsewhere = f" (nor is it in {' or '.join(folders)})" if folders else ""
    raise UserError(f"data.root={place} lacks {firsts}{elsewhere}")


def _matching(folder: Path, file: str) -> list[Path]:
    return sorted(folder.glob(f"{file}.gz")) or sorted(folder.glob(file))


def _download_into(cache: Path, layouts: Sequence[Layout], download: Callable[[Path], object]) -> None:
    """Downloads files into a scratch folder, and then moves those of a layout to the cache.

    So the cache never holds half a file, even if the download is interrupted.
    """
    cache.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    # torchvision sets no time limit, and would wait for ever behind a firewall that answers nothing
    socket.setdefaulttimeout(30)
    try:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            download(Path(scratch))
            folder = look(Path(scratch), layouts).folder
            target = cache / folder.relative_to(scratch)
            target.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                # unlike a file, a folder can't be replaced; if it exists, another process has just put it there
                if not (path.is_dir() and (target / path.name).is_dir()):
                    move_whole(path, target / path.name)
    finally:
        socket.setdefaulttimeout(before)
