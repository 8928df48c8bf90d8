"""A folder of image files with a folder for each class: ``train/CLASS/...`` and ``test/CLASS/...`` (or ``val``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedray.data.sources.class_folders import (
    ClassFolders,
    Images,
    beside_classes,
    check_is_undivided,
    class_folders,
    note_on_left_out,
    note_on_one_class,
    note_on_same_folders,
    others_with_images,
    part_of,
)
from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import Layout, find_files
from fedray.data.sources.images import ImageFiles
from fedray.data.sources.source import Source
from fedray.data.storage.lazy import LazyItems
from fedray.errors import UserError
from fedray.util.files import in_home

TRAINS = ("train", "training")
TESTS = ("test", "val", "validation", "valid", "testing")
"""The names of folders of training and of test images, in small or capital letters; of several, the first counts."""


def image_folder(root: str | None, image_size: int | None) -> Source:
    """Loads the user's own images. Classes are numbered in the order of their names.

    Images directly in ``root/CLASS``, or without a folder of tests, have no division of their own: of each class, every
    fifth in the order of names is a test image. Raises :class:`UserError` if there are no such folders, a class has no
    images or is itself divided into train and test, or a test class has no training images.
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
    sets = {}
    for part, classes in (("train", train), ("test", test)):
        paths = [str(path.relative_to(folder)) for name in names for path in classes.get(name, ())]
        labels = np.repeat(np.arange(len(names)), [len(classes.get(name, ())) for name in names])
        if not paths:
            raise UserError(f"{folder} has no {part} images")
        images = ImageFiles(folder, paths, labels, image_size)
        notes += images.notes() if part == "train" else []
        sets[part] = LazyItems(images, f"{folder} ({part})"), labels
    (x, y), (x_test, y_test) = sets["train"], sets["test"]
    scale = np.full(3, 1 / 255, np.float32)
    return Source("image_folder", x, y, x_test, y_test, len(names), scale, class_names=names, notes=tuple(notes))


def _divided(folder: Path) -> tuple[Images, Images, list[str]]:
    """Returns the training and the test images in ``folder``, and lines for the user about what is not taken."""
    train, tests = part_of(folder, TRAINS), part_of(folder, TESTS)
    parts = [part for part in (train, tests) if part is not None]
    others = others_with_images(folder, parts) if parts else []
    beside = beside_classes(folder)
    if tests is None:
        # with other folders beside it, it is the class of that name
        whole = train if train is not None and not others else folder
        found = _classes(whole)
        beside = beside if whole != folder else []
        notes = [f"{whole} has no folder test: of each class, every fifth image is a test image"]
        notes += note_on_left_out(folder, [*beside, *found.left_out])
        notes += [*note_on_one_class(whole, found.images), *note_on_same_folders(whole, found.images)]
        test = {name: paths[HELD_OUT - 1 :: HELD_OUT] for name, paths in found.images.items()}
        held_out = {path for paths in test.values() for path in paths}
        rest = {name: [path for path in paths if path not in held_out] for name, paths in found.images.items()}
        return rest, test, notes
    if train is None:
        raise UserError(f"{folder} has a folder {tests.name}, but none called train")
    found, found_tests = _classes(train), _classes(tests)
    if unknown := sorted(set(found_tests.images) - set(found.images)):
        raise UserError(f"{tests} has class {unknown[0]!r}, which {train} does not have")
    notes = [*note_on_left_out(folder, [*beside, *found.left_out, *found_tests.left_out])]
    notes += note_on_one_class(train, found.images)
    if others:
        are = "are" if len(others) > 1 else "is"
        notes.append(
            f"warning: {folder}: {', '.join(others)} {are} not read: {train.name} and {tests.name} are the sets to "
            "train on and to test on"
        )
    return found.images, found_tests.images, notes


def _classes(folder: Path) -> ClassFolders:
    """Returns the images in the folders of ``folder``, none of which may be a set of its own."""
    found = class_folders(folder)
    check_is_undivided(folder, found.images, TRAINS, TESTS)
    return found


def fire(root: str | None, image_size: int | None) -> Source:
    """Loads the two classes ``fire`` and ``nofire``, as :func:`image_folder` does, at 64 pixels unless ``image_size``
    says otherwise."""

    found = find_files(
        "fire", root, [Layout(("fire", "."), ("fire", "nofire"))], "the folders fire and nofire with photographs",
        "https://github.com/cair/Fire-Detection-Image-Dataset",
    )  # fmt: skip
    return replace(image_folder(str(found.folder), image_size or 64), name="fire")
