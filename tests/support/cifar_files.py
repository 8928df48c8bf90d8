"""Small files in the layouts in which CIFAR-10 is published."""

import struct

import numpy as np

from fedray.data.sources.cifar import TEN


def text(value):
    return b"U" + bytes([len(value)]) + value


def number(value):
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def published(x, y, label=b"testing batch 1 of 1", **more):
    """A batch as the publisher's Python 2 pickled it, byte for byte but for the names of its files, which are lost.

    ``more`` are further labels by their names, as CIFAR-100's files have them.
    """
    pixels = x.tobytes()
    pieces = [b"\x80\x02}q\x01(", text(b"batch_label"), b"q\x02", text(label), b"q\x03"]
    for key, column in {"labels": y, **more}.items():
        pieces += [text(key.encode()), b"q\x04]q\x05"]
        for start in range(0, len(column), 1000):
            pieces += [b"(", *map(number, column[start : start + 1000].tolist()), b"e"]
    pieces += [text(b"data"), b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"]
    pieces += [text(b"b"), b"\x87Rq\t(K\x01", number(len(x)), b"M\x00\x0c\x86cnumpy\ndtype\nq\n", text(b"u1")]
    pieces += [b"K\x00K\x01\x87Rq\x0b(K\x03", text(b"|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"]
    pieces += [b"T" + struct.pack("<i", len(pixels)), pixels, b"tb", text(b"filenames"), b"q\x0c]q\r("]
    for row in range(len(x)):
        pieces += [text(b"leptodactylus_s_%06d.png" % row), b"r" + struct.pack("<i", 14 + row)]
    return b"".join([*pieces, b"eu."])


def records(x, y):
    return np.concatenate([y.astype(np.uint8)[:, None], x.reshape(len(x), -1)], axis=1).tobytes()


def write(folder, batches, layout):
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in batches.items():
        if layout == TEN.binary:
            (folder / f"{part}.bin").write_bytes(records(x, y))
        else:
            (folder / part).write_bytes(published(x, y))


def small_batches():
    """Small batches of different sizes."""
    rng = np.random.Generator(np.random.Philox(0))
    sizes = dict(zip(TEN.parts, (20, 10, 11, 12, 13, 9), strict=True))
    return {part: (rng.integers(0, 256, (n, 3, 32, 32), np.uint8), np.arange(n) % 10) for part, n in sizes.items()}
