"""Several labels for each image: what kind of clothes a picture of Fashion-MNIST shows (the sample inside fedray).

python analysis/examples/clothes.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fedray
from fedray.data.sources.source import load_source

PROPERTIES = {
    "upper body": "T-shirt/top, Pullover, Dress, Coat, Shirt", "long sleeves": "Pullover, Coat, Shirt",
    "worn on the feet": "Sandal, Sneaker, Ankle boot", "open in front": "Coat, Shirt",
    "outdoors": "Coat, Ankle boot, Bag",
}  # fmt: skip
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


TABLE = np.array([[name in of.split(", ") for of in PROPERTIES.values()] for name in CLASSES])


def tests() -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs that the model gets of the test images, and their labels."""
    images = load_source("sample")
    return images.x_test * images.scale + images.shift, TABLE[images.y_test]


def main(**settings: Any) -> fedray.RunResult:
    images = load_source("sample")
    keys = {
        "algorithm.name": "fedavgm", "run.name": "clothes", "run.rounds": 30, "data.clients": 20,
        "data.partition.kind": "iid", "train.cohort_size": 10, "train.lr": 0.05,
    }  # fmt: skip
    x = images.x_train * images.scale + images.shift
    data, test = (x, TABLE[images.y_train]), tests()
    return fedray.simulate({**keys, **settings}, data=data, test=test, verbose=True)


if __name__ == "__main__":
    main()
