"""The keys that describe how a learning rate changes over the rounds of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedray.config.section import Real, Section, Whole
from fedray.errors import UserError

OF_KIND = {"constant": (), "exponential": ("decay",), "step": ("decay", "every"), "cosine": ("final", "rounds")}
"""The keys that each kind of schedule takes, in addition to ``warmup``."""


class ScheduleConfig(Section):
    """How a learning rate changes over the rounds: the keys of the sections ``train.lr_schedule`` (the clients'
    learning rate) and ``train.server_lr_schedule`` (the server's).

    The keys determine the factor by which the learning rate is multiplied in each round; :mod:`fedray.core.schedule`
    has the formulas.
    """

    kind: Literal["constant", "exponential", "step", "cosine"] = Field("constant", description="kind of schedule")
    decay: Real | None = Field(None, gt=0, le=1, description="exponential, step: factor of a round, or of a step")
    every: Whole | None = Field(None, ge=1, description="step: rounds of each step")
    final: Real | None = Field(None, ge=0, le=1, description="cosine: factor at the end; 0 unless set")
    rounds: Whole | None = Field(
        None, ge=1, description="cosine: rounds until the end, with the warm-up; run.rounds unless set"
    )
    warmup: Whole = Field(0, ge=0, description="rounds in which the rate rises to its first value")

    @model_validator(mode="after")
    def _check_keys(self) -> ScheduleConfig:
        mine = OF_KIND[self.kind]
        for key in ("decay", "every", "final", "rounds"):
            if getattr(self, key) is not None and key not in mine:
                takers = " and ".join(kind for kind, keys in OF_KIND.items() if key in keys)
                raise ValueError(f"{key} is not for kind={self.kind}, but for {takers}")
            if getattr(self, key) is None and key in mine and key in ("decay", "every"):
                raise ValueError(f"kind={self.kind} needs {key}")
        if self.rounds is not None and self.rounds <= self.warmup:
            raise ValueError(f"rounds={self.rounds} must be more than warmup={self.warmup}")
        return self

    def over(self, rounds: int) -> ScheduleConfig:
        """Returns this schedule of a learning rate for a run of ``rounds`` rounds. If it is a cosine schedule whose key
        ``rounds`` is not set, the key is set in the result, so that the cosine falls over all rounds of the run. Any
        other schedule is returned unchanged.

        The configuration of the run records the key. A run with such a cosine can't be continued for more rounds later,
        because all its rounds would need another cosine. Raises :class:`UserError` if a cosine reaches 0 before the run
        ends.
        """
        if self.kind == "cosine" and self.rounds is not None and self.rounds < rounds and not self.final:
            raise UserError(
                f"a cosine over rounds={self.rounds} leaves no learning rate for the {rounds} rounds of the run: set "
                "final, or more rounds (train.lr_schedule, train.server_lr_schedule)"
            )
        if self.kind != "cosine" or self.rounds is not None:
            return self
        return type(self).model_validate({**self.model_dump(), "rounds": max(rounds, self.warmup + 1)})
