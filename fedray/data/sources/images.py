"""Reads image files, each of them only when it is used."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedray.data.storage.lazy import LazyItems
from fedray.errors import UserError, first_sentence

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".jp2", ".pbm", ".pgm", ".ppm")
"""The endings of file names that count as images, in small or capital letters."""

LOOKED_AT = 16
"""The number of images that are opened to find out whether a data set has images of 16 bits."""

DARK = 1 << 13
"""An eighth of white in 16 bits. Images with only smaller values probably use fewer than 16 bits for a pixel."""


def is_image(path: Path) -> bool:
    """Returns whether a file is an image by the ending of its name, such as ``.jpg``. The file is not opened."""
    return path.suffix.lower() in SUFFIXES


class ImageFiles:
    """A torch-like Dataset of the image files ``paths``, which are below the folder ``root``.

    Item i is a pair: image i as uint8 ``[3, size, size]`` (red, green, blue), and its label ``targets[i]``. ``targets``
    is int64 [n]. An image is scaled until it just covers the square, and cropped around the middle. Several threads may
    read items at the same time (``parallel``).
    """

    parallel = True

    def __init__(self, root: Path, paths: Sequence[str], targets: np.ndarray, size: int) -> None:
        self.root, self.paths, self.targets, self.size = root, np.array(paths, dtype=np.str_), targets, size

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        """Returns a hash of the names and sizes of all image files, and of the size to which images are scaled.

        It shows whether a run used other images. The content of the files is not read.
        """
        return self._digests[0]

    def stamp(self) -> str:
        """Returns a hash of the modification times of all image files. If it has changed, a file was written again, and
        a copy of the images that fedray keeps for fast reading must be made again."""
        return self._digests[1]

    @cached_property
    def _digests(self) -> tuple[str, str]:
        sizes, times = hashlib.sha256(f"{self.size}".encode()), hashlib.sha256()
        for path in self.paths:
            found = (self.root / str(path)).stat()
            sizes.update(f"{path} {found.st_size}\n".encode())
            times.update(f"{found.st_mtime_ns} {found.st_ctime_ns}\n".encode())
        return sizes.hexdigest(), times.hexdigest()

    def notes(self) -> tuple[str, ...]:
        """Returns messages for the user about images with 16 bits per channel: that they are scaled to 8 bits, and a
        warning if this makes them dark. There are none if no such images are found. Only some of the images are opened
        for this."""
        largest: dict[Path, int] = {}
        for i in np.unique(np.linspace(0, len(self) - 1, LOOKED_AT).astype(int)).tolist():
            path = self.root / str(self.paths[i])
            with opened_image(path, str(path)) as image:
                if _is_deep(image):
                    largest[path] = int(np.asarray(image).max())
        if not largest:
            return ()
        path, most = next(iter(largest)), max(largest.values())
        line = f"images of 16 bits, such as {path}, are scaled from 0..65535 to 0..255"
        if most >= DARK:
            return (line,)
        return (
            f"warning: {line}; of {len(largest)} that were looked at, the largest value is {most}, so that they become "
            f"dark: multiply them by {1 << (16 - max(1, most.bit_length()))}",
        )

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return read_image(self.root / str(self.paths[i]), self.size), int(self.targets[i])


def image_set(
    root: Path, labelled: Sequence[tuple[str, int]], size: int, name: str
) -> tuple[LazyItems, np.ndarray, ImageFiles]:
    """Turns labelled image files into inputs and targets for a :class:`Source`, without reading the images yet.

    Returns the inputs, which read an image only when it is used; the labels, int64 [n]; and the Dataset from which the
    inputs are read. ``labelled`` has the path of each file below the folder ``root``, and its label. Images are scaled
    to ``size`` pixels in height and width. Error messages call the files ``name``.
    """
    labels = np.array([label for _, label in labelled], dtype=np.int64)
    images = ImageFiles(root, [path for path, _ in labelled], labels, size)
    return LazyItems(images, name), labels, images


def read_image(path: Path, size: int) -> np.ndarray:
    """Reads the image file ``path`` as uint8 ``[3, size, size]``: scaled until it just covers the square, and cropped.

    Raises :class:`UserError`, which names the file, if it is missing, cut short, or no image, or if it has so many
    pixels that it would fill the memory (Pillow's limit).
    """
    return decode_image(path, str(path), size)


def decode_image(file: Path | BinaryIO, name: str, size: int | None) -> np.ndarray:
    """Decodes an image to uint8 ``[3, size, size]``, scaled and cropped, or ``[3, height, width]`` if ``size`` is None.

    ``file`` is a path or an open binary file, which error messages call ``name``. Images of 16 bits are scaled from
    0..65535 to 0..255. Of an animation the first picture is used. Raises :class:`UserError` in the same cases as
    :func:`read_image`; for a TIFF file with several pages; and for pixels of 32 bits that are not all in 0, 1, ...,
    255, because it is unknown which number is white.
    """
    with opened_image(file, name) as image:
        if size is not None:
            # a JPEG is decoded at a half, a quarter or an eighth of its size if that is enough
            image.draft("RGB", (size, size))
        fitted = _of_bytes(image, name).convert("RGB")
        if size is not None:
            fitted = ImageOps.fit(fitted, (size, size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(fitted).transpose(2, 0, 1))


@contextlib.contextmanager
def opened_image(file: Path | BinaryIO, name: str) -> Iterator[Image.Image]:
    """Opens an image with Pillow for use in a ``with`` statement, and turns Pillow's errors into :class:`UserError`.

    ``file`` is a path or an open binary file, which error messages call ``name``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                yield image
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file {name}") from None
    except UnidentifiedImageError:
        raise UserError(f"{name} is not an image that Pillow knows") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name} can't be read as an image: {first_sentence(error)}") from None


def _is_deep(image: Image.Image) -> bool:
    """Returns whether an image is grey with 16 bits. For colours of 16 bits, Pillow itself takes the upper 8 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _of_bytes(image: Image.Image, name: str) -> Image.Image:
    """Converts an opened image with any number of bits to one with 8 bits for each channel.

    Raises :class:`UserError` for a TIFF file with several pages, and for pixels of 32 bits that are not all bytes.
    """
    if image.format == "TIFF" and _has_pages(image):
        raise UserError(f"{name} has several pages, of which only one could be read: save each as a separate image")
    if _is_deep(image):
        # Image.convert would turn everything above 255 into white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        pixels = np.asarray(image)
        with np.errstate(invalid="ignore"):
            are_bytes = np.array_equal(pixels, np.clip(pixels, 0, 255).astype(np.uint8))
        if not are_bytes:
            what = "that are not 0, 1, ..., 255, of which nobody knows which number is white"
            raise UserError(f"{name} has pixels of 32 bits {what}: save 8 or 16 bits")
    return image


def _has_pages(image: Image.Image) -> bool:
    """Returns whether a TIFF file has a second image of the same size as the first. Smaller ones are only previews."""
    sizes = []
    for frame in range(getattr(image, "n_frames", 1)):
        image.seek(frame)
        sizes.append(image.size)
    image.seek(0)
    return sizes.count(sizes[0]) > 1
