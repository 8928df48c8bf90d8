"""What a comparison of runs found: environments with their groups, as tables of pandas."""

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
    """Groups that were run on the same data with the same model, the best first.

    ``name`` says in what it differs from other environments; it is empty if there is only one. ``rows`` has what each
    group reached, ``targets`` what it took to reach each target, and ``notes`` what makes the comparison unequal.
    """

    name: str
    groups: Sequence[Group]
    baseline: Group | None
    rows: Sequence[dict[str, Any]]
    targets: Sequence[dict[str, Any]]
    notes: Sequence[str]


@dataclass(frozen=True, eq=False)
class ComparisonTables:
    """What a comparison found, as tables.

    ``over`` is what curves are drawn over. ``last`` is the number of rounds of which the column ``last`` is the mean;
    None stands for the last ten evaluations. ``left_out`` are the run folders that could not be compared, and ``asked``
    is what :func:`~fedray.results.compare.compare` was called with. ``notes`` are the settings in which environments
    differ though their names do not say so.
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
        """The groups of all environments."""
        return [group for each in self.environments for group in each.groups]

    @property
    def runs(self) -> list[RecordedRun]:
        """All runs that were compared."""
        return [run for group in self.groups for run in group.runs]

    @property
    def table(self) -> pd.DataFrame:
        """A row for each group, with the keys in which groups differ, and the columns of
        :func:`~fedray.results.outcomes.outcome`, :func:`~fedray.results.clients.outcome_of_clients` and
        :func:`~fedray.results.outcomes.difference`."""
        return _frame([row for each in self.environments for row in each.rows])

    @property
    def targets(self) -> pd.DataFrame:
        """A row for each group and target, with the columns of :func:`~fedray.results.outcomes.reaching`, and
        ``rounds_speedup``, ``bytes_speedup``, ``flops_speedup`` and ``seconds_speedup``: how many times as much the
        baseline took."""
        return _frame([row for each in self.environments for row in each.targets])

    def curves(self, column: str | None = None) -> pd.DataFrame:
        """Returns the mean curves of all groups, with the columns of :func:`~fedray.results.curves.mean_curve`.

        Args:
            column: a column of metrics.csv; that of the compared metric by default.
        """
        found = [
            mean_curve(group.runs, column or self.measure.column, self.over).assign(
                environment=group.place, group=group.label
            )
            for group in self.groups
        ]
        return pd.concat(found, ignore_index=True)


def _frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Returns rows as a table, in which a tuple of numbers is one cell of text."""
    return pd.DataFrame(
        [{key: " ".join(map(str, x)) if isinstance(x, tuple) else x for key, x in row.items()} for row in rows]
    )
