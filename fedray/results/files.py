"""Writes a comparison: tables as CSV, Markdown and LaTeX, pictures, and a page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedray.errors import UserError
from fedray.results.comparison import Compared, Environment
from fedray.results.figure_files import save
from fedray.results.number_pictures import number_figures
from fedray.results.page import Page, Picture, Section
from fedray.results.panel import BAND
from fedray.results.pictures import curves_figure, environment_figures
from fedray.results.tables import Table, latex, markdown, plain_markdown, tables_of
from fedray.util.files import write_whole

MARK = "comparison.json"
"""The file by which a folder of a comparison is known."""

UNEQUAL = "To be known when these groups are compared:"

BETWEEN = "To be known when these tables are compared with each other:"

NOTES = (
    "Runs that differ in their seeds alone are one group. `±` is half the width of the 95 % confidence interval of the "
    "mean (Student's t) over these runs; of one run or two the values are shown.",
    "A run that diverged is counted, is in no mean, and has not reached the target.",
    "Differences are those of runs with the same seeds and the same samples on each client. p is that of the paired "
    "t-test, corrected by Holm's rule for all groups of the table that have one; the intervals are not corrected.",
    "What it took to reach the target are medians over all runs. A run that did not reach it counts as infinite, and "
    "`> R` says that the median is above R, the least that a run took which did not reach it; `diverged` says that all "
    "runs that did not reach it diverged. In brackets stands how many times as much the baseline took.",
    "Curves have a point for each round in which all runs of the group were evaluated that did not diverge.",
)
"""What the tables' words mean."""

COMMON = (
    "data.source", "data.clients", "data.partition.kind", "data.partition.alpha", "model.name", "train.cohort_size",
    "train.local_steps", "train.local_epochs", "train.batch_size", "train.lr", "run.rounds",
)  # fmt: skip
"""Keys that say what runs are; their values are told where they are the same in all."""


