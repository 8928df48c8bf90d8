"""The keys that say how cohorts are drawn."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from fedray.config.section import Real, Section, Whole
from fedray.errors import near_miss


class SamplingConfig(Section):
    """What ``train.sampling`` says: a kind alone, or a mapping such as ``{kind: power_of_choice, candidates: 20}``."""

    kind: Literal["uniform", "cyclic", "weighted", "power_of_choice", "oort"] = Field(
        "uniform", description="how cohorts are drawn"
    )
    candidates: Whole | None = Field(None, ge=1, description="power_of_choice: clients among which it chooses (d)")
    cached: bool = Field(False, description="power_of_choice: by the losses of each client's last participation")
    seconds: Real | None = Field(
        None, gt=0, description="oort: virtual seconds (T) beyond which a client counts less; unset: none does"
    )
    alpha: Real | None = Field(None, ge=0, description="oort: how much less (alpha); 2 unless set")

    @classmethod
    def of(cls, value: str | dict[str, Any]) -> SamplingConfig:
        """Makes it from the value of ``train.sampling``. Raises :class:`ValueError` if it is wrong."""
        keys = {"kind": value} if isinstance(value, str) else value
        for key in keys.keys() - cls.model_fields.keys():
            raise ValueError(f"there is no key {key}{near_miss(key, cls.model_fields)} in train.sampling")
        kind, kinds = keys.get("kind"), get_args(cls.model_fields["kind"].annotation)
        if kind not in kinds:
            hint = near_miss(str(kind), kinds)
            raise ValueError(f"train.sampling: there is no kind {kind!r}{hint}; there are {', '.join(kinds)}")
        try:
            return cls(**keys)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["train.sampling", *map(str, first["loc"])])
            raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None

    @model_validator(mode="after")
    def _check_keys(self) -> SamplingConfig:
        if self.kind == "power_of_choice" and self.candidates is None:
            raise ValueError("kind=power_of_choice needs candidates, as in {kind: power_of_choice, candidates: 20}")
        if self.kind != "power_of_choice" and (self.candidates is not None or self.cached):
            key = "cached" if self.candidates is None else "candidates"
            raise ValueError(f"{key} is for kind=power_of_choice")
        if self.kind != "oort" and (self.seconds is not None or self.alpha is not None):
            raise ValueError(f"{'alpha' if self.seconds is None else 'seconds'} is for kind=oort")
        if self.alpha is not None and self.seconds is None:
            raise ValueError("alpha needs seconds, beyond which a client counts less")
        return self
