"""MNIST and Fashion-MNIST, which are published as idx files, and the sample that comes with the package."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedray.data.sources.find import Found, Layout, find_files, look, reading
from fedray.data.sources.source import Source
from fedray.errors import UserError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class IdxSet(NamedTuple):
    """What is known about a data set that is published as idx files (a format for arrays of bytes), such as MNIST.

    Args:
        folder: the name of its folder, and of its class in torchvision.
        mean, std: the mean and standard deviation of its pixels/255.
        address: the web address of its publisher.
        system: the folders in which packages of an operating system install it.
    """

    folder: str
    mean: float
    std: float
    address: str
    system: tuple[str, ...] = ()


SETS = {
    "mnist": IdxSet("MNIST", 0.1307, 0.3081, "http://yann.lecun.com/exdb/mnist"),
    "fashion_mnist": IdxSet(
        "FashionMNIST",
        0.2860,
        0.3530,
        "https://github.com/zalandoresearch/fashion-mnist",
        # where Debian's package dataset-fashion-mnist puts it
        ("/usr/share/datasets/fashion-mnist",),
    ),
}


def mnist(root: str | None) -> Source:
    """Loads MNIST (LeCun et al. 1998): 60,000 training and 10,000 test images, uint8 [1, 28, 28], in 10 classes.

    ``root`` is the folder with the files. If it is None, they are looked for on this machine, or else downloaded.
    """
    return _load("mnist", "mnist", find("mnist", root))


def fashion_mnist(root: str | None) -> Source:
    """Loads Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images, uint8 [1, 28, 28], in 10 classes.

    ``root`` is the folder with the files. If it is None, they are looked for on this machine, or else downloaded.
    """
    return _load("fashion_mnist", "fashion_mnist", find("fashion_mnist", root))


def sample() -> Source:
    """Loads the small data set that comes with fedray, which is a part of Fashion-MNIST.

    It has 1,000 training and 200 test images of each of the 10 classes, uint8 [1, 28, 28]. They were chosen at random
    by ``fedray/data/sample/make.py``.
    """
    folder = Path(__file__).parent.parent / "sample"
    return _load("sample", "fashion_mnist", look(folder, [Layout((".",), FILES)]))


def find(name: str, root: str | None) -> Found:
    """Finds the four files of MNIST or Fashion-MNIST on this machine, or downloads them.

    The result has the files of the training images, training labels, test images and test labels, in this order.
    ``name`` is ``mnist`` or ``fashion_mnist``. ``root`` is the only folder that is searched, unless it is None.
    """

    def download(folder: Path) -> None:
        from torchvision import datasets

        getattr(datasets, SETS[name].folder)(str(folder), download=True)

    layout = Layout((f"{SETS[name].folder}/raw", "raw", "."), FILES)
    wanted = f"{FILES[0]}.gz and its three companions"
    return find_files(name, root, [layout], wanted, SETS[name].address, download, SETS[name].system)


def _load(name: str, published: str, found: Found) -> Source:
    images, labels, test_images, test_labels = found.paths
    (x, y), (x_test, y_test) = read_pair(images, labels), read_pair(test_images, test_labels)
    constants = SETS[published]
    scale = np.array([1 / (255 * constants.std)], dtype=np.float32)
    shift = np.array([-constants.mean / constants.std], dtype=np.float32)
    return Source(name, x, y, x_test, y_test, 10, scale, shift, files=found.stamps)


def read_pair(images: Path, labels: Path, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Reads labelled images from two idx files (the format of MNIST), one with the images and one with their labels.

    Returns the images, uint8 [n, 1, height, width], and the labels, int64 [n]. Raises :class:`UserError`, which names
    the file, if a file holds anything else, or a label outside 0..classes-1.
    """
    x, y = read_idx(images), read_idx(labels)
    if (x.ndim, y.ndim) != (3, 1) or len(x) != len(y) or not len(x):
        raise UserError(
            f"{images} holds an array {list(x.shape)} and {labels} one {list(y.shape)}, not images [n, height, width] "
            "and labels [n]: are files swapped?"
        )
    if y.max() >= classes:
        row = int(np.argmax(y >= classes))
        raise UserError(f"{labels} has label {y[row]} in row {row}; labels must be 0..{classes - 1}")
    return x[:, None], y.astype(np.int64)


def read_idx(path: Path) -> np.ndarray:
    """Reads the uint8 array in an idx file, whether it is gzipped or not.

    torchvision can't read gzipped idx files, and it stops at a damaged file with an assertion that does not say what is
    wrong. The format is two zero bytes, a type byte (8: unsigned byte), the number of dimensions, their sizes as
    big-endian 32-bit numbers, then the data (LeCun, MNIST page).

    Raises :class:`UserError`, which names the file, if it has another format.
    """
    with reading(path, "idx file", EOFError, OSError, zlib.error):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        start = content[:4].hex(" ") or "nothing"
        raise UserError(f"{path} is no idx file of unsigned bytes: it begins with {start}; get the file again")
    shape: list[int] = np.frombuffer(content, ">u4", content[3], offset=4).tolist()
    data = content[4 + 4 * len(shape) :]
    if len(data) != math.prod(shape):
        raise UserError(f"{path} has {len(data)} bytes of data where its header {shape} promises {math.prod(shape)}")
    return np.frombuffer(data, np.uint8).reshape(shape)