def write(comparison: Compared, folder: Path) -> list[Path]:
    """Writes a comparison into ``folder``, and returns the paths of the files.

    Raises :class:`UserError` if the folder can't be written to, or holds something else than this comparison.
    """
    check_place(folder, comparison)
    paths = {name: folder / name for name in (MARK, "comparison.csv", "comparison.md", "comparison.tex", "targets.csv")}
    tables = [
        replace(table, title=": ".join(filter(None, [each.name, table.title])))
        for each in comparison.environments
        for table in tables_of(comparison, each)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(paths[MARK], json.dumps(_facts(comparison), indent=2) + "\n")
        write_whole(paths["comparison.csv"], comparison.table.to_csv(index=False))
        write_whole(paths["targets.csv"], comparison.targets.to_csv(index=False))
        write_whole(paths["comparison.md"], "\n".join([*map(_markdown, tables), *_lines(comparison)]))
        write_whole(paths["comparison.tex"], "\n".join(map(latex, tables)))
        pictures = save(curves_figure(comparison), folder, "curves")
        page = folder / "report.html"
        write_whole(page, page_of(comparison).html())
    except OSError as error:
        raise UserError(f"can't write {folder}: {error.strerror or error}") from None
    return [*paths.values(), *pictures, page]


def check_place(folder: Path, comparison: Compared) -> None:
    """Raises :class:`UserError` if a comparison can't be written into ``folder``, because something else is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not _holds(folder, comparison):
        raise UserError(f"{folder} holds something else than this comparison: name another folder by --output")


def place_of(comparison: Compared, beside: Path) -> Path:
    """Returns a folder in ``beside`` in which there is nothing yet, or an older result of the same comparison."""
    for number in itertools.count(1):
        folder = beside / (f"comparison-{number}" if number > 1 else "comparison")
        if not folder.exists() or _holds(folder, comparison):
            return folder
    raise AssertionError


def _holds(folder: Path, comparison: Compared) -> bool:
    try:
        there = json.loads((folder / MARK).read_text())
        return bool(there["asked"] == json.loads(json.dumps(_facts(comparison)["asked"])))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _facts(comparison: Compared) -> dict[str, Any]:
    runs = [run for each in comparison.environments for group in each.groups for run in group.runs]
    return {
        "asked": dict(comparison.asked),
        "runs": [{"folder": str(run.folder), "model_sha256": run.summary.get("model_sha256")} for run in runs],
        "left_out": {str(each.folder): each.reason for each in comparison.left_out},
    }


def lines(comparison: Compared) -> Iterator[str]:
    """Yields the lines that the command shows: the first tables of each environment, and what makes it unequal."""
    for environment in comparison.environments:
        if environment.name:
            yield f"{environment.name}"
        targets = {row["target"] for row in environment.targets}
        for table in itertools.islice(tables_of(comparison, environment), 1 + len(targets)):
            yield f"{table.title}:"
            yield from _aligned(table)
        if environment.notes:
            yield UNEQUAL
            yield from (f"  {note}" for note in environment.notes)
        yield ""
    if comparison.notes:
        yield BETWEEN
        yield from (f"  {note}" for note in comparison.notes)
        yield ""
    for each in comparison.left_out:
        yield f"left out {each.folder}: {each.reason}"


def _aligned(table: Table) -> Iterator[str]:
    """Yields the lines of a table in a type of one width; the names of its rows are aligned at the left."""
    names = table.cells.iloc[:, 0]
    width = max(map(len, names))
    cells = table.cells.assign(**{str(names.name): names.str.ljust(width)})
    yield from (f"  {line}".rstrip() for line in cells.to_string(index=False).splitlines())


def _markdown(table: Table) -> str:
    return f"**{plain_markdown(table.title)}**\n\n{markdown(table.cells)}"


def _lines(comparison: Compared) -> Iterator[str]:
    """Yields the lines under the tables: what makes them unequal, what is left out, and what the words mean."""
    told = [(f"{each.name}: {UNEQUAL}" if each.name else UNEQUAL, each.notes) for each in comparison.environments]
    left_out = [f"{each.folder}: {each.reason}" for each in comparison.left_out]
    for title, notes in [*told, (BETWEEN, comparison.notes), ("Left out:", left_out)]:
        if notes:
            yield f"{plain_markdown(title)}\n"
            yield "\n".join(f"* {plain_markdown(note)}" for note in notes) + "\n"
    yield " ".join(NOTES) + "\n"


def page_of(comparison: Compared) -> Page:
    """Returns the page of a comparison."""
    runs = [run for each in comparison.environments for group in each.groups for run in group.runs]
    sections = [_section(comparison, each) for each in comparison.environments]
    over = [Picture.of(caption, figure) for caption, figure in number_figures(comparison)]
    if over:
        warned = BETWEEN if comparison.notes else ""
        sections.append(
            Section("Over a number in which groups differ", pictures=over, warnings=comparison.notes, warned=warned)
        )
    if comparison.left_out:
        lines = [f"{each.folder}: {each.reason}" for each in comparison.left_out]
        sections.append(Section("Left out", warnings=lines, warned="These folders are in no table:"))
    sections.append(
        Section(
            "How to read this", paragraphs=[note.replace("`", "") for note in (*NOTES, f"In the pictures, {BAND}.")]
        )
    )
    groups = sum(len(each.groups) for each in comparison.environments)
    made_by = {f"fedray {v.get('fedray')}, torch {v.get('torch')}" for v in (run.versions for run in runs)}
    lead = [f"{len(runs)} runs in {groups} groups, made by {' and '.join(sorted(made_by))}."]
    if common := common_settings(comparison):
        lead.append(f"In all of them: {common}.")
    return Page("Comparison of runs", lead, sections)


def common_settings(comparison: Compared) -> str:
    """Returns the settings that say what runs are, as far as all runs have the same."""
    runs = [run for each in comparison.environments for group in each.groups for run in group.runs]
    values = {key: {json.dumps(run.settings.get(key)) for run in runs} for key in COMMON}
    same = {key: json.loads(next(iter(each))) for key, each in values.items() if len(each) == 1}
    return ", ".join(f"{key}={value}" for key, value in same.items() if value is not None)


def _section(comparison: Compared, environment: Environment) -> Section:
    pictures = [Picture.of(caption, figure) for caption, figure in environment_figures(comparison, environment)]
    return Section(
        environment.name or "The groups",
        tables=list(tables_of(comparison, environment)),
        pictures=pictures,
        warnings=environment.notes,
        warned=UNEQUAL if environment.notes else "",
    )
