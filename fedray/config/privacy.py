"""The keys of differential privacy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedray.config.section import Real, Section, Whole


class PrivacyConfig(Section):
    """The section ``privacy``: differential privacy of clients, whose updates are clipped, and whose sum gets noise.
    It is on if ``epsilon`` or ``noise`` is set."""

    epsilon: Real | None = Field(
        None, gt=0, description="epsilon at the end of the run, from which the noise follows; unset: no privacy"
    )
    delta: Real = Field(1e-5, gt=0, lt=1, description="delta, less than one in the number of clients")
    noise: Real | None = Field(
        None, ge=0, description="noise multiplier z in place of epsilon: the deviation of the noise is z times clip"
    )
    clip: Real | None = Field(
        None, gt=0, description="length S to which updates are clipped; unset: 0.1 at first, and then adaptive"
    )
    adaptive: bool | None = Field(
        None, description="whether the length follows the median length of updates; unset: if clip is"
    )
    participation: Literal["poisson", "fixed"] = Field(
        "poisson",
        description="poisson: each client takes part with the same probability, so that cohorts differ in size; fixed: "
        "cohorts of one size, for which epsilon is too small",
    )
    accountant: Literal["pld", "rdp"] = Field(
        "pld", description="how epsilon is computed: by privacy loss distributions, or by Rényi divergences, which "
        "give more"
    )  # fmt: skip
    cohort: Whole | None = Field(
        None, ge=1, description="clients in a round for which noise and epsilon are computed; unset: train.cohort_size"
    )
    clients: Whole | None = Field(
        None, ge=1, description="clients altogether for which epsilon is computed; unset: those of the data"
    )

    @property
    def is_on(self) -> bool:
        """Whether the run is private."""
        return self.epsilon is not None or self.noise is not None

    @model_validator(mode="after")
    def _check_keys(self) -> PrivacyConfig:
        fields = type(self).model_fields
        if not self.is_on and (others := [key for key in fields if getattr(self, key) != fields[key].default]):
            raise ValueError(f"{others[0]} is set, but neither epsilon nor noise, without which nothing is private")
        if self.clip is None and self.adaptive is False:
            raise ValueError("adaptive=false needs clip, the length to which updates are clipped")
        return self
