"""Finds the image files in a folder of classes, and counts what is not taken."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedray.data.sources.images import SUFFIXES, is_image
from fedray.errors import UserError

LISTED = 5
"""The most kinds of files, or folders, that a line names."""

Images = dict[str, list[Path]]
"""The images of each class, by its name."""


class LeftOut(NamedTuple):
    """A file or folder that is not taken, and what kind of such it is."""

    path: Path
    kind: str


class ClassFolders(NamedTuple):
    """The images in the folders of classes, and what is not taken."""

    images: Images
    left_out: list[LeftOut]


def class_folders(folder: Path) -> ClassFolders:
    """Returns the images in the folders of ``folder``, one for each class, in which they may lie at any depth.

    Links are followed. Hidden files and folders are not taken. Raises :class:`UserError` if there are no classes, one
    has no images, or a name is not UTF-8.
    """
    images: Images = {}
    left_out = beside_classes(folder)
    for each in _folders(folder):
        found = list(_judged(_below(each)))
        others = [LeftOut(path, kind) for path, kind in found if kind]
        images[each.name] = [path for path, kind in found if not kind]
        if not images[each.name]:
            held = f"only {_counted(others)}" if others else "no files"
            raise UserError(
                f"{each} would be a class without images, as it has {held}: move it away, or convert its files (images "
                f"end with {', '.join(SUFFIXES)})"
            )
        left_out += others
    if not images:
        raise UserError(f"{folder} has no folders with images ({', '.join(SUFFIXES)}), one for each class")
    return ClassFolders(images, left_out)


def beside_classes(folder: Path) -> list[LeftOut]:
    """Returns the images in ``folder`` that are in none of the folders in it, and its hidden folders with images.

    Other files, such as a list of labels, are not taken for images by anybody.
    """
    here = [each for each in _entries(folder) if not each.is_folder or each.is_hidden]
    found = [LeftOut(path, kind or "beside the folders of classes") for path, kind in _judged(here)]
    return [each for each in found if is_image(each.path) or each.path.is_dir()]


def part_of(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the folder in ``folder`` that has the first of ``names`` that there is, in small or capital letters; None
    if there is none. Raises :class:`UserError` if two folders have that name."""
    for name in names:
        found = [path for path in _folders(folder) if path.name.lower() == name]
        if len(found) > 1:
            raise UserError(f"{folder} has the folders {found[0].name} and {found[1].name}: keep one of them")
        if found:
            return found[0]
    return None


def others_with_images(folder: Path, parts: Sequence[Path]) -> list[str]:
    """Returns the names of the folders in ``folder`` that are none of ``parts`` and have images."""
    return [path.name for path in _folders(folder) if path not in parts and any(map(is_image, _paths(_below(path))))]


