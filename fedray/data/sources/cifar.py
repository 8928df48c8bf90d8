"""CIFAR-10 and CIFAR-100 in the publisher's binary or python layout, found on this machine or downloaded.

A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedray.data.sources.find import PartlyThere, download_into, file_stamp, find_files
from fedray.data.sources.source import Source
from fedray.errors import UserError, first_sentence

PIXELS = 3 * 32 * 32
MEAN = np.array([0.4914, 0.4822, 0.4465])
"""The mean of CIFAR-10's pixels/255 (red, green, blue)."""

OF_EITHER = {
    "ghbm": (MEAN, np.array([0.2023, 0.1994, 0.2010])),
    "unit": (np.zeros(3), np.ones(3)),
}
OF_TEN = {"default": (MEAN, np.array([0.2470, 0.2435, 0.2616])), **OF_EITHER}
OF_HUNDRED = {"default": (np.array([0.5071, 0.4865, 0.4409]), np.array([0.2673, 0.2564, 0.2762])), **OF_EITHER}
"""Mean and deviation of pixels/255 for each value of ``data.normalization``.

The deviations of ``ghbm`` are computed as many programs do: each is the mean, over the images, of an image's own
deviation.
"""


class Layout(NamedTuple):
    """How a data set is published: the name of its class in torchvision, its files (training first), the folders of
    its binary and its python layout, and the numbers of classes of each of the labels of an image; ``keys`` are their
    names in the python layout."""

    name: str
    torchvision: str
    parts: tuple[str, ...]
    binary: str
    python: str
    classes: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"CIFAR-{max(self.classes)}"

    @property
    def record(self) -> int:
        """The bytes of a record of the binary layout: labels, then pixels."""
        return len(self.classes) + PIXELS


