"""Tiny-ImageNet in the publisher's layout (Y. Le, X. Yang: Tiny ImageNet Visual Recognition Challenge, 2015)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedray.data.sources.find import Layout, find_files, reading
from fedray.data.sources.images import image_set
from fedray.data.sources.source import Source
from fedray.errors import UserError

FOLDER = "tiny-imagenet-200"
ANNOTATIONS = "val/val_annotations.txt"


def tiny_imagenet(root: str | None, image_size: int | None) -> Source:
    """Loads Tiny-ImageNet: photographs, uint8 [3, 64, 64], in 200 classes. Images are read when they are used.

    The test set is the publisher's ``val``, because its ``test`` has no labels. Raises :class:`UserError` for files
    that are missing or contradict each other.

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine.
        image_size: the height and width of the images in pixels (``data.image_size``); None means 64.
    """
    place = find_files(
        "tiny_imagenet", root, [Layout((FOLDER, "."), ("wnids.txt",))],
        f"the unpacked folder {FOLDER} of {FOLDER}.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ).folder  # fmt: skip
    classes = _lines(place / "wnids.txt")
    if len(set(classes)) != len(classes) or not classes:
        raise UserError(f"{place / 'wnids.txt'} must name each class once")
    words = dict(line.split("\t", 1) for line in _lines(place / "words.txt") if "\t" in line)
    number = {name: k for k, name in enumerate(classes)}
    train = [(path, k) for name, k in number.items() for path in _images(place, name)]
    test, there = [], {path.name for path in (place / "val" / "images").glob("*")}
    for row, line in enumerate(_lines(place / ANNOTATIONS)):
        file, _, rest = line.partition("\t")
        if file not in there:
            raise UserError(f"{place / ANNOTATIONS} lists {file!r} in line {row + 1}, which val/images does not have")
        if (name := rest.split("\t")[0]) not in number:
            raise UserError(
                f"{place / ANNOTATIONS} has class {name!r} in line {row + 1}, which wnids.txt does not have"
            )
        test.append((f"val/images/{file}", number[name]))
    size = image_size or 64
    x, y, _ = image_set(place, train, size, f"{place} (train)")
    x_test, y_test, _ = image_set(place, test, size, f"{place} (val)")
    names = tuple(f"{words.get(name, name).split(',')[0]} ({name})" for name in classes)
    return Source(
        "tiny_imagenet", x, y, x_test, y_test, len(classes), np.full(3, 1 / 255, np.float32), class_names=names
    )


def _lines(path: Path) -> list[str]:
    with reading(path, "list in UTF-8", UnicodeDecodeError):
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _images(place: Path, name: str) -> list[str]:
    folder = place / "train" / name / "images"
    found = sorted(path.name for path in folder.glob("*.JPEG"))
    if not found:
        raise UserError(f"{folder} has no images (*.JPEG)")
    return [f"train/{name}/images/{file}" for file in found]
