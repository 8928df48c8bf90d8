"""The keys of robust aggregation, and of the attacks against which it is tried."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fedray.config.section import Real, Section, Whole

OPTIONS = {
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

    kind: Literal[
        "mean", "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median", "centered_clip",
        "norm_bound",
    ] = Field("mean", description="rule that puts uploads together; mean: the algorithm's own")  # fmt: skip
    f: Whole | None = Field(None, ge=0, description="krum, multi_krum, bulyan: Byzantine clients in a cohort, at most")
    b: Whole | None = Field(None, ge=0, description="trimmed_mean: values that are left out at each end")
    tau: Real | None = Field(None, gt=0, description="centered_clip: length to which uploads are clipped")
    norm: Real | None = Field(None, gt=0, description="norm_bound: length to which uploads are clipped")
    nu: Real | None = Field(None, gt=0, description="geometric_median: least distance in a weight; 1e-6 unless set")
    passes: Whole | None = Field(None, ge=1, description="geometric_median, centered_clip: passes; 8 and 1 unless set")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are set, besides ``kind``."""
        return {key: value for key in OPTIONS[self.kind] if (value := getattr(self, key)) is not None}

    @model_validator(mode="after")
    def _check_keys(self) -> AggregationConfig:
        _check(self, self.kind, OPTIONS)
        for key in OPTIONS[self.kind]:
            if key in NEEDED and getattr(self, key) is None:
                raise ValueError(f"kind={self.kind} needs {key}")
        return self


class AttackConfig(Section):
    """The section ``attack``: what a part of the clients does to harm the model."""

    kind: Literal["label_flip", "backdoor", "sign_flip", "noise", "alie", "ipm"] | None = Field(
        None, description="attack of Byzantine clients; unset: none"
    )
    fraction: Real | None = Field(None, gt=0, lt=1, description="share of the clients that are Byzantine")
    scale: Real | None = Field(None, gt=0, description="sign_flip, backdoor: factor; noise: deviation; 1 unless set")
    z: Real | None = Field(None, description="alie: deviations from the mean; unset: as many as hide")
    eps: Real | None = Field(None, description="ipm: factor of the mean; 0.5 unless set")
    target: Whole | None = Field(
        None, ge=0, description="backdoor: class for which marked images are taken; 0 unless set"
    )
    share: Real | None = Field(None, gt=0, le=1, description="backdoor: share of the samples marked; 0.5 unless set")
    patch: Whole | None = Field(
        None, ge=1, description="backdoor: height and width of the mark in pixels; 3 unless set"
    )

    @property
    def strength(self) -> float | None:
        """The key that says how strong the attack is, None if it is not set."""
        return next((getattr(self, key) for key in ATTACKS.get(self.kind or "", ())), None)

    @model_validator(mode="after")
    def _check_keys(self) -> AttackConfig:
        if self.kind is None and self.fraction is not None:
            raise ValueError("attack.fraction needs attack.kind")
        if self.kind is not None and self.fraction is None:
            raise ValueError(f"kind={self.kind} needs fraction")
        _check(self, self.kind or "", ATTACKS)
        return self


def _check(section: Section, kind: str, options: dict[str, Any]) -> None:
    """Raises :class:`ValueError` if a key is set that belongs to another kind."""
    for key in {key for keys in options.values() for key in keys} - set(options.get(kind, ())):
        if getattr(section, key) is not None:
            takers = " and ".join(other for other, keys in options.items() if key in keys)
            raise ValueError(f"{key} is not for kind={kind or None}, but for {takers}")
