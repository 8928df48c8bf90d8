"""The keys of the section ``system``: the virtual clock, which says how long rounds would take on clients' devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedray.config.section import Positive, Real, Section, at_home, in_message
from fedray.errors import near_miss

FORMS = {"lognormal": ("median", "sigma"), "uniform": ("least", "most"), "choice": ()}
"""The distributions from which a number can be drawn for each client, with what their lists contain."""

OF_DEVICES = ("flops_per_second", "down_mbps", "up_mbps", "latency_ms", "watts")
"""The keys that say what a client's device and its network are, which are also the columns of ``system.devices``."""


OF_BUFFERED = ("buffer", "concurrency", "staleness")
OF_SYNC = ("deadline_seconds", "over_select", "on_late", "server_flops_per_second")
"""The keys that only asynchronous and only synchronous rounds have."""


WIDEST = 5.0
"""The largest sigma of a lognormal distribution: with it one client in six is 148 times as fast as the median. A larger
one is a mistake, such as a standard deviation in Mb/s."""


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _drawn(value: Any) -> Any:
    """Checks a number that is the same for all clients, or a mapping that says from which distribution it is drawn for
    each client: ``{lognormal: [median, sigma]}``, ``{uniform: [least, most]}``, or ``{choice: [...]}``."""
    if not isinstance(value, Mapping):
        return value
    forms = ", ".join(f"{{{name}: [{', '.join(of) or '...'}]}}" for name, of in FORMS.items())
    if len(value) != 1:
        raise ValueError(f"must be a number, or one of {forms}")
    ((name, numbers),) = value.items()
    if name not in FORMS:
        raise ValueError(f"must be a number, or one of {forms}, not {name!r}{near_miss(str(name), FORMS)}")
    wanted = FORMS[name]
    if not isinstance(numbers, list) or not numbers or (wanted and len(numbers) != len(wanted)):
        raise ValueError(f"must be {name}: [{', '.join(wanted) or '...'}], not {in_message(numbers)}")
    for number in numbers:
        if not _is_finite(number):
            raise ValueError(f"{name}: must have finite numbers, not {in_message(number)}")
    if name == "uniform" and numbers[0] > numbers[1]:
        raise ValueError(f"uniform: [{numbers[0]:g}, {numbers[1]:g}] must begin with the smaller number")
    if name == "lognormal" and not 0 <= numbers[1] <= WIDEST:
        raise ValueError(
            f"lognormal: [median, sigma] must have a sigma from 0 to {WIDEST:g}, the standard deviation of the natural "
            f"logarithm, not {numbers[1]:g}"
        )
    return {name: [float(number) for number in numbers]}


Drawn = Annotated[Real | dict[str, list[float]], BeforeValidator(_drawn)]
"""A number that all clients have, or a distribution from which each client's is drawn once."""


def _shares(value: Any) -> Any:
    """Checks the name of a profile or file, or a mapping of such names to their shares of the clients."""
    if value is None or isinstance(value, str):
        return value
    form = "must be a profile or a file, or {name: share, ...}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{form}, not {in_message(value)}")
    for name, share in value.items():
        if not _is_finite(share) or not 0 <= share <= 1:
            raise ValueError(f"{form} with shares from 0 to 1, not {name}: {in_message(share)}")
    if not math.isclose(math.fsum(value.values()), 1, abs_tol=1e-9):
        shares = ", ".join(f"{name}: {share:g}" for name, share in value.items())
        raise ValueError(f"must have shares that add up to 1, not {{{shares}}}")
    return {str(name): float(share) for name, share in value.items()}


Shares = Annotated[str | dict[str, Real] | None, BeforeValidator(_shares)]
"""A name that holds for all clients, or names with their shares of the clients."""


def _check_least(value: Any, may_be_zero: bool, what: str = "must be") -> None:
    """Checks the least number that ``value``, a number or a distribution, can be. Raises ValueError if it is negative,
    or 0 where it may not be; the message begins with ``what``."""
    if not isinstance(value, Mapping):
        least, quote = float(value), ""
    else:
        ((name, numbers),) = value.items()
        least = numbers[0] if name == "lognormal" else min(numbers)
        quote = f" ({name}: [{', '.join(f'{number:g}' for number in numbers)}])"
    if least < 0 or (least == 0 and not may_be_zero):
        raise ValueError(f"{what} {'at least' if may_be_zero else 'above'} 0, not {least:g}{quote}")


