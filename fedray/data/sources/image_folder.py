"""Folders of image files with a folder for each class: ``train/CLASS/...`` and ``test/CLASS/...`` (or ``val``)."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import Layout, find_files
from fedray.data.sources.images import SUFFIXES, image_set, is_image
from fedray.data.sources.source import Source
from fedray.errors import UserError
from fedray.util.files import in_home

TRAINS = ("train", "training")
TESTS = ("test", "val", "validation", "valid", "testing")
"""The names that the folders of training and of test images may have, in small or capital letters. If several exist,
the first one in this list is used."""

LISTED = 5
"""The largest number of file types, or of folders, that a message names."""

Images = Mapping[str, Sequence[Path]]
"""The images of each class, by its name."""


class LeftOut(NamedTuple):
    """A file or folder that was found among the user's images, and why it is left out.

    ``kind`` is the reason, such as ``.txt`` (it is another type of file) or ``hidden``. During the search there is also
    an object for each image that is used; its ``kind`` is ""."""

    path: Path
    kind: str


class ClassFolders(NamedTuple):
    """The image files that were found in a folder which contains one folder for each class.

    ``images`` has the paths of each class's images, by the name of the class. ``left_out`` are the files and folders
    that are not used.
    """

    images: Images
    left_out: list[LeftOut]


def image_folder(root: str | None, image_size: int | None) -> Source:
    """Loads the user's image files from ``root/train/CLASS`` and ``root/test/CLASS``, where CLASS is the name of a
    class.

    The test folder may also be called ``val``. If there is none, or if the classes are directly in ``root``, every
    fifth image of each class, in the order of names, is a test image. Classes are numbered in the order of their names.
    Images are scaled and cropped to uint8 ``[3, image_size, image_size]``. Both arguments must be set. Raises
    :class:`UserError` if there are no folders of classes, if a class has no images or is itself divided into train and
    test, or if a test class has no training images.
    """
    if root is None:
        raise UserError("data.source=image_folder needs data.root: the folder with the classes' folders")
    if image_size is None:
        raise UserError("data.source=image_folder needs data.image_size: the pixels to which images are scaled")
    folder = in_home(root)
    if not folder.is_dir():
        raise UserError(f"data.root={folder} is not a folder")
    train, test, notes = _divided(folder)
    names = tuple(sorted(train))
    sets = []
    for part, classes in (("train", train), ("test", test)):
        labelled = [(path.relative_to(folder), k) for k, name in enumerate(names) for path in classes.get(name, ())]
        if not labelled:
            raise UserError(f"{folder} has no {part} images")
        sets.append(image_set(folder, [(str(path), k) for path, k in labelled], image_size, f"{folder} ({part})"))
    (x, y, taken), (x_test, y_test, _) = sets
    scale, notes = np.full(3, 1 / 255, np.float32), [*notes, *taken.notes()]
    return Source("image_folder", x, y, x_test, y_test, len(names), scale, class_names=names, notes=tuple(notes))


def fire(root: str | None, image_size: int | None) -> Source:
    """Loads photographs of two classes, with and without fire, from the folders ``fire`` and ``nofire`` in ``root``.

    If ``root`` is None, the folders are looked for on this machine. Everything else is as in :func:`image_folder`.
    Images are scaled to ``image_size`` pixels in height and width, or to 64 if it is None.
    """
    found = find_files(
        "fire", root, [Layout(("fire", "."), ("fire", "nofire"))], "the folders fire and nofire with photographs",
        "https://github.com/cair/Fire-Detection-Image-Dataset",
    )  # fmt: skip
    return replace(image_folder(str(found.folder), image_size or 64), name="fire")


def _divided(folder: Path) -> tuple[Images, Images, list[str]]:
    """Returns the training images and the test images in ``folder``, each as lists of paths by the name of the class.

    The third element is a list of messages for the user about what is not used.
    """
    train, tests = _part(folder, TRAINS), _part(folder, TESTS)
    parts = [part for part in (train, tests) if part is not None]
    beside = [path for path in _folders(folder) if path not in parts] if parts else []
    others = [path.name for path in beside if any(not each.kind for each in _below(path))]
    if tests is None:
        # a folder train with other folders beside it is the class of that name
        whole = train if train is not None and not others else folder
        found = class_folders(whole)
        notes = [f"warning: {whole} has no folder test: of each class, every fifth image is a test image"]
        left_out = found.left_out if whole == folder else [*_beside_classes(folder), *found.left_out]
        notes += [*_note_on_left_out(folder, left_out), *_note_on_one_class(whole, found.images)]
        notes += _note_on_same_folders(whole, found.images)
        test = {name: paths[HELD_OUT - 1 :: HELD_OUT] for name, paths in found.images.items()}
        rest = {
            name: [path for place, path in enumerate(paths) if place % HELD_OUT != HELD_OUT - 1]
            for name, paths in found.images.items()
        }
        return rest, test, notes
    if train is None:
        raise UserError(f"{folder} has a folder {tests.name}, but none called train")
    found, found_tests = class_folders(train), class_folders(tests)
    if unknown := sorted(set(found_tests.images) - set(found.images)):
        raise UserError(f"{tests} has class {unknown[0]!r}, which {train} does not have")
    notes = _note_on_left_out(folder, [*_beside_classes(folder), *found.left_out, *found_tests.left_out])
    notes += _note_on_one_class(train, found.images)
    if others:
        are = "are" if len(others) > 1 else "is"
        notes.append(
            f"warning: {folder}: {', '.join(others)} {are} not read: {train.name} and {tests.name} are the sets to "
            "train on and to test on"
        )
    return found.images, found_tests.images, notes


def class_folders(folder: Path) -> ClassFolders:
    """Finds the image files of each class. Each folder in ``folder`` is a class, and may hold images at any depth.

    Links are followed. Hidden files and folders are not used. Raises :class:`UserError` if there are no classes, if a
    class has no images or is itself divided into train and test, if a link leads nowhere or in a circle, or if a name
    is not UTF-8.
    """
    images: dict[str, list[Path]] = {}
    left_out = _beside_classes(folder)
    for each in _folders(folder):
        found = sorted(_below(each))
        others = [one for one in found if one.kind]
        images[each.name] = [one.path for one in found if not one.kind]
        if not images[each.name]:
            held = f"only {_counted(others)}" if others else "no files"
            raise UserError(
                f"{each} would be a class without images, as it has {held}: move it away, or convert its files (images "
                f"end with {', '.join(SUFFIXES)})"
            )
        _check_is_undivided(each, images[each.name])
        left_out += others
    if not images:
        raise UserError(f"{folder} has no folders with images ({', '.join(SUFFIXES)}), one for each class")
    return ClassFolders(images, left_out)


def _check_is_undivided(folder: Path, paths: Sequence[Path]) -> None:
    """Raises :class:`UserError` if a class has images in folders train and test.

    Such a folder is probably a whole data set. If it were taken for a class, its test images would be trained on.
    """
    inner = {each for parent in {path.parent for path in paths} for each in (parent, *parent.parents)}
    for where in sorted({each.parent for each in inner if folder in each.parents}):
        names = sorted(each.name for each in inner if each.parent == where)
        parts = [[name for name in names if name.lower() in known] for known in (TRAINS, TESTS)]
        if all(parts):
            raise UserError(
                f"{where} would be a part of the class {folder.name}, but has the folders {parts[0][0]} and "
                f"{parts[1][0]}, as a set has: set data.root={where} to use that set; if it is a class, put its "
                f"images into train/{folder.name} and test/{folder.name}"
            )


def _beside_classes(folder: Path) -> list[LeftOut]:
    """Returns the images that lie directly in ``folder``, outside the folders of classes, and the hidden folders
    with images.

    Other files, such as a list of labels, are left out, because nobody expects them to be images.
    """
    found = sorted(one for entry in _entries(folder) if not _is_class(entry) for one in _judged(entry))
    kinds = ((each.path, each.kind or "beside the folders of classes") for each in found)
    return [LeftOut(path, kind) for path, kind in kinds if is_image(path) or path.is_dir()]


def _part(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the folder of the training or the test images in ``folder``, or None if there is none.

    It is the first of ``names`` that exists, in small or capital letters.
    """
    for name in names:
        found = [path for path in _folders(folder) if path.name.lower() == name]
        if len(found) > 1:
            raise UserError(f"{folder} has the folders {found[0].name} and {found[1].name}: keep one of them")
        if found:
            return found[0]
    return None


