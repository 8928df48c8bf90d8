"""Repeats a published table from start to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedray.tuning.planned import make_runs, unfinished
from fedray.tuning.planned_view import RunsView
from reproducing.measure import measured
from reproducing.provenance import made_by
from reproducing.report import text_of, write
from reproducing.request import QUICK, Request


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
