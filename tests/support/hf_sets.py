"""Small data sets of Hugging Face: tables of numbers and images, on the disk and as Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pictures

from fedray.config import load
from fedray.data.sources.source import Source, source_of

ROWS, TESTS, SIZE = 60, 20, 8
rng = np.random.default_rng(5)
X = rng.normal(size=(ROWS + TESTS, 4)).astype(np.float32)
Y = np.arange(ROWS + TESTS) % 3
CLIENTS = np.array(["f", "a", "e", "b"])[np.arange(ROWS + TESTS) // 3 % 4]
FAST = {
    "algorithm.name": "fedavg", "model.name": "logistic", "run.rounds": 2, "train.local_steps": 2,
    "train.batch_size": 4, "engine.kind": "local",
}  # fmt: skip


def made(columns: dict[str, Any], features: dict[str, Any] | None = None, part: slice = slice(None)) -> Dataset:
    chosen = {name: list(values)[part] for name, values in columns.items()}
    return Dataset.from_dict(chosen, features=None if features is None else Features(features))


def divided(columns: dict[str, Any], features: dict[str, Any] | None = None) -> DatasetDict:
    return DatasetDict(
        train=made(columns, features, slice(ROWS)), test=made(columns, features, slice(ROWS, ROWS + TESTS))
    )


def numbers(**more: Any) -> dict[str, Any]:
    return {**{name: X[:, k].tolist() for k, name in enumerate("abcd")}, "target": Y.tolist(), **more}


def picture(number: int, side: tuple[int, int] = (20, 14)) -> Pictures.Image:
    drawn = np.random.default_rng(number).integers(0, 60, (*side, 3)) + 60 * (number % 3)
    return Pictures.fromarray(drawn.astype(np.uint8))


def pictures(side: Any = (20, 14)) -> DatasetDict:
    images = [picture(i, side(i) if callable(side) else side) for i in range(ROWS + TESTS)]
    columns = {"image": images, "target": Y.tolist(), "client": CLIENTS.tolist()}
    return divided(columns, {"image": Image(), "target": ClassLabel(names=["x", "y", "z"]), "client": Value("string")})


def settings(root: Any, **keys: Any) -> dict[str, Any]:
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return {**FAST, "data.source": "hf", "data.root": str(root), **given}


def read(root: Any, **keys: Any) -> Source:
    config = load(settings(root, **{f"data.{key}": value for key, value in keys.items()}))
    return source_of(config.data, config.task)


def saved(sets: Any, folder: str = "mine") -> Path:
    sets.save_to_disk(folder)
    return Path(folder)


def as_parquet(sets: DatasetDict, folder: str = "parquet", test: str = "test") -> Path:
    Path(folder).mkdir()
    for name, each in sets.items():
        half = len(each) // 2
        for part, rows in enumerate((range(half), range(half, len(each)))):
            each.select(rows).to_parquet(f"{folder}/{test if name == 'test' else name}-{part:05}-of-00002.parquet")
    return Path(folder)
