"""torchvision's ResNet-18 on Tiny-ImageNet, whose images are read, cropped and mirrored when they are used.

python analysis/examples/tiny_imagenet.py tiny-imagenet-200
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.transforms import v2

import fedray


class TinyImageNet(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images of the part ``train`` or ``val``, as bytes ``[3, 64, 64]``. fedray seeds what transforms draw."""

    def __init__(self, folder: Path, part: str) -> None:
        classes = {name: number for number, name in enumerate((folder / "wnids.txt").read_text().split())}
        if part == "train":
            files = [(path, classes[path.parts[-3]]) for path in sorted(folder.glob("train/*/images/*.JPEG"))]
        else:
            lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
            files = [(folder / "val/images" / line.split("\t")[0], classes[line.split("\t")[1]]) for line in lines]
        self.paths, self.targets = zip(*files, strict=True)
        moved = v2.Compose([v2.RandomCrop(64, padding=4), v2.RandomHorizontalFlip()])
        self.transform = moved if part == "train" else v2.Identity()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[i]) as image:
            return self.transform(v2.functional.pil_to_tensor(image.convert("RGB"))), self.targets[i]


def network(classes: int) -> nn.Module:
    return resnet18(num_classes=classes)


def main(folder: Path, **settings: Any) -> fedray.RunResult:
    keys = {
        "algorithm.name": "fedavg", "run.name": "tiny-imagenet", "run.rounds": 300, "run.eval_every": 10,
        "data.clients": 100, "data.access": "lazy", "train.cohort_size": 10, "train.local_epochs": 2,
        "train.batch_size": 32, "train.lr": 0.05,
    }  # fmt: skip
    train, test = TinyImageNet(folder, "train"), TinyImageNet(folder, "val")
    return fedray.simulate({**keys, **settings}, data=train, test=test, model=network, verbose=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
