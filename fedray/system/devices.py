"""The devices and networks of the clients: given by a file, by profiles, or drawn from distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from fedray.config import parse_yaml
from fedray.config.section import in_message
from fedray.config.system import OF_DEVICES, SystemConfig
from fedray.core.seeds import Purpose, stream
from fedray.errors import UserError, first_line, near_miss
from fedray.system.tables import read_table

Numbers = NDArray[np.float64]

WITHOUT = {"flops_per_second": np.inf, "down_mbps": np.inf, "up_mbps": np.inf, "latency_ms": 0.0, "watts": np.nan}
"""What a client has of which nothing is said: what it does takes no time, and its power is unknown."""

ZERO_TOO = ("latency_ms", "watts")
"""What may be 0 of a device or network."""


@dataclass(frozen=True)
class Devices:
    """What the clients' devices and networks are, a number ``[N]`` for each of the N clients: FLOPs per second of
    training, 10^6 bits per second received and sent, milliseconds of latency, and watts (NaN if unknown)."""

    flops_per_second: Numbers
    down_mbps: Numbers
    up_mbps: Numbers
    latency_ms: Numbers
    watts: Numbers


@cache
def profiles(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the profiles that come with fedray, by name, each as a dict with some of the keys of ``system`` and its
    ``source``. ``kind`` is ``devices`` or ``networks``."""
    text = (Path(__file__).parent / "profiles.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)[kind]
    return found


def is_profile(name: str) -> bool:
    """Returns whether ``name`` is the path of a profile in a file, as ``fedray calibrate`` writes it."""
    return name.endswith((".yaml", ".yml"))


def profile_of(kind: str, name: str) -> Mapping[str, Any]:
    """Reads a profile of ``system.devices`` or ``system.networks`` (``kind``), by its name or from a file.

    Raises :class:`UserError` if there is none, or it has a wrong key or number.
    """
    if not is_profile(name):
        known, other = profiles(kind), "networks" if kind == "devices" else "devices"
        if is_table(name):
            raise UserError(
                f"system.{kind}: {name} is a CSV file, which goes into system.devices alone: system.devices={name} has "
                "a line for each client, and may say what its network is, too"
            )
        if name in profiles(other):
            raise UserError(f"system.{kind}: {name} is a profile of system.{other}")
        if name not in known:
            raise UserError(f"system.{kind}: there is no profile {name!r}{near_miss(name, known)}")
        return known[name]
    try:
        found = parse_yaml(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read system.{kind}={name}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"system.{kind}={name} is not valid YAML: {first_line(error)}") from None
    known_keys = (*OF_DEVICES, "source")
    if not isinstance(found, dict):
        raise UserError(f"system.{kind}={name} must hold some of the keys {', '.join(known_keys)}")
    for key, value in found.items():
        if key not in known_keys:
            raise UserError(f"system.{kind}={name}: unknown key {key}{near_miss(str(key), known_keys)}")
        least = "at least 0" if key in ZERO_TOO else "above 0"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if key != "source" and not (is_number and (value > 0 or (value == 0 and key in ZERO_TOO))):
            raise UserError(f"system.{kind}={name}: {key} must be a number {least}, not {in_message(value)}")
    return found


def is_table(value: Any) -> bool:
    """Returns whether ``value``, that of ``system.devices``, names a CSV file and not a profile."""
    return isinstance(value, str) and not is_profile(value) and (value.endswith(".csv") or "/" in value)


def is_file(value: Any) -> bool:
    """Returns whether ``value`` is the path of a CSV file or of a profile."""
    return isinstance(value, str) and (is_profile(value) or is_table(value))


MAY_NAME_FILES = ("devices", "networks", "availability")
"""The keys of the section ``system`` that may name files."""


def with_absolute_paths(value: Any) -> Any:
    """Returns the value of a key that may name files (:data:`MAY_NAME_FILES`) with absolute paths, as the process that
    reads them again may have another working directory."""
    if isinstance(value, Mapping):
        return {with_absolute_paths(name): share for name, share in value.items()}
    return str(Path(value).absolute()) if is_file(value) else value


def devices_of(system: SystemConfig, clients: int, seed: int, names: Sequence[str] | None = None) -> Devices:
    """Returns the devices and networks of N = ``clients`` clients, as the section ``system`` describes them. What is
    drawn depends on ``seed`` alone. ``names`` are the clients' names, if the data have some.

    A number that ``system`` gives itself, as ``system.watts``, takes the place of that of a profile. Raises
    :class:`UserError` if a profile is unknown, a file lacks a client or has it twice, or two places say the same:
    ``system.devices`` and ``system.networks``, or a CSV file and ``system`` itself.
    """
    columns = {name: np.full(clients, value) for name, value in WITHOUT.items()}
    said: dict[str, str] = {}
    for number, kind in enumerate(("devices", "networks")):
        asked = getattr(system, kind)
        if asked is None:
            continue
        if kind == "devices" and is_table(asked):
            found = _from_table(system, clients, names)
        else:
            found = _from_profiles(kind, asked, clients, seed, number, columns)
        if both := [name for name in found if name in said]:
            raise UserError(f"system.{kind} says {both[0]}, and so does {said[both[0]]}: give one of them")
        columns |= found
        said |= dict.fromkeys(found, f"system.{kind}={asked}" if isinstance(asked, str) else f"system.{kind}")
    for number, name in enumerate(OF_DEVICES, start=2):
        if (asked := getattr(system, name)) is not None:
            columns[name] = drawn(asked, clients, stream(seed, Purpose.DEVICE, number))
    return Devices(**columns)


def drawn(asked: Any, clients: int, generator: np.random.Generator) -> Numbers:
    """Returns a number ``[clients]`` for each client. ``asked`` is the number of all of them, or a distribution from
    which each is drawn: ``{"lognormal": [median, sigma]}``, ``{"uniform": [least, most]}``, ``{"choice": [...]}``."""
    if not isinstance(asked, Mapping):
        return np.full(clients, float(asked))
    ((name, numbers),) = asked.items()
    if name == "lognormal":
        return np.asarray(numbers[0] * np.exp(numbers[1] * generator.standard_normal(clients)))
    if name == "uniform":
        return np.asarray(numbers[0] + (numbers[1] - numbers[0]) * generator.random(clients))
    return np.array(numbers)[generator.integers(len(numbers), size=clients)]


def _from_profiles(
    kind: str, asked: str | Mapping[str, float], clients: int, seed: int, number: int, columns: Mapping[str, Numbers]
) -> dict[str, Numbers]:
    """Returns the columns that profiles give. Each profile gets its share of the clients, rounded; which ones is
    drawn."""
    counts = counts_of(asked, clients)
    known = {name: profile_of(kind, name) for name in counts}
    order = stream(seed, Purpose.DEVICE, number).permutation(clients)
    found: dict[str, Numbers] = {}
    for name, end in zip(counts, np.cumsum([*counts.values()]), strict=True):
        for column in OF_DEVICES:
            if column in known[name]:
                of_profile = order[end - counts[name] : end]
                found.setdefault(column, columns[column].copy())[of_profile] = known[name][column]
    return found


def counts_of(asked: str | Mapping[str, float], clients: int) -> dict[str, int]:
    """Returns how many of N = ``clients`` clients get each of the profiles that ``system.devices`` or
    ``system.networks`` names: their shares of the clients, rounded so that they add up to N."""
    shares = {asked: 1.0} if isinstance(asked, str) else dict(asked)
    until = np.rint(np.cumsum([*shares.values()]) * clients).astype(np.int64)
    return dict(zip(shares, np.diff(until, prepend=0).tolist(), strict=True))


def _from_table(system: SystemConfig, clients: int, names: Sequence[str] | None) -> dict[str, Numbers]:
    said = [name for name in OF_DEVICES if getattr(system, name) is not None]
    table = read_table(str(system.devices), "system.devices", ("client",), OF_DEVICES, clients, names)
    if both := [name for name in said if name in table.columns]:
        raise UserError(f"system.{both[0]} is also said by the file system.devices={system.devices}: give one of them")
    path, seen = system.devices, np.bincount(table.clients, minlength=clients)
    for count, wrong in ((0, "lacks"), (2, "has more than one line for")):
        clients_so = np.flatnonzero(seen == 0 if count == 0 else seen >= count)
        if len(clients_so):
            more = f" and {len(clients_so) - 1} others" if len(clients_so) > 1 else ""
            raise UserError(
                f"system.devices={path} {wrong} client {clients_so[0]}{more} (it needs one for each of {clients})"
            )
    order = np.argsort(table.clients)
    columns = {name: values[order] for name, values in table.columns.items()}
    for name, values in columns.items():
        zero_too = name in ZERO_TOO
        wrong_at = np.flatnonzero(~(values >= 0 if zero_too else values > 0))
        if len(wrong_at):
            bound = "at least 0" if zero_too else "above 0"
            line = table.lines[order[wrong_at[0]]]
            raise UserError(f"system.devices={path}, line {line}: {name} must be {bound}, not {values[wrong_at[0]]:g}")
    return columns
