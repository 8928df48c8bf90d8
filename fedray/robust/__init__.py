"""Robust aggregation, and the attacks against which it is tried (``train.aggregation``, ``attack``).

A rule or an attack of your own is a subclass of :class:`Rule` or :class:`Attack`."""

from __future__ import annotations

from fedray.robust.attack import Attack, AttackedRows, AttackedRun
from fedray.robust.attacks.alie import ALIE
from fedray.robust.attacks.backdoor import Backdoor
from fedray.robust.attacks.ipm import IPM
from fedray.robust.attacks.label_flip import LabelFlip
from fedray.robust.attacks.noise import Noise
from fedray.robust.attacks.sign_flip import SignFlip
from fedray.robust.rule import Rule
from fedray.robust.rules.bulyan import Bulyan
from fedray.robust.rules.centered_clip import CenteredClip
from fedray.robust.rules.geometric_median import GeometricMedian
from fedray.robust.rules.krum import Krum, MultiKrum
from fedray.robust.rules.mean import Mean
from fedray.robust.rules.median import Median
from fedray.robust.rules.norm_bound import NormBound
from fedray.robust.rules.trimmed_mean import TrimmedMean

RULES: dict[str, type[Rule]] = {
    "mean": Mean, "median": Median, "trimmed_mean": TrimmedMean, "krum": Krum, "multi_krum": MultiKrum,
    "bulyan": Bulyan, "geometric_median": GeometricMedian, "centered_clip": CenteredClip, "norm_bound": NormBound,
}  # fmt: skip
"""The rules by the names of ``train.aggregation``."""

ATTACKS: dict[str, type[Attack]] = {
    "label_flip": LabelFlip, "backdoor": Backdoor, "sign_flip": SignFlip, "noise": Noise, "alie": ALIE, "ipm": IPM,
}  # fmt: skip
"""The attacks by the names of ``attack``."""

__all__ = ["ATTACKS", "RULES", "Attack", "AttackedRows", "AttackedRun", "Rule"]
