"""EMNIST in the publisher's idx files, and FEMNIST (EMNIST by class, with the writers as clients) in LEAF's json files.

G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST: Extending MNIST to Handwritten Letters. IJCNN 2017.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.normalization import of_choice
from fedray.data.sources.columns import held_out
from fedray.data.sources.find import Layout, find_files
from fedray.data.sources.idx import read_pair
from fedray.data.sources.leaf import read_leaf
from fedray.data.sources.source import Source
from fedray.errors import UserError

BY_CLASS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
"""The classes of ``balanced`` and ``bymerge``. Capital and small letters that look alike are one class."""

FOLDERS = ("EMNIST/raw", "EMNIST", "raw", "gzip", ".")
"""The folders below ``data.root`` in which the files may be. torchvision and the publisher's archive use different
ones."""


def emnist(root: str | None, variant: str) -> Source:
    """Loads EMNIST, handwritten digits and letters: images uint8 [1, 28, 28], upright, in 47 or 62 classes.

    In the published files each image is transposed; this is undone here. Inputs are scaled by the mean and standard
    deviation of the training samples. Raises :class:`UserError` for files that are missing or damaged.

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine, or else downloaded; those
            of ``femnist`` are never downloaded.
        variant: which part of EMNIST to load (``data.variant``): ``balanced``, ``bymerge``, ``byclass``,
            ``bymerge_test``, or ``femnist``, in which each writer is a client.
    """
    if variant == "femnist":
        names, fields = BY_CLASS, read_leaf("femnist", root, _encode)
    else:
        names = MERGED if variant in ("balanced", "bymerge", "bymerge_test") else BY_CLASS
        fields = _published(root, variant.removesuffix("_test"), variant.endswith("_test"), len(names))
    scaling = of_choice("standard", "emnist", fields["x_train"])
    return Source(name="emnist", classes=len(names), class_names=names, **fields, **scaling)


def _published(root: str | None, split: str, only_tests: bool, classes: int) -> dict[str, Any]:
    def download(folder: Path) -> None:
        from torchvision.datasets import EMNIST

        EMNIST(str(folder), split=split, download=True)

    parts = ("test",) if only_tests else ("train", "test")
    kinds = ("images-idx3", "labels-idx1")
    files = tuple(f"emnist-{split}-{part}-{kind}-ubyte" for part in parts for kind in kinds)
    layout = Layout(FOLDERS, files, related="emnist-*images*")
    found = find_files(
        "emnist", root, [layout], f"{files[0]}.gz and its companions",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset", download, hint=": see data.variant",
    )  # fmt: skip
    sets = [read_pair(*pair, classes=classes) for pair in zip(found.paths[::2], found.paths[1::2], strict=True)]
    if only_tests:
        ((x, y),) = sets
        tests = held_out(len(y), y)
        sets = [(x[~tests], y[~tests]), (x[tests], y[tests])]
    (x, y), (x_test, y_test) = sets
    notes = ("of each class, every fifth image is a test image",) if only_tests else ()
    upright = {"x_train": x.swapaxes(2, 3), "x_test": x_test.swapaxes(2, 3)}
    return {**upright, "y_train": y, "y_test": y_test, "notes": notes, "files": found.stamps}


def _encode(x: list[Any], y: list[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and labels of one writer of FEMNIST. In LEAF's images ink is 0 and paper is 1."""
    try:
        images, labels = np.array(x, np.float64), np.array(y)
    except (ValueError, TypeError):
        images, labels = np.zeros(0), np.zeros(0, np.int64)
    if images.shape != (len(y), 784) or not ((images >= 0) & (images <= 1)).all():
        raise UserError(f"{where} must have images of 784 numbers from 0 to 1")
    if labels.shape != (len(y),) or labels.dtype.kind != "i":
        raise UserError(f"{where} must have whole numbers as labels")
    if labels.min() < 0 or labels.max() >= len(BY_CLASS):
        raise UserError(f"{where} has label {labels[(labels < 0) | (labels > 61)][0]}; labels must be 0..61")
    return np.rint(255 * images).astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)
