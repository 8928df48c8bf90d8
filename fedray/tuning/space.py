"""A search space: config keys, each with the values that it may take.

    algorithm.mu: {loguniform: [0.001, 1.0]}
    algorithm.tau: {int: [1, 40], log: true}
    train.local_steps: {choice: [5, 10, 20]}
    train.momentum: {uniform: [0.0, 0.99], step: 0.01}
    algorithm.beta: {uniform: [0.5, 0.999], when: {algorithm.nesterov: [true]}}

``grid`` is a ``choice``; if every key has a list, all combinations can be tried (``tune.sampler=grid``). A key with
``when`` is searched only in trials in which each key named there has one of the listed values. Such a key must be
searched before it, or not at all.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError, near_miss

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Any]
"""A value for each key that is searched in a trial."""

RANGES = ("uniform", "loguniform", "int")
LISTS = ("choice", "grid")
OPTIONS = ("step", "log", "when")


@dataclass(frozen=True)
class Parameter:
    """One key of the configuration that a sweep searches, with the values that it may take.

    ``key`` is the dotted key. If ``kind`` is "uniform", "loguniform" or "int", the key may take the values of a range,
    from ``low`` to ``high`` (both included). If it is "choice" or "grid", the key may take those in the list
    ``values``. ``step`` is the distance between the possible values of a range; with None it may take all real numbers,
    or with "int" all whole numbers. ``log`` says that an "int" is drawn on a logarithmic scale. ``when`` has the
    conditions under which the key is searched, as pairs of another key and the values that this other key may have.
    """

    key: str
    kind: str
    low: float = 0
    high: float = 0
    values: tuple[Any, ...] = ()
    step: float | None = None
    log: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, others: Mapping[str, Any]) -> bool:
        """Returns whether this key is searched in a trial in which other keys have the values ``others`` (a dict by
        dotted key). It is not searched if one of its conditions (``when``) is not met."""
        return all(any(_same(others.get(key), value) for value in values) for key, values in self.when)

    def suggest(self, trial: Trial) -> Any:
        """Returns a value of this key for ``trial``, chosen by Optuna's sampler."""
        if self.values:
            return json.loads(trial.suggest_categorical(self.key, [json.dumps(value) for value in self.values]))
        if self.kind == "int":
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        value = trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.kind == "loguniform")
        return self.at_step(round((value - self.low) / self.step)) if self.step else value

    def at_step(self, number: int) -> float:
        """Returns the value that lies ``number`` steps above the lower end of a range: ``low + number * step``. It is
        computed in decimals, so that the result is 0.3 and not 0.30000000000000004."""
        value = _decimal(self.low) + number * _decimal(self.step or 0)
        return int(value) if self.kind == "int" else float(value)

    def stored(self, value: Any) -> Any:
        """Returns ``value`` in the form in which Optuna records values of this key, to queue a trial that the user asks
        for: a number of a range stays a number, and a value of a list becomes JSON text. Raises ValueError if the key
        can't have this value."""
        if self.values:
            for known in self.values:
                if _same(known, value):
                    return json.dumps(known)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high:
            nearest = self.at_step(round((value - self.low) / self.step)) if self.step else value
            if math.isclose(value, nearest, rel_tol=1e-9, abs_tol=1e-12) and (
                self.kind != "int" or value == int(value)
            ):
                return int(value) if self.kind == "int" else float(value)
        raise ValueError(f"{self.key}={value} is not in the space")


@dataclass(frozen=True)
class Space:
    """All keys that a sweep searches, as :class:`Parameter` objects in the order in which their values are drawn."""

    parameters: tuple[Parameter, ...]

    def keys(self) -> list[str]:
        """Returns the names of the searched keys, such as ``train.lr``, in the order in which their values are
        drawn."""
        return [parameter.key for parameter in self.parameters]

    def suggest(self, trial: Trial, base: Mapping[str, Any]) -> Values:
        """Lets Optuna's sampler choose the values of a new trial. Returns a dict with a value for each searched key, by
        dotted key, without the keys whose conditions are not met. ``trial`` is the trial of Optuna, and ``base`` has
        the keys that are not searched."""
        chosen: Values = {}
        for parameter in self.parameters:
            if parameter.active({**base, **chosen}):
                chosen[parameter.key] = parameter.suggest(trial)
        return chosen

    def stored(self, values: Mapping[str, Any], base: Mapping[str, Any]) -> Values:
        """Turns values that the user chose into a trial that Optuna can queue: returns a dict by dotted key, with the
        values in the form in which Optuna records them.

        Keys that ``values`` leaves out are taken from ``base``, the configuration without searched values. Raises
        ValueError if a value is outside the space.
        """
        chosen, found = dict(base), {}
        for parameter in self.parameters:
            if parameter.active(chosen):
                value = values.get(parameter.key, base.get(parameter.key))
                chosen[parameter.key], found[parameter.key] = value, parameter.stored(value)
        return found

    def extremes(self, base: Mapping[str, Any]) -> Iterator[Values]:
        """Yields the values with which a sweep is checked before it starts. For each searched key there are two dicts
        (by dotted key), one with each end of its range, or else a dict with each value in its list.

        ``base`` is the configuration without searched values. All keys that a dict leaves out have their values there.
        If the conditions of the searched key are not met in ``base``, the dict also has values of other keys with which
        they are met. The searched key comes last.
        """
        for parameter in self.parameters:
            for value in parameter.values or (parameter.low, parameter.high):
                yield {**self._needed(parameter, base), parameter.key: value}

    def _needed(self, parameter: Parameter, base: Mapping[str, Any]) -> Values:
        """Returns the values, by dotted key, to which keys of ``base`` must be changed so that the conditions of
        ``parameter`` are met and it is searched."""
        needed: Values = {}
        if not parameter.active(base):
            for key, values in parameter.when:
                for other in self.parameters:
                    if other.key == key:
                        needed |= self._needed(other, base)
                needed[key] = values[0]
        return needed

    @property
    def is_grid(self) -> bool:
        """Whether every searched key has a list of values, so that the sampler ``grid`` can try all combinations."""
        return all(parameter.values for parameter in self.parameters)

    def grid(self, base: Mapping[str, Any]) -> list[Values]:
        """Returns all combinations of values that a grid search tries, as dicts by dotted key, each combination once.
        The values of the last key change fastest. Keys whose conditions are not met are left out of a combination;
        ``base`` has the keys that are not searched."""
        found: dict[str, Values] = {}
        for combination in itertools.product(*(parameter.values for parameter in self.parameters)):
            chosen: Values = {}
            for parameter, value in zip(self.parameters, combination, strict=True):
                if parameter.active({**base, **chosen}):
                    chosen[parameter.key] = value
            found.setdefault(json.dumps(chosen), chosen)
        return list(found.values())


