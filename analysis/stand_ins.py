"""Makes files in the formats of data sets that are not at hand, for ``start_experiments.py``.

Each function writes one data set below a folder, in its publisher's format, and returns settings that read it. Its size
is the published one unless the function says otherwise. The samples are drawn at random, so that a model can be trained
on them, but learns little.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedray.data.sources.shakespeare import CHARACTERS
from fedray.data.sources.source import load_source

PHOTOGRAPHS = Path(__file__).parents[1] / "benchmarks" / "photographs.py"
SCALE = 0.03
"""The part of the users, photographs and classes of GLDv2 and iNaturalist that is made."""


def emnist(folder: Path) -> dict[str, Any]:
    """Balanced EMNIST: 112,800 and 18,800 images of 47 classes."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, each in (("train", 2400), ("test", 400)):
        y = rng.permutation(np.repeat(np.arange(47, dtype=np.uint8), each))
        x = rng.integers(0, 256, (256, 28, 28), dtype=np.uint8)[np.arange(len(y)) % 256]
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            with gzip.open(folder / f"emnist-balanced-{part}-{kind}-ubyte.gz", "wb", 1) as file:
                file.write(header + array.tobytes())
    return {"data.root": str(folder)}


def cifar100(folder: Path) -> dict[str, Any]:
    """CIFAR-100 in its binary layout: 50,000 and 10,000 images of 100 classes in 20 groups."""
    rng, place = np.random.default_rng(0), folder / "cifar-100-binary"
    place.mkdir(parents=True)
    for part, each in (("train", 500), ("test", 100)):
        fine = rng.permutation(np.repeat(np.arange(100, dtype=np.uint8), each))
        pixels = rng.integers(0, 256, (1000, 3072), dtype=np.uint8)[np.arange(len(fine)) % 1000]
        rows = np.concatenate([fine[:, None] // 5, fine[:, None], pixels], axis=1)
        (place / f"{part}.bin").write_bytes(rows.tobytes())
    return {"data.root": str(folder)}


def har(folder: Path) -> dict[str, Any]:
    """UCI-HAR's 561 features of 7,352 and 2,947 windows."""
    rng, place = np.random.default_rng(0), folder / "UCI HAR Dataset"
    centres = rng.normal(size=(6, 561))
    for part, count, people in (("train", 7352, 21), ("test", 2947, 9)):
        (place / part).mkdir(parents=True)
        y = rng.integers(0, 6, count)
        x = np.tanh(0.3 * centres[y] + 0.3 * rng.normal(size=(count, 561)))
        np.savetxt(place / part / f"X_{part}.txt", x, "%16.7e")
        np.savetxt(place / part / f"y_{part}.txt", y + 1, "%d")
        np.savetxt(place / part / f"subject_{part}.txt", np.sort(rng.integers(1, people + 1, count)), "%d")
    return {"data.root": str(folder)}


def shakespeare(folder: Path) -> dict[str, Any]:
    """LEAF's json files, made of the plays in $FEDRAY_DATA: 150 roles with at most 2,500 samples."""
    plays = load_source("shakespeare", variant="plays")
    letters = np.array(list(CHARACTERS))
    assert plays.client_train is not None
    assert plays.client_test is not None
    for part, x, y, owner in (
        ("train", plays.x_train, plays.y_train, plays.client_train),
        ("test", plays.x_test, plays.y_test, plays.client_test),
    ):
        largest = np.argsort(-np.bincount(owner), kind="stable")[:150]
        users = {}
        for client in largest:
            places = np.flatnonzero(owner == client)[:2500]
            texts = ["".join(row) for row in letters[np.asarray(x[places], np.int64)]]
            users[f"role {client}"] = {"x": texts, "y": letters[y[places]].tolist()}
        (folder / part).mkdir(parents=True)
        sizes = [len(each["y"]) for each in users.values()]
        content = {"users": list(users), "num_samples": sizes, "user_data": users}
        (folder / part / "all_data.json").write_text(json.dumps(content))
    return {"data.root": str(folder)}


def tiny_imagenet(folder: Path) -> dict[str, Any]:
    """Tiny-ImageNet: 200 classes of 500 and 50 images. Only 400 of them differ; the others are links to them."""
    rng, place = np.random.default_rng(0), folder / "tiny-imagenet-200"
    (place / "distinct").mkdir(parents=True)
    for number in range(400):
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "JPEG")
        (place / "distinct" / f"{number}.JPEG").write_bytes(buffer.getvalue())
    names = [f"n{number:08d}" for number in range(200)]
    (place / "wnids.txt").write_text("\n".join(names) + "\n")
    (place / "words.txt").write_text("".join(f"{name}\tthing {name}\n" for name in names))
    (place / "val" / "images").mkdir(parents=True)
    lines = []
    for number, name in enumerate(names):
        (place / "train" / name / "images").mkdir(parents=True)
        for i in range(550):
            target = (
                f"train/{name}/images/{name}_{i}.JPEG" if i < 500 else f"val/images/val_{50 * number + i - 500}.JPEG"
            )
            os.link(place / "distinct" / f"{(number + 7 * i) % 400}.JPEG", place / target)
            if i >= 500:
                lines.append(f"{Path(target).name}\t{name}\t0\t0\t63\t63\n")
    (place / "val" / "val_annotations.txt").write_text("".join(lines))
    return {"data.root": str(folder)}


def photographs(source: str, folder: Path) -> dict[str, Any]:
    """GLDv2 or iNaturalist with a part of its users, photographs and classes, for the source that reads both."""
    command = [
        sys.executable,
        str(PHOTOGRAPHS),
        "make",
        source,
        str(folder),
        "--scale",
        str(SCALE),
        "--distinct",
        "200",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"data.root": str(folder), "data.source": "federated_csv"}
