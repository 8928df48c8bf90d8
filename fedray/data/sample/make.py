"""Makes the sample in this folder: 1,000 training and 200 test images of each class of Fashion-MNIST.

``python make.py FOLDER`` with the four original files in FOLDER. The choice is fixed by a seed, images keep their
order, and the files hold no time stamp: the same input gives the same bytes (with the same zlib).
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np

from fedray.data.sources.idx import FILES, find, read_idx

SEED = 2017
PER_CLASS = {"train": 1000, "t10k": 200}


def main(root: str) -> None:
    paths = dict(zip(FILES, find("fashion_mnist", root).paths, strict=True))
    rng = np.random.Generator(np.random.Philox(SEED))
    for images, labels in (FILES[:2], FILES[2:]):
        x, y = read_idx(paths[images]), read_idx(paths[labels])
        size = PER_CLASS[images.split("-")[0]]
        chosen = np.sort(np.concatenate([rng.permutation(np.flatnonzero(y == label))[:size] for label in range(10)]))
        for name, array in ((images, x[chosen]), (labels, y[chosen])):
            (Path(__file__).parent / f"{name}.gz").write_bytes(idx_file(array))


def idx_file(array: np.ndarray) -> bytes:
    """Returns the bytes of a gzipped idx file (the file format of MNIST) that holds ``array``, uint8 of any shape.
    There is no time stamp in it, so equal arrays give equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes())
    return buffer.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
