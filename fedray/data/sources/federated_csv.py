"""Photographs with natural clients, listed in csv files, as GLDv2 and iNaturalist publish their federated splits.

The folder holds ``train.csv`` or ``federated_train.csv`` with the columns ``user_id,image_id,class``, and ``test.csv``
with ``image_id,class``. The images are ``train/a/b/c/abcdef.jpg`` (with the first three characters of the id) or
``train/abcdef.jpg``; test images may also be below ``test``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedray.data.normalization import IMAGENET_MEAN, IMAGENET_STD
from fedray.data.sources.find import Layout, find_files
from fedray.data.sources.images import SUFFIXES, image_set
from fedray.data.sources.source import Source
from fedray.errors import UserError, near_miss
from fedray.util.csv_table import read_csv_table

TRAIN = ("train.csv", "federated_train.csv")

ENDINGS = (*SUFFIXES, *(suffix.upper() for suffix in SUFFIXES))
"""The file name endings that are tried to find the image of an id."""

SCALE, SHIFT = 1 / (255 * IMAGENET_STD), -IMAGENET_MEAN / IMAGENET_STD
"""The scale and shift for ImageNet's mean and standard deviation, which pretrained models expect."""

SPARSE, SPARSE_MORE = 10, 1000
"""A class number is taken for a mistake if it is at least :data:`SPARSE` times the number of classes that occur, and at
least :data:`SPARSE_MORE`. Gaps alone are no mistake, because some classes do not occur in a part of a split."""


class Published(NamedTuple):
    """Describes a data set of photographs that was published with a list of which user took which photograph.

    ``photographs`` is the web address of the photographs. ``users``, ``images`` and ``classes`` say how many users,
    images and classes are in the published list of training images. The user's copy of the list must have the same
    numbers.
    """

    photographs: str
    users: int
    images: int
    classes: int


LISTS = "https://github.com/google-research/google-research/tree/master/federated_vision_datasets"
GLDV2 = Published("https://github.com/cvdfoundation/google-landmark", 1262, 164172, 2028)
INATURALIST = Published("https://github.com/visipedia/inat_comp/tree/master/2017", 9275, 120300, 1203)


def federated_csv(root: str | None, image_size: int | None) -> Source:
    """Loads the user's photographs from a folder in which csv files list their classes and users. Each user is a
    client.

    Raises :class:`UserError` for a missing file, column or image, for an image that is listed twice, and for a class
    that is not a whole number from 0.

    Args:
        root: the folder, with ``train.csv`` (columns ``user_id,image_id,class``), ``test.csv`` (``image_id,class``),
            and the images.
        image_size: the height and width in pixels to which images are scaled; required.
    """
    if root is None:
        raise UserError("data.source=federated_csv needs data.root: the folder with train.csv, test.csv and the images")
    return _load("federated_csv", root, image_size)


def gldv2(root: str | None, image_size: int | None) -> Source:
    """Loads Google Landmarks v2, federated as Landmarks-User-160k (Hsu, Qi, Brown 2020): 1,262 users, each a client.

    ``root`` is the folder with the photographs and with the csv files that list them. If it is None, they are looked
    for on this machine; they are never downloaded. Images are scaled to a height and width of ``image_size`` pixels,
    which must be set.
    """
    return _load("gldv2", root, image_size, GLDV2)


def inaturalist(root: str | None, image_size: int | None) -> Source:
    """Loads iNaturalist 2017, federated as iNaturalist-User-120k (Hsu, Qi, Brown 2020): 9,275 users, each a client.

    ``root`` is the folder with the photographs and with the csv files that list them. If it is None, they are looked
    for on this machine; they are never downloaded. Images are scaled to a height and width of ``image_size`` pixels,
    which must be set.
    """
    return _load("inaturalist", root, image_size, INATURALIST)


