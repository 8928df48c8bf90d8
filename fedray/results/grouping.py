"""Groups runs by the differences in their configurations.

Runs that differ only in their seeds are repetitions. Together they are one *group*: a line of a picture and a row of a
table. Groups that were run on the same data with the same model are in the same *environment*: a panel of a picture,
and a section of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedray.config import documented_keys
from fedray.errors import UserError, near_miss
from fedray.results.runs import SEEDS, RecordedRun
from fedray.usercode.importing import is_user_defined, short_name

ALGORITHM = "algorithm.name"

NO_PART_OF_A_RESULT = (
    *SEEDS, "run.name", "run.output", "run.working_copy", "run.output_timeout", "run.iterations", "run.resume",
    "run.checkpoint_every", "run.keep_checkpoints", "run.callbacks",
    "run.log_clients", "run.loggers", "run.group", "run.given", "run.eval_every", "run.eval_train_samples",
    "run.eval_clients", "run.eval_local_models", "run.finetune_steps", "run.finetune_layers",
    "run.local_models_of", "run.local_models_in", "run.personal_models_of", "run.targets", "run.last_rounds",
    "run.save_best", "run.diagnostics",
    "data.root", "data.access", "data.least_test_samples",
)  # fmt: skip
"""Keys that may differ between the runs of one group. All keys of ``engine`` may differ as well."""

CHOSEN_FOR_AN_ALGORITHM = (
    "model.head", "model.head.code", "model.proj_dim", "data.public_samples", "data.public_to", "task.loss.code",
)  # fmt: skip
"""Keys that belong to an algorithm, as their defaults do. A difference in them does not make another environment."""

HOW_A_MODEL_IS_TRAINED = ("model.private", "model.trainable", "model.peft.")
"""The beginnings of keys that say which layers of a model are trained, and which stay at the clients. A difference in
them does not make another environment either, because the architecture is the same."""

OF_AN_ENVIRONMENT = ("data.", "task.", "model.")

FIRST = (ALGORITHM, "algorithm.", "data.source", "model.name", "data.", "task.", "model.", "train.", "")
"""The beginnings of keys, in the order in which the names of groups and environments list them."""

KNOWN_BY_THEIR_VALUES = (ALGORITHM, "model.name", "data.source", "data.partition.kind", "model.peft.kind")
"""Keys that a name leaves out, because their values are clear without them, such as ``fedprox``. Where such a value is
``none``, it is left out as well."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seeds, ``runs``. In a comparison they are one row of a table and one line of a
    picture.

    Groups on the same data with the same model form an environment. The settings that differ between groups are in
    three dicts by dotted key: ``values`` has those that distinguish the group from others in its environment, and
    ``environment`` those that distinguish its environment from others. ``further`` has the rest, which distinguish
    nothing more: they are the same wherever ``values`` and ``environment`` are the same. With ``whole`` the group's
    name has the whole names of the user's files, as ``other/mine.py:Mine``, and not only ``Mine``.
    """

    values: Mapping[str, Any]
    environment: Mapping[str, Any]
    further: Mapping[str, Any]
    runs: Sequence[RecordedRun]
    whole: bool = False

    @property
    def algorithm(self) -> str:
        """The name of the algorithm of the group's runs, such as ``fedprox``."""
        return str(self.runs[0].settings.get(ALGORITHM))

    @property
    def label(self) -> str:
        """The name of the group, such as ``fedprox, mu=0.1``, which distinguishes it from others on the same data with
        the same model."""
        return name_of_values(_set_values(self.values) or {ALGORITHM: self.algorithm}, self.whole)

    @property
    def place(self) -> str:
        """The name of the group's environment (the data and the model on which it was run), such as ``alpha=0.1``. It
        is empty if there is only one environment."""
        return name_of_values(self.environment, self.whole)

    @property
    def ended(self) -> list[RecordedRun]:
        """The runs of the group that did not diverge."""
        return [run for run in self.runs if not run.diverged]

    @property
    def has_private_layers(self) -> bool:
        """Whether layers stay at each client. The global model of the group then has their initial values, so that its
        results can't be compared with those of other groups."""
        return any(run.has_private_layers for run in self.runs)


def name_of_values(values: Mapping[str, Any], whole: bool = True) -> str:
    """Returns a short name for a group with the settings ``values`` (by dotted key), such as ``fedprox, mu=0.1``.
    Settings that are not set (null) are left out, unless there are no others. Unless the name is ``whole``,
    user-defined objects have the names of their classes, without their files, and texts in lists have no quotes."""
    values = _set_values(values) or values
    names = [key.rpartition(".")[2] for key in values]
    parts = []
    for (key, value), name in zip(values.items(), names, strict=True):
        text = value if isinstance(value, str) else _number(value) if isinstance(value, float) else _text(value)
        if not whole:
            text = short_name(text) if key in KNOWN_BY_THEIR_VALUES and is_user_defined(text) else text.replace('"', "")
        parts.append(text if key in KNOWN_BY_THEIR_VALUES else f"{name if names.count(name) == 1 else key}={text}")
    return ", ".join(parts)


