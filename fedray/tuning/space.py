"""What is searched: config keys, each with the values it may take.

    algorithm.mu: {loguniform: [0.001, 1.0]}
    algorithm.tau: {int: [1, 40], log: true}
    train.local_steps: {choice: [5, 10, 20]}
    train.momentum: {uniform: [0.0, 0.99], step: 0.01}
    algorithm.beta: {uniform: [0.5, 0.999], when: {algorithm.nesterov: [true]}}

``grid`` is ``choice`` whose values are all tried where every key has one. A key with ``when`` is searched only where
the keys named there, searched before it or not searched, have one of these values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError, near_miss

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Any]
"""A value for each config key that is searched (and active)."""

RANGES = ("uniform", "loguniform", "int")
LISTS = ("choice", "grid")
OPTIONS = ("step", "log", "when")


@dataclass(frozen=True)
class Parameter:
    """One searched key. ``kind`` is one of :data:`RANGES` (from ``low`` to ``high``, both included) or of
    :data:`LISTS` (``values``)."""

    key: str
    kind: str
    low: float = 0
    high: float = 0
    values: tuple[Any, ...] = ()
    step: float | None = None
    log: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, others: Mapping[str, Any]) -> bool:
        """Whether the key is searched, given the other keys' values."""
        return all(any(_same(others.get(key), value) for value in values) for key, values in self.when)

    def suggest(self, trial: Trial) -> Any:
        """A value from Optuna."""
        if self.values:
            return json.loads(trial.suggest_categorical(self.key, [json.dumps(value) for value in self.values]))
        if self.kind == "int":
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.kind == "loguniform")

    def stored(self, value: Any) -> Any:
        """``value`` as Optuna keeps it; :class:`ValueError` if it is not in the space."""
        if self.values:
            for known in self.values:
                if _same(known, value):
                    return json.dumps(known)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high:
            steps = (value - self.low) / (self.step or 1)
            if (self.step is None and self.kind != "int") or abs(steps - round(steps)) < 1e-9:
                return int(value) if self.kind == "int" else float(value)
        raise ValueError(f"{self.key}={value} is not in it")


@dataclass(frozen=True)
class Space:
    """The searched keys, in the order in which they are drawn."""

    parameters: tuple[Parameter, ...]

    def keys(self) -> list[str]:
        return [parameter.key for parameter in self.parameters]

    def suggest(self, trial: Trial, base: Mapping[str, Any]) -> Values:
        """Values for a trial from Optuna; ``base``: the keys that are not searched, as far as conditions need them."""
        chosen: Values = {}
        for parameter in self.parameters:
            if parameter.active({**base, **chosen}):
                chosen[parameter.key] = parameter.suggest(trial)
        return chosen

    def stored(self, values: Mapping[str, Any]) -> Values:
        """``values`` as Optuna keeps them, to be tried next; :class:`ValueError` if one is outside the space."""
        return {p.key: p.stored(values.get(p.key)) for p in self.parameters if p.active(values)}

    def extremes(self, base: Mapping[str, Any]) -> Iterator[Values]:
        """Values that must be possible: each key's ends, or all of a list, where the others are as in ``base``."""
        for parameter in self.parameters:
            others = {key: values[0] for key, values in parameter.when if not parameter.active(base)}
            for value in parameter.values or (parameter.low, parameter.high):
                yield {**others, parameter.key: int(value) if parameter.kind == "int" else value}

    @property
    def is_grid(self) -> bool:
        """Whether every key has a list of values, so that all combinations can be tried."""
        return all(parameter.values for parameter in self.parameters)

    def grid(self, base: Mapping[str, Any]) -> list[Values]:
        """All combinations, each once, the first key slowest."""
        found: dict[str, Values] = {}
        for combination in itertools.product(*(parameter.values for parameter in self.parameters)):
            chosen: Values = {}
            for parameter, value in zip(self.parameters, combination, strict=True):
                if parameter.active({**base, **chosen}):
                    chosen[parameter.key] = value
            found.setdefault(json.dumps(chosen), chosen)
        return list(found.values())


def read_space(described: Mapping[str, Any], where: str = "") -> Space:
    """The space that ``described`` (a mapping as in this module's docstring) means.

    Raises :class:`UserError` in one line, which begins with ``where``.
    """
    if not isinstance(described, Mapping) or not described:
        raise UserError(f"{where}: give at least one key to search, as in algorithm.mu: {{loguniform: [0.001, 1]}}")
    found: list[Parameter] = []
    for key, text in described.items():
        try:
            found.append(_parameter(str(key), text))
        except ValueError as error:
            raise UserError(f"{where}: {key}: {error}") from None
    _check_order(found, where)
    return Space(tuple(found))


def _parameter(key: str, described: Any) -> Parameter:
    if not isinstance(described, Mapping):
        raise ValueError(f"must say how it is searched, as in {{uniform: [0, 1]}}, not {described!r}")
    known = (*RANGES, *LISTS)
    for name in described:
        if name not in (*known, *OPTIONS):
            raise ValueError(f"there is no {name!r}{near_miss(str(name), (*known, *OPTIONS))}")
    kinds = [name for name in described if name in known]
    if len(kinds) != 1:
        raise ValueError(f"must have one of {', '.join(known)}, not {' and '.join(kinds) or 'none'}")
    (kind,) = kinds
    when = _conditions(described.get("when", {}))
    values = described[kind]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{kind} needs a list, not {values!r}")
    if kind in LISTS:
        if "step" in described or "log" in described:
            raise ValueError(f"step and log go with int and uniform, not with {kind}")
        if not values or any(_same(a, b) for a, b in itertools.combinations(values, 2)):
            raise ValueError(f"{kind} needs values, each once, not {list(values)}")
        return Parameter(key, kind, values=tuple(values), when=when)
    return _range(key, kind, list(values), described.get("step"), described.get("log", False), when)


def _range(key: str, kind: str, ends: list[Any], step: Any, log: Any, when: Any) -> Parameter:
    whole = kind == "int"
    if len(ends) != 2 or not all(_is_number(end, whole) for end in ends) or not ends[0] < ends[1]:
        raise ValueError(f"{kind} needs [low, high], {'whole ' if whole else ''}numbers with low < high, not {ends}")
    if not isinstance(log, bool) or (log and not whole):
        raise ValueError("log is true or false, and goes with int; loguniform is the other one")
    if (kind == "loguniform" or log) and ends[0] <= 0:
        raise ValueError(f"on a logarithmic scale low must be above 0, not {ends[0]}")
    if step is not None and (not _is_number(step, whole) or step <= 0 or log or kind == "loguniform"):
        raise ValueError(f"step must be a{' whole' if whole else ''} number above 0, on a linear scale, not {step!r}")
    low, high = ends
    if step:
        # the last step that fits; a little more, as 0.3 / 0.1 is less than 3
        high = low + int((high - low) / step + 1e-9) * step
    return Parameter(key, kind, low=low, high=high, step=step, log=log, when=when)


def _conditions(described: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    if not isinstance(described, Mapping):
        raise ValueError(f"when must be keys with values, as in {{algorithm.nesterov: [true]}}, not {described!r}")
    return tuple(
        (str(key), tuple(values) if isinstance(values, (list, tuple)) else (values,))
        for key, values in described.items()
    )


def _check_order(parameters: Sequence[Parameter], where: str) -> None:
    keys = [parameter.key for parameter in parameters]
    for position, parameter in enumerate(parameters):
        for key, _ in parameter.when:
            if key in keys[position:]:
                raise UserError(f"{where}: {parameter.key}: when names {key}, which must come before it")


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
