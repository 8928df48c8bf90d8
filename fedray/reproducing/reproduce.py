"""Repeats a published table from start to end, and lists what can be repeated."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedray.errors import UserError, near_miss
from fedray.reproducing.measure import measured
from fedray.reproducing.provenance import made_by
from fedray.reproducing.published import EXPERIMENTS, Cell, Planned, PublishedTable, known_tables, read_table
from fedray.reproducing.report import text_of, write
from fedray.reproducing.runs import Say, make_runs
from fedray.tuning.finals import is_finished

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

    def seeds_of(self, table: PublishedTable) -> int:
        """Returns how many seeds each cell has."""
        return self.seeds or (1 if self.quick else table.seeds)

    def planned(self, table: PublishedTable) -> list[Planned]:
        """Returns all runs of the table, each once."""
        found: dict[str, Planned] = {}
        for cell in table.cells:
            more = {}
            if self.quick:
                more = {"run.rounds": max(2, cell.config({}).rounds // QUICK), "run.iterations": None}
            for run in cell.planned(self.seeds_of(table), more):
                found.setdefault(run.folder, run)
        return list(found.values())


def reproduce(request: Request, say: Say) -> tuple[str, list[Path], int, bool]:
    """Makes the runs that a table lacks, and writes it beside what was published.

    Returns the table as a text, the files, how many runs failed, and whether the user stopped it.
    """
    table = request.table()
    failures, stopped = make_runs(request.planned(table), request.runs, say)
    seeds = request.seeds_of(table)
    found = measured(table, request.runs, seeds)
    options = [f"--column '{each}'" for each in request.columns]
    options += [f"--seeds {request.seeds}"] if request.seeds else []
    options += ["--quick"] if request.quick else []
    asked = {"command": " ".join(["fedray reproduce", request.name, *options]), "seeds": seeds}
    made = made_by(asked, (run for one in found for run in one.runs))
    paths = write(table, found, request.output / f"{request.name}{'-quick' if request.quick else ''}", made)
    return text_of(table, found, made), paths, failures, stopped


def listing(output: Path) -> Iterator[tuple[str, str, int, int, float]]:
    """Yields for each table its name and title, how many runs it has and how many of them have ended in ``output``, and
    the hours that all take at most on 2 processors (NaN if that was not measured)."""
    with (EXPERIMENTS / "costs.csv").open() as file:
        costs = {row["experiment"]: row for row in csv.DictReader(file)}
    for name in known_tables():
        request = Request(name, output=output)
        table = request.table()
        seeds = request.seeds_of(table)
        cells = {cell.name: cell for cell in table.cells}
        done = sum(is_finished(request.runs / cell / f"seed-{seed}") for cell in cells for seed in range(seeds))
        hours = math.fsum(seeds * _hours(cell, costs) for cell in cells.values())
        yield name, table.title, seeds * len(cells), done, hours


def _hours(cell: Cell, costs: Mapping[str, Mapping[str, str]]) -> float:
    """Returns the hours of a run of a cell on 2 processors.

    They are those that were measured of its experiment (analysis/experiments/costs.csv), times what the cell's settings
    change in rounds, clients in a round and local steps.
    """
    row = costs.get(f"{cell.file.parent.name}/{cell.file.stem}")
    if row is None:
        return math.nan
    config = cell.config({})
    cohort = config.train.cohort_size or config.data.clients
    now = {"rounds": config.rounds, "cohort": cohort, "local_steps": config.train.local_steps}
    factors = [value / float(row[key]) for key, value in now.items() if value is not None]
    return math.prod([float(row["hours_per_run"]), *factors])
