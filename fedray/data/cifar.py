"""CIFAR-10 in the publisher's binary or python layout, found on this machine or downloaded.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.find import download_into, file_stamp, find_files
from fedray.data.source import Source
from fedray.errors import UserError, first_sentence

PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
BINARY, PYTHON = "cifar-10-batches-bin", "cifar-10-batches-py"
PIXELS = 3 * 32 * 32
MEAN = np.array([0.4914, 0.4822, 0.4465])  # of pixels/255: red, green, blue
DEVIATIONS = {"default": np.array([0.2470, 0.2435, 0.2616]), "ghbm": np.array([0.2023, 0.1994, 0.2010])}
"""The deviations of pixels/255 for each value of ``data.normalization``.

Those of ``ghbm`` are computed as many programs do: each is the mean, over the images, of an image's own deviation.
"""


def cifar10(root: str | None, normalization: str = "default") -> Source:
    """Loads CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 images [3, 32, 32], 10 classes."""
    paths = find(root)
    files = tuple(map(file_stamp, paths))
    *train, (x_test, y_test) = map(read_batch, paths)
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    deviation = DEVIATIONS[normalization]
    scale, shift = (1 / (255 * deviation)).astype(np.float32), (-MEAN / deviation).astype(np.float32)
    return Source("cifar10", x_train, y_train, x_test, y_test, 10, scale, shift, files=files)


def find(root: str | None) -> list[Path]:
    """Returns the paths of the six files, training first, in one of the places in which :func:`find_files` looks."""
    return find_files(
        "cifar10",
        root,
        look=_look,
        download=_download,
        wanted=f"{PARTS[0]}.bin (or {PARTS[0]} of the python version) and its five companions",
    )


def _look(place: Path) -> list[Path]:
    binary = [[folder / f"{part}.bin" for part in PARTS] for folder in (place / BINARY, place)]
    python = [[folder / part for part in PARTS] for folder in (place / PYTHON, place)]
    best = max([*binary, *python], key=lambda paths: sum(path.is_file() for path in paths))
    missing = [path.name for path in best if not path.is_file()]
    if len(missing) == len(PARTS):
        raise UserError(f"data.root={place} lacks {PARTS[0]}.bin or {PARTS[0]} (nor are they in {BINARY} or {PYTHON})")
    if missing:
        raise UserError(f"data.root={place} lacks {missing[0]} (its companions are in {best[0].parent})")
    return best


def _download(cache: Path) -> None:
    """Downloads the files through torchvision, which also checks their checksums."""

    def fetch(scratch: Path) -> list[Path]:
        from torchvision.datasets import CIFAR10, utils

        # CIFAR10(download=True) would also unpickle them
        utils.download_and_extract_archive(CIFAR10.url, str(scratch), filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        return [scratch / PYTHON / part for part in PARTS]

    download_into(cache, PYTHON, fetch)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images uint8 [n, 3, 32, 32] and labels int64 [n] in 0..9 from a file of CIFAR-10, which may have the binary
    layout or that of pickled Python objects.

    Raises :class:`UserError`, which names the file, if it can't be read or holds anything else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    x, labels = (_read_binary if path.suffix == ".bin" else _read_pickled)(path, content)
    if not len(x):
        raise UserError(f"{path} holds no images")
    for row, label in enumerate(labels):
        if type(label) is not int or label not in range(10):
            raise UserError(f"{path} has label {reprlib.repr(label)} in row {row}; labels must be 0..9")
    return x.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _read_binary(path: Path, content: bytes) -> tuple[np.ndarray, list[int]]:
    """Reads the binary layout: records of one byte for the label and 3072 for the image."""
    record = 1 + PIXELS
    if len(content) % record:
        raise UserError(
            f"{path} is truncated or has extra bytes: {len(content)} bytes are no whole number of records of {record}; "
            "get the file again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0].tolist()


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


def _read_pickled(path: Path, content: bytes) -> tuple[np.ndarray, list[Any]]:
    """Reads the python layout: a dict, pickled by Python 2, with an array ``data`` and a list ``labels``."""
    try:
        stream = io.BytesIO(content)
        batch = _Unpickler(stream, encoding="bytes").load()
        if stream.read(1):
            raise ValueError("it has extra bytes at its end")
    except Exception as error:  # a damaged pickle can lead to any
        reason = first_sentence(error)
        raise UserError(f"{path} is damaged or no batch of CIFAR-10 ({reason}); get the file again") from None
    if not isinstance(batch, dict):
        raise UserError(f"{path} holds a pickled {type(batch).__name__}, not a dict of data and labels")
    for key in (b"data", b"labels"):
        if key not in batch:
            raise UserError(f"{path} lacks {key.decode()}: it is no batch of CIFAR-10")
    labels = batch[b"labels"]
    if not isinstance(labels, list):
        raise UserError(f"{path}: labels is of type {type(labels).__name__}, not a list")
    match batch[b"data"]:
        case _Call(state=(_, shape, _Call(arguments=(code, *_)), False, bytes(pixels))):
            pass
        case _:
            raise UserError(f"{path}: data is not a numpy array of bytes by rows")
    if code != b"u1":
        raise UserError(f"{path}: data is of type {reprlib.repr(code)}, not unsigned bytes (b'u1')")
    if shape != (len(labels), PIXELS):
        raise UserError(f"{path}: data has shape {reprlib.repr(shape)}; its labels promise {(len(labels), PIXELS)}")
    if len(pixels) != len(labels) * PIXELS:
        raise UserError(f"{path}: data holds {len(pixels)} bytes where its shape promises {len(labels) * PIXELS}")
    return np.frombuffer(pixels, np.uint8).reshape(-1, PIXELS), labels