def _set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``values``, by dotted key, that are set, and that a name therefore shows."""
    unset = {key: (None, "none") if key in KNOWN_BY_THEIR_VALUES else (None,) for key in values}
    return {key: value for key, value in values.items() if value not in unset[key]}


def _number(value: float) -> str:
    """Returns a number as text, in as few digits as show its exact value."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def group_runs(runs: Sequence[RecordedRun], by: Sequence[str] = ()) -> list[Group]:
    """Sorts ``runs`` into groups: the runs of a group differ only in their seeds. Groups that may be compared with each
    other form an environment. Returns the groups in the order of their environments and names.

    The keys ``by`` distinguish the groups of an environment, and all other keys distinguish environments. Without
    ``by``, keys of the data, the task and the model distinguish environments, and all others distinguish groups, also
    those that say which layers of the model are trained or stay at the clients.

    The names of groups and environments leave out a key whose value follows from other keys that they mention, such as
    a learning rate that is the same in all runs of an algorithm. Keys in ``by`` are never left out.

    Raises :class:`UserError` if ``by`` has a key in which no runs differ.
    """
    keys = _keys_that_differ(runs)
    _check(by, keys, runs)
    if by:
        of_groups = list(by)
        of_environments = _independent([key for key in keys if key not in by], of_groups, runs)
    else:
        of_data = [key for key in keys if _is_of_an_environment(key)]
        of_environments = _independent(of_data, [], runs)
        of_groups = _independent([key for key in keys if key not in of_data], of_environments, runs)
    further = [key for key in keys if key not in (*of_groups, *of_environments)]
    groups = []
    for members in _partition(runs, [*of_environments, *of_groups]):
        values = members[0].identity
        groups.append(
            Group(_select(values, of_groups), _select(values, of_environments), _select(values, further), members)
        )
    environments = {_text(group.environment) for group in groups}
    if len({group.place for group in groups}) < len(environments) or len(
        {(group.place, group.label) for group in groups}
    ) < len(groups):  # two files have classes of the same name
        groups = [replace(group, whole=True) for group in groups]
    return sorted(groups, key=lambda group: (*_order(group.environment), *_order(group.values)))


def _select(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _keys_that_differ(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the settings (dotted keys) that differ between any two of the runs that have them, and the digests that
    differ or that some runs lack, in the order of :data:`FIRST`. Keys that may differ within a group are left out."""
    digests = {key: None for run in runs for key in run.digests}
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in (digests | run.identity).items():
            values.setdefault(key, set()).add(_text(value))
    differ = [key for key, each in values.items() if len(each) > 1 and not is_ignored(key)]
    return sorted(differ, key=lambda key: next(place for place, begin in enumerate(FIRST) if key.startswith(begin)))


def is_ignored(key: str) -> bool:
    """Returns whether the configuration's ``key`` may differ between the runs of one group, as ``run.seed``,
    ``run.eval_every`` and all keys of ``engine`` may. Runs that differ only in such keys are repetitions of each
    other."""
    return key in NO_PART_OF_A_RESULT or key.startswith("engine.")


def _is_of_an_environment(key: str) -> bool:
    is_chosen = key in CHOSEN_FOR_AN_ALGORITHM or key.startswith(HOW_A_MODEL_IS_TRAINED)
    return key.startswith(OF_AN_ENVIRONMENT) and not is_chosen


def _independent(keys: Sequence[str], known: Sequence[str], runs: Sequence[RecordedRun]) -> list[str]:
    """Returns those of ``keys`` that carry information: their values do not follow from the keys ``known`` and the keys
    before them."""
    chosen: list[str] = []
    for key in keys:
        if len(_partition(runs, [*known, *chosen, key])) > len(_partition(runs, [*known, *chosen])):
            chosen.append(key)
    return chosen


def _partition(runs: Iterable[RecordedRun], keys: Sequence[str]) -> list[list[RecordedRun]]:
    """Divides ``runs`` into lists: the runs in a list have the same values of ``keys``."""
    found: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in runs:
        identity = run.identity
        found.setdefault(tuple(_text(identity.get(key)) for key in keys), []).append(run)
    return list(found.values())


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _check(by: Sequence[str], differ: Sequence[str], runs: Sequence[RecordedRun]) -> None:
    for key in by:
        if key in differ:
            continue
        if is_ignored(key):
            raise UserError(f"--by {key}: it is no part of a result, so that it never tells groups apart")
        known = {name for run in runs for name in run.identity} | {name for name, *_ in documented_keys()}
        choice = f"; these runs differ in {', '.join(differ)}" if differ else ""
        if key not in known:
            raise UserError(f"--by {key}: there is no such key{near_miss(key, known)}{choice}")
        raise UserError(f"--by {key}: all runs have the same{choice}")


def _order(values: Mapping[str, Any]) -> Iterator[tuple[int, float, str]]:
    """Yields the sort keys of a group's values, so that numbers come before texts and are sorted by size."""
    for value in values.values():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        yield (0, float(value), "") if is_number else (1, 0.0, str(value))
