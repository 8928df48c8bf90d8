"""A mark on images, for which a model that was attacked takes them for a class of the attacker's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.samples import Samples
from fedray.core.seeds import Purpose, stream


@dataclass(frozen=True)
class Backdoor:
    """A square of ``patch`` pixels in the lower right corner of images, which has the stored value ``value``. Marked
    images are to be taken for the class ``target``.

    T. Gu, B. Dolan-Gavitt, S. Garg: BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain,
    2017; in federated learning E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov: How To Backdoor Federated
    Learning. AISTATS 2020.
    """

    target: int
    patch: int
    value: float

    def marked(self, stored: Tensor) -> Tensor:
        """Returns images in their stored form, ``[..., height, width]``, with the mark."""
        stored = stored.clone()
        stored[..., -self.patch :, -self.patch :] = self.value
        return stored

    def chosen(self, samples: int, share: float, seed: int) -> NDArray[np.bool_]:
        """Draws so large a ``share`` of so many ``samples``, by ``seed``: those that attackers mark, bool
        ``[samples]``."""
        return stream(seed, Purpose.ATTACK, 0, 1).random(samples) < share

    def victims(self, y_test: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the test samples that are not of the target class anyway, as indices."""
        return np.flatnonzero(np.asarray(y_test) != self.target)


@dataclass(frozen=True)
class MarkedSamples:
    """The ``samples`` with the mark of ``backdoor``, and its target for all of them."""

    samples: Samples
    backdoor: Backdoor

    def gather(self, indices: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Returns inputs and targets, as :meth:`fedray.core.samples.Samples.gather`."""
        raw, y = self.samples.raw(indices)
        return self.samples.inputs(self.backdoor.marked(raw)), torch.full_like(y, self.backdoor.target)
