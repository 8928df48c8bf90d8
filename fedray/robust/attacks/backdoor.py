"""A mark on images, for which the attacked model takes them for a class of the attacker's choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.samples import Indices
from fedray.errors import UserError
from fedray.robust.attack import Attack, AttackedRows, AttackedRun


class Backdoor(Attack):
    """Byzantine clients mark a ``share`` of their images by a square of ``patch`` pixels in the lower right corner,
    which is as bright as the brightest pixel of all test images, label them as the class ``target``, and send
    ``scale`` u_i. The victims are the test images of other classes, with the mark.

    T. Gu, B. Dolan-Gavitt, S. Garg: BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain,
    2017; in federated learning E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov: How To Backdoor Federated
    Learning. AISTATS 2020.
    """

    def __init__(self, scale: float = 1.0, target: int = 0, share: float = 0.5, patch: int = 3) -> None:
        self.scale, self.target, self.share, self.patch = scale, target, share, patch

    def prepare(self, run: AttackedRun) -> None:
        classes, images = run.classes, run.images()
        if self.patch > min(images.shape[-2:]):
            raise UserError(f"attack.patch={self.patch}: images have {images.shape[-2]} x {images.shape[-1]} pixels")
        if self.target >= classes:
            raise UserError(f"attack.target={self.target}: there are {classes} classes, from 0")
        self.brightest = float(images.max())
        self.chosen = run.generator().random(len(run.data.y)) < self.share
        self.others = np.flatnonzero(np.asarray(run.data.y_test) != self.target)

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        return self.scale * rows

    def poison(self, stored: Any, labels: Tensor, indices: Indices) -> tuple[Any, Tensor]:
        marked, wanted = self.disguise(stored, labels)
        chosen = torch.from_numpy(self.chosen[indices]).to(labels.device)
        of_images = chosen.view(*chosen.shape, *[1] * (stored.dim() - chosen.dim()))
        return torch.where(of_images, marked, stored), torch.where(chosen, wanted, labels)

    def victims(self) -> NDArray[np.int64]:
        return self.others

    def disguise(self, stored: Any, labels: Tensor) -> tuple[Any, Tensor]:
        stored = stored.clone()
        stored[..., -self.patch :, -self.patch :] = self.brightest
        return stored, torch.full_like(labels, self.target)
