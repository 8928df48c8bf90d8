"""EMNIST in the publisher's idx files, and FEMNIST, which is EMNIST by class with its writers, in LEAF's json files.

G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST: Extending MNIST to Handwritten Letters. IJCNN 2017.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.normalization import of_choice
from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import PartlyThere, download_into, file_stamp, find_files
from fedray.data.sources.idx import read_pair
from fedray.data.sources.leaf import LEAF, leaf_files, read_leaf
from fedray.data.sources.source import Source
from fedray.errors import UserError

BY_CLASS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
"""The classes of ``balanced`` and ``bymerge``. Capital and small letters that look alike are one class."""

FOLDERS = ("EMNIST/raw", "EMNIST", "raw", "gzip", ".")
"""Where in ``data.root`` the files may be: as torchvision and as the publisher's archive lay them out."""


def emnist(root: str | None, variant: str) -> Source:
    """Loads the division ``variant`` (``data.variant``) of EMNIST: images uint8 [1, 28, 28], upright.

    The published files have rows and columns of the images exchanged, which is undone here. Scale and shift are made of
    the mean and deviation of the training samples. Raises :class:`UserError` for files that are missing or damaged.
    """
    if variant == "femnist":
        fields = _femnist(root)
    else:
        fields = _published(root, variant.removesuffix("_test"), variant.endswith("_test"))
    return Source(name="emnist", **fields, **of_choice("standard", "emnist", fields["x_train"]))


def _published(root: str | None, split: str, only_tests: bool) -> dict[str, Any]:
    names = MERGED if split in ("balanced", "bymerge") else BY_CLASS
    parts = ("test",) if only_tests else ("train", "test")
    paths = find_files(
        "emnist",
        root,
        look=lambda place: _look(place, split, parts),
        download=lambda cache: _download(cache, split),
        wanted=f"{_files(split, parts[0])[0]}.gz and its companions",
        address="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    )
    sets = {part: read_pair(*paths[part], classes=len(names)) for part in parts}
    sets = {part: (x.swapaxes(2, 3), y) for part, (x, y) in sets.items()}
    notes: tuple[str, ...] = ()
    if only_tests:
        sets, notes = _halves(*sets["test"]), ("of each class, every fifth image is a test image",)
    return {
        **{f"{axis}_{part}": array for part, pair in sets.items() for axis, array in zip("xy", pair, strict=True)},
        "classes": len(names), "class_names": names, "notes": notes,
        "files": tuple(file_stamp(path) for pair in paths.values() for path in pair),
    }  # fmt: skip


def _halves(x: np.ndarray, y: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Divides samples into training and test ones, of which every fifth of a class is a test sample."""
    tests = np.zeros(len(y), dtype=bool)
    for each in np.unique(y):
        tests[np.flatnonzero(y == each)[HELD_OUT - 1 :: HELD_OUT]] = True
    return {"train": (x[~tests], y[~tests]), "test": (x[tests], y[tests])}


def _files(split: str, part: str) -> tuple[str, str]:
    return f"emnist-{split}-{part}-images-idx3-ubyte", f"emnist-{split}-{part}-labels-idx1-ubyte"


def _look(place: Path, split: str, parts: tuple[str, ...]) -> dict[str, tuple[Path, Path]]:
    """Returns the paths of images and labels of each part, of which all are below the same folder."""
    wanted = [(part, file) for part in parts for file in _files(split, part)]
    best: dict[tuple[str, str], Path] = {}
    for folder in FOLDERS:
        there = [place / folder / f"{file}{end}" for _, file in wanted for end in (".gz", "")]
        found = {
            (part, file): path for part, file in wanted for path in there
            if path.name.removesuffix(".gz") == file and path.is_file()
        }  # fmt: skip
        best = max(best, found, key=len)
    for key in wanted:
        if key not in best:
            others = sorted({path.name for folder in FOLDERS for path in (place / folder).glob("emnist-*images*")})
            hint = f" (there is {', '.join(others)}: see data.variant)" if others and not best else ""
            raise (PartlyThere if others else UserError)(f"data.root={place} lacks {key[1]}.gz{hint}")
    return {part: tuple(best[part, file] for file in _files(split, part)) for part in parts}  # type: ignore[misc]


def _download(cache: Path, split: str) -> None:
    """Downloads the archive through torchvision, which also checks its checksum."""

    def fetch(scratch: Path) -> list[Path]:
        from torchvision.datasets import EMNIST

        EMNIST(str(scratch), split=split, download=True)
        return sorted((scratch / "EMNIST" / "raw").glob("emnist-*ubyte"))

    download_into(cache, "EMNIST/raw", fetch)


def _femnist(root: str | None) -> dict[str, Any]:
    """Reads FEMNIST, of which LEAF's images have ink as 0 and paper as 1; each writer is a client."""
    files = find_files(
        "femnist",
        root,
        look=lambda place: leaf_files(place / "femnist" if (place / "femnist").is_dir() else place),
        download=None,
        wanted="the json files that LEAF's data/femnist/preprocess.sh writes (folder data with train and test)",
        address=LEAF,
    )

    def encode(x: list[Any], y: list[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
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

    train, test, stamps, notes = read_leaf(files, encode)
    return {
        "x_train": train[0], "y_train": train[1], "client_train": train[2], "x_test": test[0], "y_test": test[1],
        "client_test": test[2], "classes": len(BY_CLASS), "class_names": BY_CLASS, "files": stamps, "notes": notes,
    }  # fmt: skip