def _load(name: str, root: str | None, image_size: int | None, published: Published | None = None) -> Source:
    folder, ((found,),), _ = find_files(
        name, root, [Layout((name, ".") if published else (".",), (file,)) for file in TRAIN],
        f"{TRAIN[1]}, test.csv and the images of the folder train",
        f"{LISTS} and {published.photographs if published else ''}",
    )  # fmt: skip
    if image_size is None:
        raise UserError(f"data.source={name} needs data.image_size: the pixels to which photographs are scaled")
    train, test = _table(found, ("user_id", "image_id", "class")), _table(folder / "test.csv", ("image_id", "class"))
    for path, table in ((found, train), (folder / "test.csv", test)):
        _check_classes(path, table, None if published is None else published.classes, train["class"].nunique())
    if published is not None:
        counts = {"users": train["user_id"].nunique(), "images": len(train), "classes": train["class"].nunique()}
        for what, here in counts.items():
            if here != (there := getattr(published, what)):
                raise UserError(
                    f"{found} has {here:,} {what}, but {name} has {there:,}; data.source=federated_csv takes any counts"
                )
    x, y, images = image_set(folder, _labelled(found, train, folder, ("train", "test")), image_size, str(found))
    x_test, y_test, _ = image_set(
        folder, _labelled(folder / "test.csv", test, folder, ("test", "train")), image_size, f"{folder}/test.csv"
    )
    return Source(
        name, x, y, x_test, y_test, 1 + int(max(y.max(), y_test.max())), SCALE.astype(np.float32),
        SHIFT.astype(np.float32), client_train=train["user_id"].to_numpy(object),
        client_test=test["user_id"].to_numpy(object) if "user_id" in test else None, notes=images.notes(),
    )  # fmt: skip


def _table(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """Reads a csv file, of which the index has the lines. Ids stay texts, and classes become whole numbers from 0."""
    found, lines = read_csv_table(path, str(path))
    table = pd.DataFrame(found, index=lines, dtype=str)
    for column in columns:
        if column not in table:
            raise UserError(f"{path} has no column {column!r}{near_miss(column, map(str, table.columns))}")
    if table.empty:
        raise UserError(f"{path} lists no images")
    for column in columns:
        if (table[column] == "").any():
            raise UserError(f"{path}, line {_first(table[column] == '')}: {column} has nothing")
    twice = table["image_id"].duplicated()
    if twice.any():
        line = _first(twice)
        raise UserError(
            f"{path}, line {line}: image {table['image_id'][line]!r} is listed before ({twice.sum()} such lines)"
        )
    whole = table["class"].str.fullmatch(r"\d{1,9}")
    if not whole.all():
        line = _first(~whole)
        raise UserError(f"{path}, line {line}: class {table['class'][line]!r} is no whole number from 0")
    return table.assign(**{"class": table["class"].astype(np.int64)})


def _first(wrong: pd.Series) -> int:
    """Returns the line of the first row that is ``wrong``."""
    return int(wrong.index[int(wrong.to_numpy().argmax())])


def _check_classes(path: Path, table: pd.DataFrame, classes: int | None, occurring: int) -> None:
    """Raises :class:`UserError` for a class number that is too large.

    In a published split the limit is the number of ``classes``. In other splits a number is refused if it is so much
    larger than ``occurring``, the number of different classes, that it must be a mistake.
    """
    beyond = SPARSE * occurring + SPARSE_MORE if classes is None else classes
    line = _first(table["class"] == table["class"].max())
    if table["class"][line] >= beyond:
        why = f"{occurring:,} classes occur: number them from 0" if classes is None else f"{classes:,} are published"
        raise UserError(f"{path}, line {line}: class {table['class'][line]} is out of range, as {why}")


def _labelled(path: Path, table: pd.DataFrame, folder: Path, parts: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the path and the class of each image in a table, in the order of the table. Images are looked for in the
    folders ``parts``, the table's own first, because each folder may number its images."""
    places = [_place(folder, name, parts) for name in table["image_id"]]
    missing = [line for line, place in zip(table.index, places, strict=True) if place is None]
    if missing:
        image = table["image_id"][missing[0]]
        raise UserError(
            f"{path}, line {missing[0]}: image {image!r} is in none of {folder}/train, {folder}/test, as "
            f"{'/'.join(image[:3])}/{image}.jpg or {image}.jpg ({len(missing)} such lines)"
        )
    return list(zip(map(str, places), table["class"].tolist(), strict=True))


def _place(folder: Path, image: str, parts: Sequence[str]) -> str | None:
    """Returns the path of an image below ``folder``, in the first of its folders ``parts`` that has it, or None if
    there is no such image."""
    # an id is the name of a file and nothing else, so that a table can't lead out of the folder
    if "/" in image or "\\" in image or image in (".", ".."):
        return None
    for part in parts:
        for suffix in ENDINGS:
            for below in ("/".join([part, *image[:3], image]), f"{part}/{image}"):
                if (folder / (below + suffix)).is_file():
                    return below + suffix
    return None
