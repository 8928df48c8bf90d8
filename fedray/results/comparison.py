"""The result of a comparison: environments with their groups, as pandas tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedray.results.curves import mean_curve
from fedray.results.grouping import Group
from fedray.results.measure import Measure
from fedray.results.runs import LeftOut, RecordedRun


@dataclass(frozen=True, eq=False)
class Environment:
    """One part of a comparison: groups of runs that used the same data and the same model, the best group first. Only
    such groups are compared with each other.

    ``name`` has the settings that distinguish this environment from others, such as ``alpha=0.1``; it is empty if there
    is only one environment. ``baseline`` is the group with which the others are compared, or None if there is none.

    ``rows`` are the rows of :attr:`ComparisonTables.table` for this environment: for each group, in the order of
    ``groups``, a dict of its results by column. ``targets`` are the rows of :attr:`ComparisonTables.targets`: for each
    target value of the metric and each group, a dict that says what it took the group to reach the target. ``notes``
    are lines for the user about what makes the comparison unequal.
    """

    name: str
    groups: Sequence[Group]
    baseline: Group | None
    rows: Sequence[dict[str, Any]]
    targets: Sequence[dict[str, Any]]
    notes: Sequence[str]


@dataclass(frozen=True, eq=False)
class ComparisonTables:
    """The result of a comparison of runs, as tables.

    * ``environments``: its parts, each with the groups of runs that used the same data and the same model.
    * ``measure``: the metric by which runs are compared.
    * ``over``: the x-axis of the curves, a key of :data:`~fedray.results.measure.AXES` such as ``rounds``.
    * ``last``: the number of rounds over which the column ``last`` is the mean; None means the last ten evaluations.
    * ``left_out``: the run folders that could not be compared, with the reasons.
    * ``asked``: the arguments of :func:`~fedray.results.compare.compare` by name.
    * ``notes``: lines about settings that differ between environments although the environments' names do not show it.
    """

    environments: Sequence[Environment]
    measure: Measure
    over: str
    last: int | None
    left_out: Sequence[LeftOut]
    asked: Mapping[str, Any]
    notes: Sequence[str]

    @property
    def groups(self) -> list[Group]:
        """The compared groups (runs that differ only in their seeds) of all environments."""
        return [group for each in self.environments for group in each.groups]

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs that were compared, without the ones that were left out."""
        return [run for group in self.groups for run in group.runs]

    @property
    def table(self) -> pd.DataFrame:
        """The results of all groups: a DataFrame with a row for each group.

        Its columns are ``environment`` and ``group`` (their names), the keys in which groups differ, and the columns of
        :func:`~fedray.results.outcomes.outcome` (such as ``final``), :func:`~fedray.results.clients.outcome_of_clients`
        and :func:`~fedray.results.outcomes.difference`.
        """
        return _frame([row for each in self.environments for row in each.rows])

    @property
    def targets(self) -> pd.DataFrame:
        """What it took each group to reach each target: a DataFrame with a row for each group and target.

        Its columns are ``environment`` and ``group`` (their names), the keys in which groups differ, the columns of
        :func:`~fedray.results.outcomes.reaching` (such as ``rounds_to``), and ``rounds_speedup`` and so on, which
        are the baseline's amounts divided by the group's.
        """
        return _frame([row for each in self.environments for row in each.targets])

    def curves(self, column: str | None = None) -> pd.DataFrame:
        """Returns the mean learning curves of all groups in one DataFrame, with a row for each group and evaluated
        round.

        Its columns are ``environment`` and ``group`` (their names), and those of
        :func:`~fedray.results.curves.mean_curve`, such as ``x``, ``mean``, ``low`` and ``high``.

        Args:
            column: the column of metrics.csv whose mean is computed; by default the one of the compared metric.
        """
        found = [
            mean_curve(group.runs, column or self.measure.column, self.over).assign(
                environment=group.place, group=group.label
            )
            for group in self.groups
        ]
        return pd.concat(found, ignore_index=True)


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Returns ``rows``, dicts by column, as a DataFrame, in which a tuple of numbers becomes a text such as
    ``0.91 0.92``."""
    return pd.DataFrame(
        [{key: " ".join(map(str, x)) if isinstance(x, tuple) else x for key, x in row.items()} for row in rows]
    )