def _note_on_left_out(folder: Path, left_out: Sequence[LeftOut]) -> list[str]:
    if not left_out:
        return []
    first = left_out[0].path.relative_to(folder)
    return [f"warning: {folder}: not taken for images: {_counted(left_out)}; the first is {first}"]


def _note_on_one_class(folder: Path, images: Images) -> list[str]:
    if len(images) > 1:
        return []
    return [
        f"warning: {folder} has one class, {next(iter(images))}, so that every answer is right; if the classes' "
        "folders lie elsewhere, set data.root to the folder that they are in, or that has them in train and test"
    ]


def _note_on_same_folders(folder: Path, images: Images) -> list[str]:
    """Returns a list with a warning if the folders of several classes hold folders of the same names.

    These may be the training and test sets under names that fedray does not know. The list is empty otherwise.
    """
    inner = {name: frozenset(path.relative_to(folder / name).parts[0] for path in images[name]) for name in images}
    (within, count), *_ = Counter(inner.values()).most_common(1)
    same = [name for name in images if inner[name] == within]
    if count < 2 or len(within) < 2 or any((folder / same[0] / name).is_file() for name in within):
        return []
    return [
        f"warning: {', '.join(same[:LISTED])} are taken for classes, but all have the folders "
        f"{', '.join(sorted(within)[:LISTED])}; if these are the classes, call the folders of {folder} train and test"
    ]


