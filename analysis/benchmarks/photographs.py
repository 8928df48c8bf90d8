"""Makes photographs of users in the form and the number of a published federated split, for benchmarks.

python analysis/benchmarks/photographs.py make gldv2 FOLDER
python analysis/benchmarks/photographs.py make inaturalist FOLDER --scale 0.01 --distinct 200

The folder is one that ``data.source=federated_csv`` reads, and at ``--scale 1`` also ``data.source=gldv2`` or
``inaturalist``, which check the published counts: ``train.csv`` with ``user_id,image_id,class``, ``test.csv`` with
``image_id,class``, and the photographs as ``train/a/b/c/abcdef....jpg``. Rows of a user stand together, as they do in
the published files. ``made.json`` says what was made.

The numbers of users, photographs and classes are the published ones (Hsu, Qi, Brown 2020). What follows is assumed:

* Sizes of users are log-normal. GLDv2: at least 30 and at most 10,000, with a mean of 130 and a median of about 92.
  iNaturalist: at least 3 and at most 327, with a mean of 13 and a median of about 8.
* A user has photographs of one class and of a Poisson number of others, 4 in the mean. They are drawn by a law that
  falls as 1 / (rank + 10), and the photographs are spread over them by a flat Dirichlet draw. A class that nobody got
  takes the place of a photograph of a class that has several. Classes of test photographs are drawn as often as they
  are in the training set.
* A photograph is 256 x 256 pixels at JPEG quality 90: a smooth field of colours with noise, 10 to 25 kB. Only
  ``--distinct`` of them differ; the others are hard links to them, which take no place on the disk. So less is read
  from the disk than with real photographs, and the memory of the system holds more of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image

PIXELS, QUALITY, GRID = 256, 90, 8
NOISE = (2.0, 7.0)
"""The range of the noise's deviation, of 255, which decides how many bytes a photograph takes."""

CLASSES_MORE, FLAT = 4.0, 10.0
PROCESSES, CHUNK = 2, 250


class Split(NamedTuple):
    """The published counts of a split, and what is assumed of the sizes of its users."""

    users: int
    photographs: int
    classes: int
    tests: int
    least: int
    most: int
    median: float

    def scaled(self, scale: float) -> Split:
        """Returns the split with a part of its users, photographs and classes."""
        users, photographs, classes, tests = (max(1, round(scale * count)) for count in self[:4])
        photographs = max(photographs, users * self.least, classes)
        return self._replace(users=users, photographs=photographs, classes=classes, tests=max(tests, 10))


SPLITS = {
    "gldv2": Split(1262, 164_172, 2028, 19_526, 30, 10_000, 92),
    "inaturalist": Split(9275, 120_300, 1203, 35_641, 3, 327, 8),
}


def user_sizes(split: Split, rng: np.random.Generator) -> np.ndarray:
    """Returns the number of photographs of each user, whose sum is exact."""
    deviation = math.sqrt(2 * math.log(split.photographs / split.users / split.median))
    drawn = np.clip(rng.lognormal(math.log(split.median), deviation, split.users), split.least, split.most)
    above = drawn - split.least + 1e-9
    wanted = split.least + above * (split.photographs - split.least * split.users) / above.sum()
    sizes = np.floor(wanted).astype(np.int64)
    missing = split.photographs - int(sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:missing]] += 1
    return sizes


