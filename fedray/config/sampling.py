"""The keys that say how cohorts are drawn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fedray.config.section import Section, Whole


class SamplingConfig(Section):
    """What ``train.sampling`` says: a kind alone, or a mapping such as ``{kind: power_of_choice, candidates: 20}``."""

    kind: Literal["uniform", "cyclic", "weighted", "power_of_choice"] = Field(
        "uniform", description="how cohorts are drawn"
    )
    candidates: Whole | None = Field(None, ge=1, description="power_of_choice: clients among which it chooses (d)")
    cached: bool = Field(False, description="power_of_choice: by the losses of each client's last participation")

    @classmethod
    def of(cls, value: str | dict[str, Any]) -> SamplingConfig:
        """Makes it from the value of ``train.sampling``."""
        return cls(**({"kind": value} if isinstance(value, str) else value))

    @model_validator(mode="after")
    def _check_keys(self) -> SamplingConfig:
        if self.kind == "power_of_choice" and self.candidates is None:
            raise ValueError("kind=power_of_choice needs candidates, as in {kind: power_of_choice, candidates: 20}")
        if self.kind != "power_of_choice" and (self.candidates is not None or self.cached):
            key = "cached" if self.candidates is None else "candidates"
            raise ValueError(f"{key} is for kind=power_of_choice")
        return self
