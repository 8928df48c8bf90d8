"""Groups runs by what differs in their configurations.

Runs that differ in their seeds alone are repetitions: together they are one *group*, a line of a picture and a row of a
table. Groups that were run on the same data with the same model stand in the same *environment*: a panel of a picture,
and a section of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.config import documented_keys
from fedray.errors import UserError, near_miss
from fedray.results.runs import SEEDS, Run

ALGORITHM = "algorithm.name"

NO_PART_OF_A_RESULT = (
    *SEEDS, "run.name", "run.output", "run.iterations", "run.resume", "run.checkpoint_every", "run.keep_checkpoints",
    "run.log_clients", "run.given", "run.eval_every", "run.eval_train_samples", "run.eval_clients",
    "run.finetune_steps", "run.targets", "run.last_rounds", "run.save_best", "run.diagnostics", "data.root",
    "data.access", "data.least_test_samples",
)  # fmt: skip
"""Keys in which runs of one group may differ, as in any key of ``engine``."""

CHOSEN_FOR_AN_ALGORITHM = ("model.head", "model.proj_dim", "data.public_samples", "data.public_to")
"""Keys that an algorithm chooses for itself unless they are set, so that they do not make another environment."""

OF_AN_ENVIRONMENT = ("data.", "task.", "model.")

FIRST = (ALGORITHM, "algorithm.", "data.source", "model.name", "data.", "task.", "model.", "train.", "")
"""The beginnings of keys, in the order in which names of groups and environments have them."""

KNOWN_BY_THEIR_VALUES = (ALGORITHM, "model.name", "data.source", "data.partition.kind")
"""Keys whose values say in a name what they are."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in their seeds alone.

    ``own`` are the values in which the group differs from others of its environment, by dotted key, and ``environment``
    those in which its environment differs from others. ``further`` are further values in which groups differ; they
    follow from the others.
    """

    own: Mapping[str, Any]
    environment: Mapping[str, Any]
    further: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """The name of the group within its environment, as ``fedprox, mu=0.1``."""
        return shown(self.own) or str(self.runs[0].settings.get(ALGORITHM))

    @property
    def told(self) -> list[str]:
        """The keys that tell the group from all others."""
        return [*self.environment, *self.own]

    @property
    def place(self) -> str:
        """The name of the environment, as ``alpha=0.1``; empty if there is only one."""
        return shown(self.environment)


def shown(values: Mapping[str, Any]) -> str:
    """Returns values by dotted key as a short text: ``fedprox, mu=0.1``."""
    names = [key.rpartition(".")[2] for key in values]
    parts = []
    for (key, value), name in zip(values.items(), names, strict=True):
        text = value if isinstance(value, str) else _number(value) if isinstance(value, float) else _text(value)
        is_plain = names.count(name) == 1
        parts.append(text if key in KNOWN_BY_THEIR_VALUES else f"{name if is_plain else key}={text}")
    return ", ".join(parts)


def _number(value: float) -> str:
    """Returns a number in few digits, but never as another one."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """Returns the groups of ``runs``, in the order of their environments and names.

    The groups of an environment differ in the keys ``by``, and environments in all others. Without ``by``, environments
    differ in keys of the data, the task and the model, and groups in all others. A key that follows from those before
    it, because all runs with the same values of these have one value of it, is no part of a name.

    Raises :class:`UserError` if ``by`` has a key in which no runs differ.
    """
    keys = _keys_that_differ(runs)
    _check(by, keys, runs)
    if by:
        own = list(by)
        environment = _that_refine([key for key in keys if key not in by], own, runs)
    else:
        aside = [key for key in keys if key.startswith(OF_AN_ENVIRONMENT) and key not in CHOSEN_FOR_AN_ALGORITHM]
        environment = _that_refine(aside, [], runs)
        own = _that_refine([key for key in keys if key not in aside], environment, runs)
    further = [key for key in keys if key not in (*own, *environment)]
    same = _alike(runs, [*environment, *own])
    groups = [Group(_of(each[0], own), _of(each[0], environment), _of(each[0], further), each) for each in same]
    return sorted(groups, key=lambda group: (*_order(group.environment), *_order(group.own)))


def _keys_that_differ(runs: Iterable[Run]) -> list[str]:
    """Returns the keys whose values differ between any two runs that have them, in the order of :data:`FIRST`."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.told.items():
            values.setdefault(key, set()).add(_text(value))
    differ = [key for key, each in values.items() if len(each) > 1 and not is_aside(key)]
    return sorted(differ, key=lambda key: next(place for place, begin in enumerate(FIRST) if key.startswith(begin)))


def is_aside(key: str) -> bool:
    return key in NO_PART_OF_A_RESULT or key.startswith("engine.")


def _that_refine(keys: Sequence[str], given: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Returns those of ``keys`` that do not follow from ``given`` and those before them."""
    chosen: list[str] = []
    groups = len(_alike(runs, given))
    for key in keys:
        finer = len(_alike(runs, [*given, *chosen, key]))
        if finer > groups:
            chosen.append(key)
            groups = finer
    return chosen


def _alike(runs: Iterable[Run], keys: Sequence[str]) -> list[list[Run]]:
    """Returns the runs that have the same values of ``keys``, together."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        told = run.told
        found.setdefault(tuple(_text(told.get(key)) for key in keys), []).append(run)
    return list(found.values())


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _of(run: Run, keys: Iterable[str]) -> dict[str, Any]:
    told = run.told
    return {key: told[key] for key in keys if key in told}


def _check(by: Sequence[str], differ: Sequence[str], runs: Sequence[Run]) -> None:
    for key in by:
        if key in differ:
            continue
        if is_aside(key):
            raise UserError(f"--by {key}: it is no part of a result, so that it never tells groups apart")
        known = {name for run in runs for name in run.told} | {name for name, *_ in documented_keys()}
        choice = f"; these runs differ in {', '.join(differ)}" if differ else ""
        if key not in known:
            raise UserError(f"--by {key}: there is no such key{near_miss(key, known)}{choice}")
        raise UserError(f"--by {key}: all runs have the same{choice}")


def _order(values: Mapping[str, Any]) -> Iterable[tuple[int, float, str]]:
    """Returns what values are sorted by: numbers by size, and before texts."""
    for value in values.values():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        yield (0, float(value), "") if is_number else (1, 0.0, str(value))
