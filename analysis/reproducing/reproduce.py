"""Repeats a published table from start to end, and lists what can be repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedray.errors import UserError, near_miss
from fedray.tuning.planned import Planned, make_runs, unfinished
from fedray.tuning.planned_view import RunsView
from reproducing.costs import Costs, TableCost
from reproducing.measure import measured
from reproducing.provenance import made_by
from reproducing.published import PublishedTable, known_tables, read_table
from reproducing.report import text_of, write

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


def reproduce(request: Request, say: Callable[[str], None]) -> tuple[str, list[Path], int, bool]:
    """Makes the runs that a table lacks, and writes it beside what was published.

    Returns the table as a text, the files, how many runs failed, and whether the user stopped it.
    """
    table = request.table()
    done = make_runs(unfinished(request.planned(table), request.runs), request.runs, RunsView(say))
    if request.quick:
        cells = [replace(each, round=each.round and max(1, each.round // QUICK)) for each in table.cells]
        table = replace(table, title=f"{table.title} (--quick: with a tenth of these rounds)", cells=cells)
    seeds = request.seeds_of(table)
    found = measured(table, request.runs, seeds)
    options = [f"--column '{each}'" for each in request.columns]
    options += [f"--seeds {request.seeds}"] if request.seeds else []
    options += ["--quick"] if request.quick else []
    asked = {"command": " ".join(["python analysis/reproduce.py", request.name, *options]), "seeds": seeds}
    made = made_by(asked, (run for one in found for run in one.runs))
    paths = write(table, found, request.output / f"{request.name}{'-quick' if request.quick else ''}", made)
    return text_of(table, found, made), paths, len(done.failures), done.interrupted


def listing(requests: Sequence[Request], output: Path) -> tuple[list[tuple[str, str, TableCost]], float | None]:
    """Returns the name and title of each table that is asked for, and what its runs take that have not ended.

    ``output`` is the folder of all requests. Raises :class:`UserError` if there is no such table or column. The second
    value says how many times as long as expected the runs took that have ended in ``output`` (:class:`Costs`).
    """
    asked = [(request, request.table()) for request in requests]
    known = [read_table(name) for name in known_tables()]
    costs = Costs(output / "runs", [(cell, table.seeds) for table in known for cell in table.cells])
    found = [
        (table.name, table.title, costs.of(table.cells, request.seeds_of(table), request.runs, request.rounds))
        for request, table in asked
    ]
    return found, costs.slowness