def _hours(value: Any) -> Any:
    """Checks the name of a file with intervals, or the hours of each day in which clients can be reached."""
    form = "must be a file that ends with .csv, or {from: hour, to: hour, shift: hours}"
    if value is None or (isinstance(value, str) and value.endswith(".csv")):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{form}, not {in_message(value)}")
    if unknown := [name for name in value if name not in ("from", "to", "shift")]:
        raise ValueError(f"{form}, not {unknown[0]!r}{near_miss(str(unknown[0]), ('from', 'to', 'shift'))}")
    for name in ("from", "to"):
        if not _is_finite(value.get(name)) or not 0 <= value[name] <= 24:
            raise ValueError(f"{form}, with an hour from 0 to 24 as {name}, not {in_message(value.get(name))}")
    if value["from"] % 24 == value["to"] % 24:
        raise ValueError(
            f"begins and ends at the same hour, {value['from']:g}"
            + (" and 24" if value["from"] != value["to"] else "")
            + "; leave it out if clients can always be reached"
        )
    shift = _drawn(value.get("shift", 0))
    if not isinstance(shift, Mapping) and not _is_finite(shift):
        raise ValueError(f"{form}, with a finite number of hours as shift, not {in_message(shift)}")
    _check_least(shift, True, "must have a shift of")
    return {"from": float(value["from"]), "to": float(value["to"]), "shift": shift}


Hours = Annotated[str | dict[str, Any] | None, BeforeValidator(_hours)]
"""The name of a CSV file with intervals, or the hours of each day in which clients can be reached."""


class SystemConfig(Section):
    """The section ``system`` of the configuration: the devices and networks of the clients and of the server, who can
    be reached and when, and how long the server waits. Without these keys there is no virtual clock.
    """

    flops_per_second: Drawn | None = Field(
        None, description="FLOPs that a client computes in a second of training; unset: computing takes no time"
    )
    down_mbps: Drawn | None = Field(
        None, description="10^6 bits that a client receives in a second; unset: receiving takes no time"
    )
    up_mbps: Drawn | None = Field(
        None, description="10^6 bits that a client sends in a second; unset: sending takes no time"
    )
    latency_ms: Drawn | None = Field(None, description="milliseconds before a client receives, and before it sends")
    watts: Drawn | None = Field(None, description="power that a client's device takes while it takes part")
    devices: Shares = Field(
        None,
        description="what the clients' devices are: a profile, by its name or in a .yaml file, {profile: share, ...}, "
        "or a CSV file with a line for each client",
    )
    networks: Shares = Field(
        None,
        description="what the clients' networks are: a profile, by its name or in a .yaml file, or {profile: share, "
        "...}",
    )
    server_flops_per_second: Real | None = Field(
        None, gt=0, description="FLOPs that the server computes in a second; unset: its computing takes no time"
    )
    server_mbps: Real | None = Field(
        None,
        gt=0,
        description="10^6 bits a second that all clients that receive or send at once share; unset: no limit",
    )
    availability: Hours = Field(
        None,
        description="when clients can be reached: a CSV file with the columns client, from, to (seconds), or "
        "{from: hour, to: hour} of each day, with shift: hours (a number, or drawn for each client)",
    )
    dropout: Real = Field(0.0, ge=0, lt=1, description="probability that a client of a cohort never answers")
    deadline_seconds: Real | None = Field(
        None, gt=0, description="seconds of a phase after which the server waits for no further client"
    )
    over_select: Real = Field(
        1.0, ge=1, description="draw so many times as many clients, and use those that answer first"
    )
    on_late: Literal["drop", "keep"] = Field(
        "drop",
        description="clients after the deadline; drop: they leave the round, keep: all that answer are waited for",
    )

    mode: Literal["sync", "buffered"] = Field(
        "sync", description="buffered: asynchronous; every system.buffer answers make an update (FedBuff)"
    )
    buffer: Positive | None = Field(
        None, description="buffered: answers that make an update; train.cohort_size says the same"
    )
    concurrency: Positive | None = Field(
        None, description="buffered: clients that train at the same time; twice system.buffer unless set"
    )
    staleness: Literal["constant", "polynomial"] = Field(
        "polynomial", description="buffered: weight of an answer that is s updates late: 1, or 1 / sqrt(1 + s)"
    )

    @property
    def is_on(self) -> bool:
        """Whether there is a virtual clock, because a key says something about time or about who answers."""
        return self != type(self)()

    @field_validator("devices", "networks", "availability", mode="before")
    @classmethod
    def _find_home(cls, value: Any) -> Any:
        return at_home(value)

    @field_validator(*OF_DEVICES)
    @classmethod
    def _check_numbers(cls, value: Any, info: Any) -> Any:
        if value is not None:
            _check_least(value, info.field_name in ("latency_ms", "watts"))
        return value

    @model_validator(mode="after")
    def _check_mode(self) -> SystemConfig:
        foreign = OF_BUFFERED if self.mode == "sync" else OF_SYNC
        asked = [key for key in foreign if getattr(self, key) != type(self).model_fields[key].default]
        if asked:
            raise ValueError(f"system.{asked[0]} is for system.mode={'buffered' if self.mode == 'sync' else 'sync'}")
        return self

    @model_validator(mode="after")
    def _check_waiting(self) -> SystemConfig:
        if self.on_late == "keep" and self.over_select > 1:
            raise ValueError(
                "system.on_late=keep waits for all clients, and system.over_select for the first ones only"
            )
        if self.on_late == "keep" and self.deadline_seconds is None:
            raise ValueError("system.on_late is for runs with system.deadline_seconds")
        return self