def note_on_left_out(folder: Path, left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    """Returns the line for the user about what is not taken, if there is anything."""
    if not left_out:
        return ()
    first = left_out[0].path.relative_to(folder)
    return (f"warning: {folder}: not taken for images: {_counted(left_out)}; the first is {first}",)


def note_on_one_class(folder: Path, images: Images) -> tuple[str, ...]:
    """Returns a line for the user if there is but one class, as in a folder that is above that of the classes."""
    if len(images) > 1:
        return ()
    return (
        f"warning: {folder} has one class, {next(iter(images))}, so that every answer is right; if the classes' "
        "folders lie elsewhere, set data.root to the folder that they are in, or that has them in train and test",
    )


def check_is_undivided(folder: Path, images: Images, trains: Sequence[str], tests: Sequence[str]) -> None:
    """Raises :class:`UserError` if a class has images in folders of both names, as a set above its own folder has: test
    images would be trained on."""
    for name, paths in images.items():
        inner: dict[Path, set[str]] = {}
        for each in {above for path in {path.parent for path in paths} for above in (path, *path.parents)}:
            if folder / name in each.parents:
                inner.setdefault(each.parent, set()).add(each.name)
        for where, found in sorted(inner.items()):
            parts = [sorted(each for each in found if each.lower() in names) for names in (trains, tests)]
            if all(parts):
                raise UserError(
                    f"{where} would be a part of the class {name}, but has the folders {parts[0][0]} and "
                    f"{parts[1][0]}, as a set has: set data.root={where} to use that set; if it is a class, put its "
                    f"images into train/{name} and test/{name}"
                )


def note_on_same_folders(folder: Path, images: Mapping[str, Sequence[Path]]) -> tuple[str, ...]:
    """Returns a line for the user if the folders of several classes have folders of the same names in them, as the
    parts of a set have that are not called train and test."""
    inner = {name: frozenset(_first_below(folder / name, path) for path in paths) for name, paths in images.items()}
    (within, count), *_ = Counter(inner.values()).most_common(1)
    if count < 2 or len(within) < 2 or "" in within:
        return ()
    same = [name for name in images if inner[name] == within]
    return (
        f"warning: {', '.join(same[:LISTED])} are taken for classes, but all have the folders "
        f"{', '.join(sorted(within)[:LISTED])}; if these are the classes, call the folders of {folder} train and test",
    )


def _first_below(folder: Path, path: Path) -> str:
    """Returns the folder in ``folder`` in which a file is; "" for a file that is in ``folder`` itself."""
    first, *others = path.relative_to(folder).parts
    return first if others else ""


class _Entry(NamedTuple):
    """What a folder has in it: a file, another folder, or neither, such as a pipe."""

    path: Path
    is_folder: bool
    is_file: bool

    @property
    def is_hidden(self) -> bool:
        return self.path.name.startswith(".")


def _judged(entries: Iterator[_Entry] | list[_Entry]) -> Iterator[tuple[Path, str]]:
    """Yields the paths of files and hidden folders, sorted, with why they are not taken, which is "" for images.

    What is hidden and no image, such as .DS_Store, is nobody's data and not among them.
    """
    for path, is_folder, is_file in sorted(entries):
        hidden = path.name.startswith(".")
        if is_folder:
            with contextlib.suppress(OSError):
                if any(is_image(Path(name)) for name in os.listdir(path)):
                    yield path, "hidden folders with images"
        elif not is_file and not hidden:
            # whoever opens a pipe waits for another program
            yield path, "pipes or devices"
        elif is_image(path):
            yield path, "hidden" if hidden else ""
        elif not hidden:
            yield path, path.suffix.lower() or "without an ending"


def _folders(folder: Path) -> list[Path]:
    """Returns the folders in ``folder`` that are not hidden, in the order of their names."""
    return sorted(each.path for each in _entries(folder) if each.is_folder and not each.is_hidden)


def _below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[_Entry]:
    """Yields all files below ``folder``, also in folders that are links, and hidden folders in place of what they hold.

    ``above`` are the real paths of the folders in which ``folder`` is.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise UserError(f"{folder} is a link to a folder in which it lies: remove it")
    for each in _entries(folder):
        if each.is_folder and not each.is_hidden:
            yield from _below(each.path, (*above, real))
        else:
            yield each


def _paths(entries: Iterator[_Entry]) -> Iterator[Path]:
    return (each.path for each in entries if each.is_file)


def _entries(folder: Path) -> list[_Entry]:
    try:
        with os.scandir(folder) as entries:
            found = [(_Entry(Path(each.path), each.is_dir(), each.is_file()), each.is_symlink()) for each in entries]
    except OSError as error:
        raise UserError(f"can't read the folder {folder}: {error.strerror or error}") from None
    for each, is_link in found:
        if not _is_utf8(each.path):
            raise UserError(f"{os.fsencode(each.path)!r} has a name that is not UTF-8, which can't be shown: rename it")
        if is_link and not each.is_hidden and not each.path.exists():
            raise UserError(f"{each.path} is a link to {os.readlink(each.path)}, which is not there")
    return [each for each, _ in found]


def _is_utf8(path: Path) -> bool:
    """Returns whether a name can be written into digests, lines and the run folder, which are UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _counted(left_out: Sequence[LeftOut]) -> str:
    """Returns how many there are of each kind, such as ``3 .txt, 1 hidden``."""
    kinds = Counter(each.kind for each in left_out).most_common()
    rest = sum(count for _, count in kinds[LISTED:])
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:LISTED])
    return f"{shown} and {rest} others" if rest else shown
