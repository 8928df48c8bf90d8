"""CIFAR-10 and CIFAR-100 in the publisher's binary or python layout, found on this machine or downloaded.

A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedray.data.sources.find import Layout, find_files, reading
from fedray.data.sources.source import Source
from fedray.errors import UserError

PIXELS = 3 * 32 * 32
MEAN = np.array([0.4914, 0.4822, 0.4465])
"""The mean of CIFAR-10's pixels/255 (red, green, blue)."""

OF_EITHER = {
    "ghbm": (MEAN, np.array([0.2023, 0.1994, 0.2010])),
    "unit": (np.zeros(3), np.ones(3)),
}
OF_TEN = {"default": (MEAN, np.array([0.2470, 0.2435, 0.2616])), **OF_EITHER}
OF_HUNDRED = {"default": (np.array([0.5071, 0.4865, 0.4409]), np.array([0.2673, 0.2564, 0.2762])), **OF_EITHER}
"""The mean and standard deviation of pixels/255 for each value of ``data.normalization``.

The standard deviations of ``ghbm`` are computed as in many programs: as the mean, over images, of the standard
deviation within an image.
"""


class Cifar(NamedTuple):
    """How CIFAR-10 or CIFAR-100 is published: the names of its files and folders, and its labels.

    Args:
        name: the name of the source in fedray.
        torchvision: the name of the data set's class in torchvision.
        parts: the names of its files without endings, with the test file last.
        binary, python: the folders of its binary layout and of its python layout.
        classes: the number of classes for each label of an image; CIFAR-100 has a coarse and a fine label.
        keys: the names of these labels in the python layout.
    """

    name: str
    torchvision: str
    parts: tuple[str, ...]
    binary: str
    python: str
    classes: tuple[int, ...]
    keys: tuple[str, ...]


TEN = Cifar(
    "cifar10", "CIFAR10", (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"), "cifar-10-batches-bin",
    "cifar-10-batches-py", (10,), ("labels",),
)  # fmt: skip
HUNDRED = Cifar(
    "cifar100", "CIFAR100", ("train", "test"), "cifar-100-binary", "cifar-100-python", (20, 100),
    ("coarse_labels", "fine_labels"),
)  # fmt: skip


def cifar10(root: str | None, normalization: str = "default") -> Source:
    """Loads CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, uint8 [3, 32, 32], in 10 classes.

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine, or else downloaded.
        normalization: how pixels are scaled (``data.normalization``): ``default``, ``unit`` or ``ghbm``.
    """
    return _load(TEN, root, 0, *OF_TEN[normalization])


def cifar100(root: str | None, variant: str, normalization: str = "default") -> Source:
    """Loads CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images, uint8 [3, 32, 32].

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine, or else downloaded.
        variant: the labels that are used as classes: ``fine`` (100 classes) or ``coarse`` (20).
        normalization: how pixels are scaled (``data.normalization``): ``default``, ``unit`` or ``ghbm``.
    """
    return _load(HUNDRED, root, ("coarse", "fine").index(variant), *OF_HUNDRED[normalization])


def _load(published: Cifar, root: str | None, label: int, mean: np.ndarray, std: np.ndarray) -> Source:
    """Loads CIFAR-10 or CIFAR-100. ``label`` is the position, among an image's labels, of the one that is used as
    its class."""

    def download(folder: Path) -> None:
        from torchvision import datasets

        kind = getattr(datasets, published.torchvision)
        # torchvision's download=True would also unpickle the files
        datasets.utils.download_and_extract_archive(kind.url, str(folder), filename=kind.filename, md5=kind.tgz_md5)

    binary = Layout((published.binary, "."), tuple(f"{part}.bin" for part in published.parts))
    found = find_files(
        published.name, root, [binary, Layout((published.python, "."), published.parts)],
        f"the files {binary.files[0]}, ..., {binary.files[-1]} (or those of the python version)",
        "https://www.cs.toronto.edu/~kriz/cifar.html", download,
    )  # fmt: skip
    *train, (x_test, y_test) = (read_batch(published, path) for path in found.paths)
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    classes = published.classes[label]
    return Source(
        published.name, x_train, y_train[:, label], x_test, y_test[:, label], classes, scale, shift, files=found.stamps
    )


def read_batch(published: Cifar, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images and labels in one file of CIFAR-10 or CIFAR-100.

    ``published`` says which of the two it is. The file ``path`` is in the publisher's binary layout if its name ends
    with ``.bin``, and otherwise in the python (pickled) layout. Returns the images, uint8 [n, 3, 32, 32], and their
    labels, int64 [n, kinds], where ``kinds`` is 1 for CIFAR-10 and 2 (coarse, fine) for CIFAR-100. Raises
    :class:`UserError`, which names the file, if it can't be read or holds anything else.
    """
    with reading(path, f"batch of CIFAR-{max(published.classes)}", Exception):  # a damaged pickle can raise any error
        content = path.read_bytes()
        if path.suffix == ".bin":
            # each record has one byte for each label, and 3072 for the image
            kinds = len(published.classes)
            records = np.frombuffer(content, np.uint8).reshape(-1, kinds + PIXELS)
            x, labels = records[:, kinds:], records[:, :kinds].T.tolist()
        else:
            x, labels = _unpickled(published, content)
        if not len(x):
            raise ValueError("it has no images")
    for column, classes in zip(labels, published.classes, strict=True):
        for row, label in enumerate(column):
            if type(label) is not int or label not in range(classes):
                raise UserError(f"{path} has label {reprlib.repr(label)} in row {row}; labels must be 0..{classes - 1}")
    return x.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64).T


class _Call:
    """A stand-in for a numpy function that a pickle calls. It only keeps the arguments of the call.

    Not even numpy's own functions are called: a pickled dtype can make them take bytes for addresses.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that only makes plain values, and a :class:`_Call` for each numpy array.

    A file that names anything else is refused, because a pickle can call any function that it names.
    """

    def find_class(self, module: str, name: str) -> type[_Call]:
        if f"{module}.{name}" not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"it names {f'{module}.{name}'[:100]!r}, which no published file does")
        return _Call


def _unpickled(published: Cifar, content: bytes) -> tuple[np.ndarray, list[list[Any]]]:
    """Reads the python layout: a dict, pickled by Python 2, with an array ``data`` and lists of labels.

    Raises an error of any type if the content is anything else.
    """
    stream = io.BytesIO(content)
    batch = _Unpickler(stream, encoding="bytes").load()
    if not isinstance(batch, dict) or not all(key.encode() in batch for key in ("data", *published.keys)):
        raise ValueError(f"it is no dict of data, {' and '.join(published.keys)}")
    labels = [batch[key.encode()] for key in published.keys]
    match batch[b"data"]:
        case _Call(state=(_, (images, columns), _Call(arguments=(b"u1", *_)), False, bytes(pixels))):
            if columns != PIXELS or any(not isinstance(column, list) or len(column) != images for column in labels):
                raise ValueError("its images are not equally many as its labels")
        case _:
            raise ValueError("its data are no numpy array of bytes by rows")
    if stream.read(1):
        raise ValueError("it has extra bytes at its end")
    return np.frombuffer(pixels, np.uint8).reshape(images, PIXELS), labels