TEN = Layout(
    "cifar10", "CIFAR10", (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"), "cifar-10-batches-bin",
    "cifar-10-batches-py", (10,), ("labels",),
)  # fmt: skip
HUNDRED = Layout(
    "cifar100", "CIFAR100", ("train", "test"), "cifar-100-binary", "cifar-100-python", (20, 100),
    ("coarse_labels", "fine_labels"),
)  # fmt: skip


def cifar10(root: str | None, normalization: str = "default") -> Source:
    """Loads CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 images [3, 32, 32], 10 classes."""
    return _load(TEN, root, 0, *OF_TEN[normalization])


def cifar100(root: str | None, variant: str, normalization: str = "default") -> Source:
    """Loads CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 images [3, 32, 32], 100 ``fine`` or 20 ``coarse`` classes
    (``variant``)."""
    return _load(HUNDRED, root, ("coarse", "fine").index(variant), *OF_HUNDRED[normalization])


def _load(layout: Layout, root: str | None, label: int, mean: np.ndarray, deviation: np.ndarray) -> Source:
    """Loads a data set. ``label`` says which of an image's labels is its class."""
    paths = find(layout, root)
    files = tuple(map(file_stamp, paths))
    *train, (x_test, y_test) = (read_batch(layout, path) for path in paths)
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    scale, shift = (1 / (255 * deviation)).astype(np.float32), (-mean / deviation).astype(np.float32)
    classes = layout.classes[label]
    return Source(layout.name, x_train, y_train[:, label], x_test, y_test[:, label], classes, scale, shift, files=files)


def find(layout: Layout, root: str | None) -> list[Path]:
    """Returns the paths of the files, training first, in one of the places in which :func:`find_files` looks."""
    first = layout.parts[0]
    companions = "its five companions" if layout is TEN else "test"
    return find_files(
        layout.name,
        root,
        look=partial(_look, layout),
        download=partial(_download, layout),
        wanted=f"{first}.bin (or {first} of the python version) and {companions}",
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
    )


def _look(layout: Layout, place: Path) -> list[Path]:
    binary = [[folder / f"{part}.bin" for part in layout.parts] for folder in (place / layout.binary, place)]
    python = [[folder / part for part in layout.parts] for folder in (place / layout.python, place)]
    best = max([*binary, *python], key=lambda paths: sum(path.is_file() for path in paths))
    missing = [path.name for path in best if not path.is_file()]
    if len(missing) == len(layout.parts):
        first = layout.parts[0]
        raise UserError(
            f"data.root={place} lacks {first}.bin or {first} (nor are they in {layout.binary} or {layout.python})"
        )
    if missing:
        raise PartlyThere(f"data.root={place} lacks {missing[0]} (its companions are in {best[0].parent})")
    return best


def _download(layout: Layout, cache: Path) -> None:
    """Downloads the files through torchvision, which also checks their checksums."""

    def fetch(scratch: Path) -> list[Path]:
        from torchvision import datasets

        published = getattr(datasets, layout.torchvision)
        # its own download=True would also unpickle the files
        datasets.utils.download_and_extract_archive(
            published.url, str(scratch), filename=published.filename, md5=published.tgz_md5
        )
        return [scratch / layout.python / part for part in layout.parts]

    download_into(cache, layout.python, fetch)


def read_batch(layout: Layout, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images uint8 [n, 3, 32, 32] and labels int64 [n, kinds] from a file, which may have the binary layout or
    that of pickled Python objects.

    Raises :class:`UserError`, which names the file, if it can't be read or holds anything else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    x, labels = (_read_binary if path.suffix == ".bin" else _read_pickled)(layout, path, content)
    if not len(x):
        raise UserError(f"{path} holds no images")
    for column, classes in zip(labels, layout.classes, strict=True):
        for row, label in enumerate(column):
            if type(label) is not int or label not in range(classes):
                raise UserError(f"{path} has label {reprlib.repr(label)} in row {row}; labels must be 0..{classes - 1}")
    return x.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64).T


def _read_binary(layout: Layout, path: Path, content: bytes) -> tuple[np.ndarray, list[list[int]]]:
    """Reads the binary layout: records of a byte for each label and 3072 for the image."""
    if len(content) % layout.record:
        raise UserError(
            f"{path} is truncated or has extra bytes: {len(content)} bytes are no whole number of records of "
            f"{layout.record}; get the file again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, layout.record)
    kinds = len(layout.classes)
    return records[:, kinds:], records[:, :kinds].T.tolist()


class _Call:
    """A stand-in for something of numpy that a pickle asks for, which keeps the arguments that numpy would have got."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes plain values, and a :class:`_Call` for each numpy array.

    A file that names anything else is refused, because a pickle may name any function to be called.
    """

    def find_class(self, module: str, name: str) -> type[_Call]:
        if f"{module}.{name}" not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it names {f'{module}.{name}'[:100]!r}, which no published file does")
        return _Call


def _read_pickled(layout: Layout, path: Path, content: bytes) -> tuple[np.ndarray, list[list[Any]]]:
    """Reads the python layout: a dict, pickled by Python 2, with an array ``data`` and lists of labels."""
    try:
        stream = io.BytesIO(content)
        batch = _Unpickler(stream, encoding="bytes").load()
        if stream.read(1):
            raise ValueError("it has extra bytes at its end")
    except Exception as error:  # a damaged pickle can lead to any
        reason = first_sentence(error)
        raise UserError(f"{path} is damaged or no batch of {layout.title} ({reason}); get the file again") from None
    if not isinstance(batch, dict):
        raise UserError(f"{path} holds a pickled {type(batch).__name__}, not a dict of data and labels")
    for key in ("data", *layout.keys):
        if key.encode() not in batch:
            raise UserError(f"{path} lacks {key}: it is no batch of {layout.title}")
    labels = [batch[key.encode()] for key in layout.keys]
    for key, column in zip(layout.keys, labels, strict=True):
        if not isinstance(column, list):
            raise UserError(f"{path}: {key} is of type {type(column).__name__}, not a list")
        if len(column) != len(labels[0]):
            raise UserError(f"{path} has {len(column)} {key} and {len(labels[0])} {layout.keys[0]}")
    images = len(labels[0])
    match batch[b"data"]:
        case _Call(state=(_, shape, _Call(arguments=(code, *_)), False, bytes(pixels))):
            pass
        case _:
            raise UserError(f"{path}: data is not a numpy array of bytes by rows")
    if code != b"u1":
        raise UserError(f"{path}: data is of type {reprlib.repr(code)}, not unsigned bytes (b'u1')")
    if shape != (images, PIXELS):
        raise UserError(f"{path}: data has shape {reprlib.repr(shape)}; its labels promise {(images, PIXELS)}")
    if len(pixels) != images * PIXELS:
        raise UserError(f"{path}: data holds {len(pixels)} bytes where its shape promises {images * PIXELS}")
    return np.frombuffer(pixels, np.uint8).reshape(-1, PIXELS), labels
