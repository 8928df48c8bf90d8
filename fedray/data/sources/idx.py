"""MNIST and Fashion-MNIST, which are published as idx files, and the sample inside the package."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedray.data.sources.find import PartlyThere, download_into, file_stamp, find_files
from fedray.data.sources.source import Source
from fedray.errors import UserError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class IdxSet(NamedTuple):
    """A data set of idx files.

    It has the name of its folder, which is that of its class in torchvision too, the mean and deviation of its
    pixels/255, the address of its publisher, and the folders in which a system's package puts it.
    """

    folder: str
    mean: float
    deviation: float
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
    """Loads MNIST (LeCun et al. 1998): 60,000 + 10,000 images [1, 28, 28], 10 classes."""
    return _load("mnist", find("mnist", root))


def fashion_mnist(root: str | None) -> Source:
    """Loads Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 images [1, 28, 28], 10 classes."""
    return _load("fashion_mnist", find("fashion_mnist", root))


def sample() -> Source:
    """Loads 1,000 + 200 images of each class of Fashion-MNIST that come with the package (see ``sample/make.py``)."""
    source = _load("fashion_mnist", _files(Path(__file__).parent.parent / "sample"))
    return Source(**{**vars(source), "name": "sample"})


def _load(name: str, paths: dict[str, Path]) -> Source:
    missing = [file for file in FILES if file not in paths]
    if missing:
        raise UserError(f"{name}: the files {', '.join(missing)} are missing")
    files = tuple(file_stamp(paths[file]) for file in FILES)
    x_train, y_train = read_pair(paths[FILES[0]], paths[FILES[1]])
    x_test, y_test = read_pair(paths[FILES[2]], paths[FILES[3]])
    constants = SETS[name]
    scale = np.array([1 / (255 * constants.deviation)], dtype=np.float32)
    shift = np.array([-constants.mean / constants.deviation], dtype=np.float32)
    return Source(name, x_train, y_train, x_test, y_test, 10, scale, shift, files=files)


def read_pair(images: Path, labels: Path, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Reads images uint8 [n, 1, height, width] and labels int64 [n] in 0..classes-1 from two idx files.

    Raises :class:`UserError`, which names the file, if it holds anything else.
    """
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3:
        hint = ": are the image and the label file swapped?" if x.ndim == 1 else ""
        raise UserError(f"{images} holds {_content(x)}, not images [n, height, width]{hint}")
    if y.ndim != 1:
        hint = ": are the image and the label file swapped?" if y.ndim == 3 else ""
        raise UserError(f"{labels} holds {_content(y)}, not labels [n]{hint}")
    if len(x) != len(y):
        raise UserError(f"{images} holds {len(x)} images, but {labels} {len(y)} labels")
    if not len(x):
        raise UserError(f"{images} holds no images")
    if y.max() >= classes:
        row = int(np.argmax(y >= classes))
        raise UserError(f"{labels} has label {y[row]} in row {row}; labels must be 0..{classes - 1}")
    return x[:, None], y.astype(np.int64)


def _content(array: np.ndarray) -> str:
    names = {1: "labels", 3: "images"}
    return f"{names.get(array.ndim, 'an array')} of shape {list(array.shape)}"


def read_idx(path: Path) -> np.ndarray:
    """Reads the uint8 array in an idx file, which may be gzipped, whatever its name says.

    torchvision reads idx files too, but it takes no gzipped ones, stops at a damaged file with an assertion that does
    not say what is wrong, and needs torch, which no other source does.

    Format: two zero bytes, a type byte (8: unsigned byte), the number of dimensions, their sizes as big-endian 32-bit
    numbers, then the data (LeCun, MNIST page).

    Raises :class:`UserError`, which names the file, if it is anything else.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except EOFError:
        raise UserError(f"{path} is truncated: its gzip stream ends too early; get the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}); get the file again") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or not 1 <= content[3] <= 8:
        raise UserError(f"{path} is not an idx file: it begins with {content[:4].hex(' ') or 'nothing'}")
    if content[2] != 8:
        raise UserError(f"{path} holds idx type 0x{content[2]:02x}; images and labels are unsigned bytes (0x08)")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise UserError(f"{path} is truncated: {len(content)} bytes, less than its header of {header}")
    shape = [int(size) for size in np.frombuffer(content, ">u4", content[3], offset=4)]
    promised, found = math.prod(shape), len(content) - header
    if found != promised:
        problem = "is truncated" if found < promised else "has extra bytes at its end"
        raise UserError(f"{path} {problem}: {found} bytes of data where its header {shape} promises {promised}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def find(name: str, root: str | None) -> dict[str, Path]:
    """Returns the paths of the four files of the data set ``name``, in one of the places in which :func:`find_files`
    looks."""
    return find_files(
        name,
        root,
        look=lambda place: _look(name, place),
        download=lambda cache: _download(SETS[name].folder, cache),
        wanted=f"{FILES[0]}.gz and its three companions",
        address=SETS[name].address,
        system=SETS[name].system,
    )


def _look(name: str, place: Path) -> dict[str, Path]:
    found, folder = max(((_files(folder), folder) for folder in _folders(name, place)), key=lambda pair: len(pair[0]))
    for file in FILES:
        if file not in found:
            raise (PartlyThere if found else UserError)(
                f"data.root={place} lacks {file} or {file}.gz"
                + (f" (its companions are in {folder})" if found else f" (nor is it in raw or {SETS[name].folder}/raw)")
            )
    return found


def _folders(name: str, place: Path) -> list[Path]:
    return [place / SETS[name].folder / "raw", place / "raw", place]


def _files(folder: Path) -> dict[str, Path]:
    """Returns the paths of those of the four files that are in ``folder``, by the files' names without ``.gz``."""
    found: dict[str, Path] = {}
    for file in FILES:
        for path in (folder / f"{file}.gz", folder / file):
            if path.is_file():
                found.setdefault(file, path)
    return found


def _download(folder: str, cache: Path) -> None:
    """Downloads the files through torchvision, which also checks their checksums."""

    def fetch(scratch: Path) -> list[Path]:
        from torchvision import datasets

        getattr(datasets, folder)(str(scratch), download=True)
        return list(_files(scratch / folder / "raw").values())

    download_into(cache, f"{folder}/raw", fetch)
