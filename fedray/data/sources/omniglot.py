"""Omniglot: characters of many alphabets, each drawn once by 20 people.

B. M. Lake, R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic program induction.
Science 350, 2015.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from fedray.data.normalization import of_choice
from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import Layout, find_files
from fedray.data.sources.images import opened_image
from fedray.data.sources.source import Source
from fedray.errors import UserError

DRAWING = re.compile(r"\d+_(\d+)\.png")


def omniglot(root: str | None, image_size: int | None) -> Source:
    """Loads Omniglot, drawings of characters with bright ink on black: uint8 [1, 28, 28]. Each character is a class.

    Each alphabet was drawn by 20 people. A client has one person's drawings of one alphabet. Every fifth person (5, 10,
    15, 20) is no client: the drawings of these are the test samples. Raises :class:`UserError` for files that are
    missing or damaged.

    Args:
        root: the folder with the folders ``images_*``, which are all read. If it is None, they are looked for on this
            machine, or else downloaded.
        image_size: the height and width of the images in pixels (``data.image_size``); None means 28.
    """
    found = find_files(
        "omniglot", root, [Layout(("omniglot-py", "omniglot", "."), ("images_*/*/character*/*.png",))],
        "the unpacked folder images_background of images_background.zip (or images_background_small1)",
        "https://github.com/brendenlake/omniglot", _download,
    )  # fmt: skip
    paths = found.paths
    size = image_size or 28
    names = [(path.parts[-4], path.parts[-3], path.parts[-2], _drawer(path)) for path in paths]
    classes = sorted({name[:3] for name in names})
    people = sorted({(*name[:2], name[3]) for name in names if name[3] % HELD_OUT})
    of_class, of_person = ({key: k for k, key in enumerate(keys)} for keys in (classes, people))
    x = np.stack([_read(path, size) for path in paths])[:, None]
    y = np.array([of_class[name[:3]] for name in names], dtype=np.int64)
    who = np.array([of_person.get((*name[:2], name[3]), -1) for name in names], dtype=np.int64)
    train = who >= 0
    if train.all() or not train.any():
        raise UserError(f"{paths[0].parents[2]} has no drawings of the drawers 5, 10, 15 and 20, or of no others")
    return Source(
        "omniglot", x[train], y[train], x[~train], y[~train], len(classes), client_train=who[train],
        class_names=tuple(map("/".join, classes)),
        client_names=tuple(f"{folder}/{alphabet} {drawer}" for folder, alphabet, drawer in people),
        files=found.stamps, **of_choice("standard", "omniglot", x[train]),
    )  # fmt: skip


def _download(folder: Path) -> None:
    from torchvision.datasets import Omniglot

    for background in (True, False):
        Omniglot(str(folder), background=background, download=True)


def _drawer(path: Path) -> int:
    found = DRAWING.fullmatch(path.name)
    if found is None:
        raise UserError(f"{path} is not named as a drawing of Omniglot, NNNN_DD.png")
    return int(found[1])


def _read(path: Path, size: int) -> np.ndarray:
    with opened_image(path, str(path)) as image:
        return 255 - np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))