def read_space(described: Mapping[str, Any], where: str = "") -> Space:
    """Reads one space of a space file and returns it as a :class:`Space`. ``described`` maps each searched key to a
    description of its values, such as ``{"train.lr": {"loguniform": [0.01, 1]}}``.

    A description has one of the keys ``uniform``, ``loguniform``, ``int``, ``choice`` and ``grid``, and may have
    ``step``, ``log`` and ``when`` too (:class:`Parameter` says what they mean). Raises :class:`UserError` if a
    description is wrong. Its message begins with ``where``, a text that says which space of which sweep it is.
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
    if kind == "int":
        values = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    if kind in LISTS:
        if "step" in described or "log" in described:
            raise ValueError(f"step and log go with int and uniform, not with {kind}")
        if not values or any(_same(a, b) for a, b in itertools.combinations(values, 2)):
            raise ValueError(f"{kind} needs values, each once, not {list(values)}")
        return Parameter(key, kind, values=tuple(values), when=when)
    return _range(key, kind, values, described.get("step"), described.get("log", False), when)


def _range(key: str, kind: str, ends: list[Any], step: Any, log: Any, when: Any) -> Parameter:
    whole = kind == "int"
    if len(ends) != 2 or not all(_is_number(end, whole) for end in ends) or not ends[0] < ends[1]:
        raise ValueError(f"{kind} needs [low, high], {'whole ' if whole else ''}numbers with low < high, not {ends}")
    if not isinstance(log, bool) or (log and not whole):
        raise ValueError("log is true or false, and goes with int; for numbers with fractions use loguniform")
    if (kind == "loguniform" or log) and ends[0] <= 0:
        raise ValueError(f"on a logarithmic scale low must be above 0, not {ends[0]}")
    low, high = ends
    if step is None:
        return Parameter(key, kind, low=low, high=high, log=log, when=when)
    if log or kind == "loguniform":
        raise ValueError("step goes with a linear scale, not with a logarithmic one")
    # the factor allows for rounding: as floats, 0.3 - 0.1 is less than 0.2
    if not _is_number(step, whole) or step <= 0 or not 1 <= (high - low) / step * (1 + 1e-9) < 1e9:
        raise ValueError(
            f"step must be a{' whole' if whole else ''} number above 0, up to {high - low:g}, not {step!r}"
        )
    parameter = Parameter(key, kind, low=low, step=step, when=when)
    return replace(parameter, high=parameter.at_step(int((_decimal(high) - _decimal(low)) // _decimal(step))))


def _decimal(value: float) -> Decimal:
    """Returns a number in decimals as it is written: 0.1 itself, not the nearest binary fraction."""
    return Decimal(str(value))


def _conditions(described: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    if not isinstance(described, Mapping):
        raise ValueError(f"when must be keys with values, as in {{algorithm.nesterov: [true]}}, not {described!r}")
    conditions = []
    for key, values in described.items():
        several = values if isinstance(values, (list, tuple)) else [values]
        if not several or any(isinstance(value, Mapping) for value in several):
            raise ValueError(
                f"when needs values for a dotted key, as in {{train.lr: [0.1, 0.2]}}, not {{{key}: {values!r}}}"
            )
        conditions.append((str(key), tuple(several)))
    return tuple(conditions)


def _check_order(parameters: Sequence[Parameter], where: str) -> None:
    keys = [parameter.key for parameter in parameters]
    for position, parameter in enumerate(parameters):
        for key, values in parameter.when:
            if key in keys[position:]:
                raise UserError(f"{where}: {parameter.key}: when names {key}, which must come before it")
            for value in values if key in keys else ():
                try:
                    parameters[keys.index(key)].stored(value)
                except ValueError:
                    raise UserError(
                        f"{where}: {parameter.key}: when {key}={value} can never be, because it is not a value of {key}"
                    ) from None


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def first_of(values: Mapping[str, Any], where: str) -> list[Values]:
    """Returns the values that a sweep tries before all others: the section ``first`` of a space file, as a list with a
    dict of values by dotted key for each trial. ``values`` is the content of the file. Without this section the list is
    empty.

    Raises :class:`UserError`, with a message that begins with ``where``, if the section is not a list of mappings.
    """
    first = values.get("first") or []
    if not isinstance(first, list) or not all(isinstance(each, Mapping) for each in first):
        raise UserError(f"{where}first must be a list of values to try, as in [{{algorithm.mu: 0.1}}]")
    return [dict(each) for each in first]
