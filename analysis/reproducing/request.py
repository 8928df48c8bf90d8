"""What a user asks for: which table, which of its columns and seeds, and where the runs are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedray.errors import UserError, near_miss
from reproducing.published import PublishedTable, read_table

if TYPE_CHECKING:
    from fedray.tuning.planned import Planned

QUICK = 10
"""With ``--quick`` a run has one round for each so many of the paper's."""


@dataclass(frozen=True)
class Request:
    """What is asked for: ``name`` of the table, ``columns`` of it (all if there are none), ``seeds`` (the paper's if it
    is None), whether it is ``quick``: one seed and a tenth of the rounds; and the folder for everything."""

    name: str
    columns: Sequence[str] = ()
    seeds: int | None = None
    quick: bool = False
    output: Path = Path("reproduced")

    @property
    def runs(self) -> Path:
        """The folder of all runs. Quick ones are kept apart."""
        return self.output / ("quick-runs" if self.quick else "runs")

    def table(self) -> PublishedTable:
        """Returns the table with the columns that are asked for. Raises :class:`UserError` for an unknown one."""
        table = read_table(self.name)
        for column in self.columns:
            if column not in table.columns:
                raise UserError(f"--column: {self.name} has no column {column!r}{near_miss(column, table.columns)}")
        if not self.columns:
            return table
        cells = [cell for cell in table.cells if cell.column in self.columns]
        return replace(table, columns=list(self.columns), cells=cells)

    def rounds(self, papers: int) -> int:
        """Returns how many rounds a run has, if the paper's has so many."""
        return max(2, papers // QUICK) if self.quick else papers

    def seeds_of(self, table: PublishedTable) -> int:
        """Returns how many seeds each cell has."""
        return self.seeds or (1 if self.quick else table.seeds)

    def planned(self, table: PublishedTable) -> list[Planned]:
        """Returns all runs of the table, each once. Raises :class:`UserError` if a column names fewer seeds than are
        asked for."""
        found: dict[str, Planned] = {}
        fewest = min((len(cell.chosen_seeds) for cell in table.cells if cell.chosen_seeds), default=math.inf)
        if self.seeds is not None and self.seeds > fewest:
            raise UserError(f"--seeds {self.seeds}: {self.name} has columns with {fewest} chosen seeds, and no others")
        for cell in table.cells:
            more = {}
            if self.quick:
                more = {"run.rounds": self.rounds(cell.config({}).rounds), "run.iterations": None}
            for run in cell.planned(self.seeds_of(table), more):
                found.setdefault(run.folder, run)
        return list(found.values())
