"""A loss that takes its time, so that a round lasts as long as with a larger model and leaves the processors alone.

Several clusters can then be tried on one machine at once.
"""

import time

import torch.nn.functional as F
from torch import Tensor

SECONDS = 0.005


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    time.sleep(SECONDS)
    return F.cross_entropy(logits, targets, reduction="none")
