"""DP-FedAvg: updates are clipped, and their sum gets Gaussian noise.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018,
Algorithm 1, with a constant in place of the size of the cohort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedray.core.seeds import Purpose, torch_seed
from fedray.gradients.rows import squared_norms

FIRST_CLIP = 0.1
"""The length to which updates are clipped at first, if it is adaptive."""

QUANTILE, CLIP_RATE = 0.5, 0.2
"""gamma, the fraction of the updates that should not be clipped, and eta_C, how fast the length follows."""

COUNT_DEVIATION = 1 / 20
"""sigma_b / m, the deviation of the noise of the fraction of updates that were not clipped."""


@dataclass(frozen=True)
class Mechanism:
    """Makes the mean of clients' updates u_i private: (sum_i u_i min(1, S / ||u_i||) + z S N(0, I)) / m, where m is the
    expected size of a cohort, a constant.

    With ``adaptive`` S follows the median of the lengths: S <- S exp(-eta_C (b - gamma)), where b is the fraction of
    the updates that are not longer than S, with noise of its own. For this z is divided between the two: updates get
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2). G. Andrew, O. Thakkar, B. McMahan, S. Ramaswamy: Differentially Private
    Learning with Adaptive Clipping. NeurIPS 2021, Algorithm 1 and Theorem 1.

    Attributes:
        noise: z, the noise multiplier.
        clip: S in the first round.
        adaptive: Whether S changes.
        cohort: m.
        counted: The size of the cohorts for which noise is computed. The noise of the mean is that of their mean, also
            if smaller ones are simulated.
        seed: ``run.seed``, from which the noise of each round is drawn.
    """

    noise: float
    clip: float
    adaptive: bool
    cohort: float
    counted: float
    seed: int

    @property
    def of_updates(self) -> float:
        """z_delta, the noise multiplier of updates."""
        if not self.adaptive or not self.noise:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * COUNT_DEVIATION * self.counted) ** -2)

    @property
    def least_cohort(self) -> int:
        """The size of a cohort from which on an adaptive S is possible: the fraction b alone must need less than z."""
        return math.floor(self.noise / (2 * COUNT_DEVIATION)) + 1

    def clipped(self, updates: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``updates`` float32 ``[C, width]``, of which none is longer than ``clip`` ``[1]``, and which of them
        were not longer, as ones among zeros ``[C, 1]``. One that is not finite becomes zero, and counts as longer."""
        updates = torch.where(squared_norms(updates).isfinite().reshape(-1, 1), updates, torch.nan)
        lengths = squared_norms(updates).sqrt().reshape(-1, 1)
        factor = (clip.double() / torch.maximum(lengths, clip.double())).float()
        return (updates * factor).nan_to_num(0.0), (lengths <= clip.double()).float()

    def mean(self, total: Tensor, clip: float, round: int) -> Tensor:
        """Returns the private mean of updates whose sum is ``total`` float32 ``[d]``, in ``round``."""
        drawn = torch.empty(total.shape).normal_(generator=self._generator(round, 0))
        noise = drawn.double() * (self.of_updates * clip / self.counted)
        return (total.double() / self.cohort + noise.to(total.device)).float()

    def next_clip(self, clip: float, within: float, clients: int, round: int) -> float:
        """Returns S for the round after ``round``, if ``within`` of the updates of ``clients`` were not longer than
        ``clip``."""
        if not self.adaptive:
            return clip
        drawn = torch.empty(1, dtype=torch.float64).normal_(generator=self._generator(round, 1)).item()
        # each counts as 1/2 or -1/2, so that a client changes the sum by 1/2 at most
        fraction = (within - clients / 2) / self.cohort + 0.5 + (COUNT_DEVIATION * drawn if self.noise else 0.0)
        return clip * math.exp(-CLIP_RATE * (fraction - QUANTILE))

    def _generator(self, round: int, what: int) -> torch.Generator:
        return torch.Generator().manual_seed(torch_seed(self.seed, Purpose.PRIVACY, round, what))