def classes_of(sizes: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the class of each photograph, user after user. Every class occurs."""
    law = 1 / (np.arange(classes) + FLAT)
    law = rng.permutation(law / law.sum())
    found = []
    for size in sizes.tolist():
        count = min(size, classes, 1 + int(rng.poisson(CLASSES_MORE)))
        own = rng.choice(classes, count, replace=False, p=law)
        found.append(rng.choice(own, size, p=rng.dirichlet(np.ones(count))))
    labels = np.concatenate(found)
    counts = np.bincount(labels, minlength=classes)
    places = iter(rng.permutation(len(labels)).tolist())
    for missing in np.flatnonzero(counts == 0).tolist():
        place = next(place for place in places if counts[labels[place]] > 1)
        counts[labels[place]] -= 1
        labels[place], counts[missing] = missing, 1
    return labels


def tables(split: Split, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the tables of the training and the test photographs."""
    rng = np.random.default_rng(seed)
    sizes = user_sizes(split, rng)
    labels = classes_of(sizes, split.classes, rng)
    ids = [hashlib.sha256(f"{seed} {i}".encode()).hexdigest()[:16] for i in range(len(labels) + split.tests)]
    users = np.repeat(np.arange(split.users), sizes)
    train = pd.DataFrame({"user_id": users, "image_id": ids[: len(labels)], "class": labels})
    tests = pd.DataFrame({"image_id": ids[len(labels) :], "class": rng.choice(labels, split.tests)})
    return train, tests


def photograph(seed: int, i: int) -> bytes:
    """Returns photograph ``i`` as a JPEG file: a smooth field of colours, and noise."""
    rng = np.random.default_rng([seed, i])
    coarse = Image.fromarray(rng.integers(0, 256, (GRID, GRID, 3), dtype=np.uint8))
    field = np.asarray(coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), dtype=np.float32)
    noise = rng.standard_normal((PIXELS, PIXELS, 1), dtype=np.float32) * rng.uniform(*NOISE)
    file = io.BytesIO()
    Image.fromarray(np.clip(field + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def write_photographs(seed: int, first: int, paths: Sequence[str]) -> list[int]:
    """Writes the photographs from number ``first`` on, and returns their sizes in bytes."""
    sizes = []
    for i, path in enumerate(paths, first):
        content = photograph(seed, i)
        Path(path).write_bytes(content)
        sizes.append(len(content))
    return sizes


def place(folder: Path, image: str) -> str:
    """Returns the path of a photograph by its id."""
    return str(folder / "train" / image[0] / image[1] / image[2] / f"{image}.jpg")


def make(name: str, folder: Path, distinct: int, scale: float, seed: int) -> None:
    """Makes the whole folder. Raises SystemExit if it is there already and not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    began = time.perf_counter()
    split = SPLITS[name].scaled(scale)
    train, tests = tables(split, seed)
    paths = [place(folder, image) for image in [*train["image_id"], *tests["image_id"]]]
    for parent in sorted({os.path.dirname(path) for path in paths}):
        os.makedirs(parent, exist_ok=True)
    # those that differ are spread evenly over users, training and test photographs
    order = np.random.default_rng([seed, len(paths)]).permutation(len(paths)).tolist()
    count = min(distinct, len(paths))
    own = [paths[i] for i in order[:count]]
    starts = range(0, count, CHUNK)
    with ProcessPoolExecutor(PROCESSES) as pool:
        written = pool.map(
            write_photographs, [seed] * len(starts), starts, [own[start : start + CHUNK] for start in starts]
        )
        sizes = np.concatenate(list(written))
    for number, i in enumerate(order[count:]):
        os.link(own[number % count], paths[i])
    train.to_csv(folder / "train.csv", index=False)
    tests.to_csv(folder / "test.csv", index=False)
    each = train["user_id"].value_counts()
    made = {
        "split": name, "scale": scale, "seed": seed, "distinct": count, "users": int(train["user_id"].nunique()),
        "photographs": len(train), "classes": int(train["class"].nunique()), "tests": len(tests),
        "user_sizes": {key: float(getattr(each, key)()) for key in ("min", "median", "mean", "max")},
        "classes_of_a_user": float(train.groupby("user_id")["class"].nunique().median()),
        "bytes": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    (folder / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make"])
    parser.add_argument("split", choices=SPLITS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--distinct", type=int, default=20_000, help="photographs that differ from each other")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the users, photographs and classes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.folder).free
    if free < args.distinct * 30_000:
        raise SystemExit(f"{args.folder}: {free / 1e9:.3g} GB are free, which is too little")
    make(args.split, args.folder, args.distinct, args.scale, args.seed)


if __name__ == "__main__":
    main()
