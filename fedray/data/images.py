"""Image files, which are read when they are used."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from fedray.errors import UserError, first_sentence

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".JPEG", ".JPG")
"""The endings of file names that count as images."""


class ImageFiles:
    """A Dataset of image files ``paths`` below the folder ``root``, with a target for each.

    An item's input is uint8 ``[3, size, size]``: the image as red, green and blue, scaled so that it just covers the
    square, and cropped in the middle. Several threads may read items at the same time (``parallel``).
    """

    parallel = True

    def __init__(self, root: Path, paths: Sequence[str], targets: np.ndarray, size: int) -> None:
        self.root, self.paths, self.targets, self.size = root, np.array(paths, dtype=np.str_), targets, size

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        """Returns a digest of the names and sizes of all files, and of the size to which images are scaled."""
        return self._digests[0]

    def stamp(self) -> str:
        """Returns a digest of the times of all files, which tell whether one was written since."""
        return self._digests[1]

    @cached_property
    def _digests(self) -> tuple[str, str]:
        sizes, times = hashlib.sha256(f"{self.size}".encode()), hashlib.sha256()
        for path in self.paths:
            found = (self.root / str(path)).stat()
            sizes.update(f"{path} {found.st_size}\n".encode())
            times.update(f"{found.st_mtime_ns} {found.st_ctime_ns}\n".encode())
        return sizes.hexdigest(), times.hexdigest()

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return read_image(self.root / str(self.paths[i]), self.size), int(self.targets[i])


def read_image(path: Path, size: int) -> np.ndarray:
    """Returns an image as uint8 ``[3, size, size]``.

    Raises :class:`UserError`, which names the file, if it is missing, cut short, no image, or an image of so many
    pixels that it would fill the memory (Pillow's limit).
    """
    return decode_image(path, str(path), size)


def decode_image(file: Path | BinaryIO, name: str, size: int | None) -> np.ndarray:
    """Returns the image in a file, which messages call ``name``, as uint8 ``[3, size, size]``, and as it is without a
    ``size``. Raises :class:`UserError` as :func:`read_image` does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                if size is not None:
                    # a JPEG is decoded at a half, a quarter or an eighth of its size if that is enough
                    image.draft("RGB", (size, size))
                fitted = image.convert("RGB")
                if size is not None:
                    fitted = ImageOps.fit(fitted, (size, size), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        raise UserError(f"there is no file {name}") from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{name} is not an image that Pillow knows") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name} can't be read as an image: {first_sentence(error)}") from None
    return np.ascontiguousarray(np.asarray(fitted).transpose(2, 0, 1))
