"""The keys of robust aggregation, and of the attacks against which it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from fedray.config.section import Real, Section, Whole, in_message
from fedray.errors import near_miss
from fedray.usercode.importing import FORMS, is_user_defined

RULES = {
    "mean": (), "median": (), "trimmed_mean": ("b",), "krum": ("f",), "multi_krum": ("f",), "bulyan": ("f",),
    "geometric_median": ("nu", "passes"), "centered_clip": ("tau", "passes"), "norm_bound": ("norm",),
}  # fmt: skip
"""The keys that each rule takes besides ``kind``."""

NEEDED = ("b", "f", "tau", "norm")
"""The keys without a default."""

ATTACKS = {
    "label_flip": (), "backdoor": ("scale", "target", "share", "patch"), "sign_flip": ("scale",), "noise": ("scale",),
    "alie": ("z",), "ipm": ("eps",),
}  # fmt: skip
"""The keys that each attack takes besides ``kind`` and ``fraction``."""


class AggregationConfig(Section):
    """The section ``train.aggregation``: what takes the place of the mean of the clients' uploads."""

    kind: str = Field(
        "mean",
        description="rule that puts uploads together: mean (the algorithm's own), median, trimmed_mean, krum, "
        "multi_krum, bulyan, geometric_median, centered_clip, norm_bound, or your own: file.py:Class",
    )
    f: Whole | None = Field(None, ge=0, description="krum, multi_krum, bulyan: Byzantine clients in a cohort, at most")
    b: Whole | None = Field(None, ge=0, description="trimmed_mean: values that are left out at each end")
    tau: Real | None = Field(None, gt=0, description="centered_clip: length to which uploads are clipped")
    norm: Real | None = Field(None, gt=0, description="norm_bound: length to which uploads are clipped")
    nu: Real | None = Field(None, gt=0, description="geometric_median: least distance in a weight; 1e-6 unless set")
    passes: Whole | None = Field(None, ge=1, description="geometric_median, centered_clip: passes; 8 and 1 unless set")
    options: dict[str, Any] = Field({}, description="a rule of your own: the arguments of its class, by name")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the rule's class that are set."""
        return _arguments(self, self.kind, RULES)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return _checked(kind, RULES, "a rule")

    @model_validator(mode="after")
    def _check_keys(self) -> AggregationConfig:
        _check(self, self.kind, RULES)
        for key in RULES.get(self.kind, ()):
            if key in NEEDED and getattr(self, key) is None:
                raise ValueError(f"kind={self.kind} needs {key}")
        return self


class AttackConfig(Section):
    """The section ``attack``: what a part of the clients does to harm the model."""

    kind: str | None = Field(
        None,
        description="attack of Byzantine clients: label_flip, backdoor, sign_flip, noise, alie, ipm, or your own: "
        "file.py:Class; unset: none",
    )
    fraction: Real | None = Field(None, gt=0, lt=1, description="share of the clients that are Byzantine")
    scale: Real | None = Field(
        None, gt=0, description="sign_flip, backdoor: factor; noise: standard deviation; 1 unless set"
    )
    z: Real | None = Field(None, description="alie: standard deviations from the mean; unset: as many as hide")
    eps: Real | None = Field(None, description="ipm: factor of the mean; 0.5 unless set")
    target: Whole | None = Field(
        None, ge=0, description="backdoor: class for which marked images are taken; 0 unless set"
    )
    share: Real | None = Field(None, gt=0, le=1, description="backdoor: share of the samples marked; 0.5 unless set")
    patch: Whole | None = Field(
        None, ge=1, description="backdoor: height and width of the mark in pixels; 3 unless set"
    )
    options: dict[str, Any] = Field({}, description="an attack of your own: the arguments of its class, by name")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the attack's class that are set."""
        return _arguments(self, self.kind, ATTACKS)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str | None) -> str | None:
        return None if kind is None else _checked(kind, ATTACKS, "an attack")

    @model_validator(mode="after")
    def _check_keys(self) -> AttackConfig:
        if self.kind is None and self.fraction is not None:
            raise ValueError("attack.fraction needs attack.kind")
        if self.kind is not None and self.fraction is None:
            raise ValueError(f"kind={self.kind} needs fraction")
        _check(self, self.kind, ATTACKS)
        return self


def _checked(kind: str, known: Mapping[str, Any], what: str) -> str:
    """Returns ``kind`` if it is one of ``known``, or may be the name of a user-defined class. Raises
    :class:`ValueError`, which says ``what`` it should name, if it is neither."""
    if kind not in known and not is_user_defined(kind):
        raise ValueError(f"must name {what}, or your own as {FORMS}, not {in_message(kind)}{near_miss(kind, known)}")
    return kind


def _arguments(section: Any, kind: str | None, keys: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Returns the arguments that ``section`` sets for the class of ``kind``. ``keys`` has the names of those of each
    kind that comes with fedray; the arguments of user-defined classes are in the section's ``options``."""
    if kind is None or kind not in keys:
        return dict(section.options)
    return {key: value for key in keys[kind] if (value := getattr(section, key)) is not None}


def _check(section: Any, kind: str | None, keys: Mapping[str, tuple[str, ...]]) -> None:
    """Raises :class:`ValueError` if ``section`` sets a key that belongs to another kind than its own."""
    known = kind is None or kind in keys
    for key in sorted({key for of_kind in keys.values() for key in of_kind} - set(keys.get(kind or "", ()))):
        if getattr(section, key) is not None:
            takers = " and ".join(other for other, of_kind in keys.items() if key in of_kind)
            own = "" if known else f"; arguments of a class of your own go into options, as in {{{key}: ...}}"
            raise ValueError(f"{key} is not for kind={kind}, but for {takers}{own}")
    if known and section.options:
        raise ValueError(f"options is for a class of your own, named as {FORMS}, not for kind={kind}")
