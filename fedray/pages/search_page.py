"""The pages about a sweep and about a suite: their tables, and the figures that Optuna and fedray draw of them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from fedray.results.html_page import Page, Picture, Section
from fedray.results.tables import Table, in_units
from fedray.tuning.report import rank_trials, trial_table, write_report
from fedray.tuning.spec import SweepSpec
from fedray.tuning.suite import Suite
from fedray.tuning.suite_table import suite_for_people, write_suite

CAPTIONS = {
    "history": "the objective of each trial, in the order in which they ended, and the best so far",
    "slices": "the objective over each searched key",
    "importance": "how much each searched key matters for the objective (PED-ANOVA)",
    "contour": "the objective over the two keys that matter most",
    "curves": "the objective while trials run; the darker a line, the better the trial",
    "pareto": "the trials of which no other is better in all objectives",
}
"""Captions of the pictures in a sweep's report, by the beginning of their file names."""

UNITS_OF = {"bytes": "B", "flops": "FLOP", "joules": "J"}
"""The units of columns."""

MOST_TRIALS = 50
"""The largest number of trials that the page lists. All trials are in trials.csv."""


def sweep_page(spec: SweepSpec) -> Page:
    """Returns the HTML page about a sweep (a search over hyper-parameters), which ``fedray report`` writes to a file.
    It shows the table of the sweep's trials, and pictures of them. These tables and pictures are also written into the
    folder ``report`` of the sweep."""
    section = _of_sweep(spec)
    return Page(f"Sweep {spec.name}", [str(spec.folder.resolve())], [section])


def suite_page(suite: Suite) -> Page:
    """Returns the HTML page about a suite (a comparison of algorithms), which ``fedray report`` writes to a file. It
    shows the table of the best trials, which ran again on seeds that no trial had used, and the results of the search
    for each algorithm. The table is also written into the suite's folder, and a report of each search into the search's
    folder."""
    _, _, curves = write_suite(suite)
    table, notes = suite_for_people(suite)
    winners = Section(
        "The winners on fresh seeds",
        tables=[Table(f"suite {suite.name}", _texts(table).rename(columns={"algorithm": ""}))],
        pictures=[Picture.of_file("the winners' metric on the test set", curves)],
    )
    sections = [winners, *map(_of_sweep, suite.specs)]
    if notes:
        sections.append(Section("How to read this", paragraphs=[notes.replace("`", "")]))
    return Page(f"Suite {suite.name}", [str(suite.folder.resolve())], sections)


def _of_sweep(spec: SweepSpec) -> Section:
    written = write_report(spec)
    objective, mode = next(iter(spec.tune.objective.items()))
    table = rank_trials(trial_table(spec.folder), objective, mode)
    shown = table.head(MOST_TRIALS)
    title = f"trials, the best first; {objective}, {'lower' if mode == 'min' else 'higher'} is better"
    if len(table) > len(shown):
        title += f" ({len(shown)} of {len(table)}; trials.csv has all)"
    space = ", ".join(f"{key} {json.dumps(values, default=str)}" for key, values in spec.raw_space.items())
    return Section(
        spec.name,
        tables=[Table(title, _texts(shown))] if len(shown) else [],
        pictures=[Picture.of_file(_caption(path), path) for path in written if path.suffix == ".png"],
        paragraphs=[f"Searched: {space}.".replace('"', "")],
    )


def _texts(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table for the page, with texts as cells: numbers with four digits (or all digits before the point),
    bytes and FLOPs with units, and empty cells for missing values."""

    def text(value: object, unit: str) -> str:
        return in_units(value, unit) if isinstance(value, float) else "" if value is None else str(value)

    return pd.DataFrame({name: [text(x, UNITS_OF.get(str(name), "")) for x in table[name]] for name in table})


def _caption(path: Path) -> str:
    return next((text for name, text in CAPTIONS.items() if path.stem.startswith(name)), path.stem)
