"""A folder of image files with a folder for each class: ``train/CLASS/...`` and ``test/CLASS/...`` (or ``val``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedray.data.columns import HELD_OUT
from fedray.data.find import find_files
from fedray.data.images import SUFFIXES, ImageFiles
from fedray.data.lazy import LazyItems
from fedray.data.source import Source
from fedray.errors import UserError
from fedray.files import in_home

TESTS = ("test", "val", "validation")


def image_folder(root: str | None, image_size: int | None) -> Source:
    """Loads the user's own images. Classes are numbered in the order of their names.

    Images directly in ``root/CLASS`` have no division of their own: of each class, every fifth in the order of names
    is a test image. Raises :class:`UserError` if there are no such folders, or a test class has no training images.
    """
    if root is None:
        raise UserError("data.source=image_folder needs data.root: the folder with the classes' folders")
    if image_size is None:
        raise UserError("data.source=image_folder needs data.image_size: the pixels to which images are scaled")
    folder = in_home(root)
    if not folder.is_dir():
        raise UserError(f"data.root={folder} is not a folder")
    tests = next((part for part in TESTS if (folder / part).is_dir()), None)
    train = _files(folder / "train" if tests else folder)
    names = tuple(sorted(train))
    notes: tuple[str, ...] = ()
    if tests:
        test = _files(folder / tests)
        if unknown := sorted(set(test) - set(train)):
            raise UserError(f"{folder / tests} has class {unknown[0]!r}, which {folder / 'train'} does not have")
    else:
        test = {name: paths[HELD_OUT - 1 :: HELD_OUT] for name, paths in train.items()}
        train = {name: [path for path in paths if path not in set(test[name])] for name, paths in train.items()}
        notes = (f"{folder} has no folder test: of each class, every fifth image is a test image",)
    sets = {}
    for part, classes in (("train", train), ("test", test)):
        paths = [str(path.relative_to(folder)) for name in names for path in classes.get(name, ())]
        labels = np.repeat(np.arange(len(names)), [len(classes.get(name, ())) for name in names])
        if not paths:
            raise UserError(f"{folder} has no {part} images")
        sets[part] = LazyItems(ImageFiles(folder, paths, labels, image_size), f"{folder} ({part})"), labels
    (x, y), (x_test, y_test) = sets["train"], sets["test"]
    scale = np.full(3, 1 / 255, np.float32)
    return Source("image_folder", x, y, x_test, y_test, len(names), scale, class_names=names, notes=notes)


def fire(root: str | None, image_size: int | None) -> Source:
    """Loads the two classes ``fire`` and ``nofire``, as :func:`image_folder` does, at 64 pixels unless ``image_size``
    says otherwise."""

    def look(place: Path) -> Path:
        for folder in (place / "fire", place):
            if (folder / "fire").is_dir() and (folder / "nofire").is_dir():
                return folder
        raise UserError(f"data.root={place} has no folders fire and nofire")

    folder = find_files(
        "fire", root, look, None, wanted="the folders fire and nofire with photographs",
        address="https://github.com/cair/Fire-Detection-Image-Dataset",
    )  # fmt: skip
    return replace(image_folder(str(folder), image_size or 64), name="fire")


def _files(folder: Path) -> dict[str, list[Path]]:
    """Returns the image files of each class, which may lie in folders below the class's own."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = {}
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        images = sorted(path for path in each.rglob("*") if path.suffix in SUFFIXES)
        if images:
            found[each.name] = images
    if not found:
        raise UserError(f"{folder} has no folders with images ({', '.join(SUFFIXES[:5])}), one for each class")
    return found