def _judged(entry: os.DirEntry[str]) -> Iterator[LeftOut]:
    """Yields the file or hidden folder ``entry`` with its kind, which is "" for an image and else says why it is not
    used.

    Hidden files that are not images, such as .DS_Store, are not yielded, because they are no data.
    """
    path, hidden = Path(entry.path), entry.name.startswith(".")
    if entry.is_dir():
        with contextlib.suppress(OSError):
            if any(is_image(Path(name)) for name in os.listdir(path)):
                yield LeftOut(path, "hidden folders with images")
    elif is_image(path) and entry.is_file():
        yield LeftOut(path, "hidden" if hidden else "")
    elif not hidden:
        # opening a pipe would wait for another program
        yield LeftOut(path, (path.suffix.lower() or "without an ending") if entry.is_file() else "pipes or devices")


def _below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[LeftOut]:
    """Yields all files below ``folder``, each with its kind (:func:`_judged`), following links to folders.

    ``above`` are the real paths of the folders that contain ``folder``. They keep a link from leading round in
    a circle.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise UserError(f"{folder} is a link to a folder in which it lies: remove it")
    for entry in _entries(folder):
        yield from _below(Path(entry.path), (*above, real)) if _is_class(entry) else _judged(entry)


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _folders(folder: Path) -> list[Path]:
    """Returns the folders in ``folder`` that are not hidden, in the order of their names."""
    return sorted(Path(entry.path) for entry in filter(_is_class, _entries(folder)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError as error:
        raise UserError(f"can't read the folder {folder}: {error.strerror or error}") from None
    for entry in found:
        try:
            entry.path.encode()  # names are written into digests, lines and the run folder
        except UnicodeEncodeError:
            name = os.fsencode(entry.path)
            raise UserError(f"{name!r} has a name that is not UTF-8, which can't be shown: rename it") from None
        if entry.is_symlink() and not entry.name.startswith(".") and not os.path.exists(entry.path):
            raise UserError(f"{entry.path} is a link to {os.readlink(entry.path)}, which is not there")
    return found


def _counted(left_out: Sequence[LeftOut]) -> str:
    """Returns how many files or folders there are of each kind, such as ``3 .txt, 1 hidden``."""
    kinds = Counter(each.kind for each in left_out).most_common()
    rest = sum(count for _, count in kinds[LISTED:])
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:LISTED])
    return f"{shown} and {rest} others" if rest else shown
