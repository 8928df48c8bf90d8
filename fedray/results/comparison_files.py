"""Writes a comparison: tables as CSV, Markdown and LaTeX, pictures, and a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedray.errors import UserError
from fedray.results.comparison import ComparisonTables
from fedray.results.html_page import Page, Picture, Section
from fedray.results.number_pictures import number_figures
from fedray.results.output_folder import Output
from fedray.results.panel import BAND
from fedray.results.pictures import curves_figure, environment_figures, figures_of
from fedray.results.style import paths_of_picture, save, styled
from fedray.results.tables import Table, latex, markdown, plain_markdown, tables_of
from fedray.util.files import write_whole

MARK = "comparison.json"
"""The file that marks a folder as the output of a comparison."""

UNEQUAL = "Keep in mind when comparing these groups:"

BETWEEN = "Keep in mind when comparing these tables with each other:"

NOTES = (
    "Runs that differ only in their seeds are one group. `±` is half the width of the 95 % confidence interval of the "
    "mean (Student's t) over these runs; of one run or two the values are shown.",
    "A run that diverged is counted, is in no mean, and has not reached the target.",
    "Differences are those of runs with the same seeds and the same samples on each client. p is that of the paired "
    "t-test, corrected by Holm's rule for all groups of the table that have one; the intervals are not corrected.",
    "What it took to reach the target is the median over all runs. A run that did not reach it counts as infinite, and "
    "`> R` says that the median is above R, that of what each run took at least; `diverged` says that at least half of "
    "the runs diverged. The number in brackets says how many times as much the baseline took.",
    "Curves have a point for each round in which all runs of the group were evaluated that did not diverge.",
)
"""Explanations of the words in the tables."""

COMMON = (
    "data.source", "data.clients", "data.partition.kind", "data.partition.alpha", "model.name", "train.cohort_size",
    "train.local_steps", "train.local_epochs", "train.batch_size", "train.lr", "run.rounds",
)  # fmt: skip
"""Keys that describe the runs. The page shows their values if they are the same in all runs."""


def output_of(comparison: ComparisonTables) -> Output:
    """Returns an :class:`Output`, which chooses the folder for the files of ``comparison`` so that nothing else is
    overwritten. A folder may be written again only if it holds an older result of the same comparison, that is, if its
    comparison.json records the same arguments."""
    return Output("comparison", MARK, {"asked": comparison.asked})


def write(comparison: ComparisonTables, folder: Path, style: str = "page") -> list[Path]:
    """Writes a comparison into ``folder``, and returns the paths of the files.

    They are the tables (comparison.csv, .md and .tex, targets.csv), curves.png and .svg, the page report.html, and
    comparison.json, which records what was compared and names the files. ``style`` is the style of the curves; with
    "paper" there are also curves.pdf and, for each further picture, figure-1.pdf and so on. Files of an older result in
    the folder that are not written again are removed. Raises :class:`UserError` if the folder can't be written to, or
    holds something else than this comparison.
    """
    output_of(comparison).check(folder)
    texts = _texts(comparison)
    try:
        with styled(style):
            figures = {"curves": curves_figure(comparison)}
            if style == "paper":
                figures |= {f"figure-{number}": each for number, (_, each) in enumerate(figures_of(comparison), 1)}
            pictures = [path for name in figures for path in paths_of_picture(folder, name)]
            paths = [folder / MARK, *(folder / name for name in texts), *pictures, folder / "report.html"]
            folder.mkdir(parents=True, exist_ok=True)
            for obsolete in {*_older_files(folder)} - {*paths}:
                obsolete.unlink(missing_ok=True)
            write_whole(folder / MARK, json.dumps(_record(comparison, paths), indent=2) + "\n")
            for name, text in texts.items():
                write_whole(folder / name, text)
            for name, figure in figures.items():
                save(figure, folder, name)
        write_whole(paths[-1], page_of(comparison).html())
    except OSError as error:
        raise UserError(f"can't write {folder}: {error.strerror or error}") from None
    return paths


def _texts(comparison: ComparisonTables) -> dict[str, str]:
    """Returns the contents of the files with tables, by the names of the files."""
    tables = [
        replace(table, title=": ".join(filter(None, [each.name, table.title])))
        for each in comparison.environments
        for table in tables_of(comparison, each)
    ]
    return {
        "comparison.csv": comparison.table.to_csv(index=False),
        "comparison.md": "\n".join([*map(_markdown, tables), *_lines_below(comparison)]),
        "comparison.tex": "\n".join(map(latex, tables)),
        "targets.csv": comparison.targets.to_csv(index=False),
    }


def _record(comparison: ComparisonTables, paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the content of comparison.json."""
    return {
        "asked": dict(comparison.asked),
        "runs": [
            {"folder": str(run.folder), "model_sha256": run.summary.get("model_sha256")} for run in comparison.runs
        ],
        "left_out": {str(each.folder): each.reason for each in comparison.left_out},
        "files": [path.name for path in paths],
    }


def _older_files(folder: Path) -> list[Path]:
    """Returns the files of the older result in ``folder``, as its comparison.json names them; none if there is none, or
    one of an older version, which did not name them."""
    mark = folder / MARK
    return [folder / Path(name).name for name in json.loads(mark.read_text()).get("files", [])] if mark.exists() else []


def lines(comparison: ComparisonTables) -> Iterator[str]:
    """Yields the lines of text that ``fedray compare`` prints: for each environment all tables but that of the costs of
    whole runs, then what makes the groups unequal, and at the end the runs that were left out."""
    for environment in comparison.environments:
        if environment.name:
            yield environment.name
        *shown, _ = tables_of(comparison, environment)
        for table in shown:
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
    yield from (f"left out {each}" for each in _left_out(comparison))


def _aligned(table: Table) -> Iterator[str]:
    """Yields the lines of a table as it is printed on a terminal. The names of the rows are aligned at the left."""
    names = table.cells.iloc[:, 0]
    width = max(map(len, names))
    cells = table.cells.assign(**{str(names.name): names.str.ljust(width)})
    yield from (f"  {line}".rstrip() for line in cells.to_string(index=False).splitlines())


def _markdown(table: Table) -> str:
    return f"**{plain_markdown(table.title)}**\n\n{markdown(table.cells)}"


def _lines_below(comparison: ComparisonTables) -> Iterator[str]:
    """Yields the text below the tables in comparison.md: what makes groups unequal, which runs are left out, and what
    the words mean."""
    unequal = [(f"{each.name}: {UNEQUAL}" if each.name else UNEQUAL, each.notes) for each in comparison.environments]
    for title, notes in [*unequal, (BETWEEN, comparison.notes), ("Left out:", _left_out(comparison))]:
        if notes:
            yield f"{plain_markdown(title)}\n"
            yield "\n".join(f"* {plain_markdown(note)}" for note in notes) + "\n"
    yield " ".join(NOTES) + "\n"


def _left_out(comparison: ComparisonTables) -> list[str]:
    return [f"{each.folder}: {each.reason}" for each in comparison.left_out]


def page_of(comparison: ComparisonTables) -> Page:
    """Returns the HTML page of a comparison, report.html, with all of its tables, pictures and notes."""
    sections = [
        Section(
            each.name or "The groups",
            tables=list(tables_of(comparison, each)),
            pictures=[Picture.of_figure(caption, figure) for caption, figure in environment_figures(comparison, each)],
            warnings=each.notes,
            warnings_title=UNEQUAL,
        )
        for each in comparison.environments
    ]
    if pictures := [Picture.of_figure(caption, figure) for caption, figure in number_figures(comparison)]:
        title = "Over a number in which groups differ"
        sections.append(Section(title, pictures=pictures, warnings=comparison.notes, warnings_title=BETWEEN))
    if comparison.left_out:
        warnings_title = "These folders are in no table:"
        sections.append(Section("Left out", warnings=_left_out(comparison), warnings_title=warnings_title))
    how = [note.replace("`", "") for note in (*NOTES, f"In the pictures, {BAND}.")]
    sections.append(Section("How to read this", paragraphs=how))
    versions = {f"fedray {v.get('fedray')}, torch {v.get('torch')}" for v in (run.versions for run in comparison.runs)}
    made_by = " and ".join(sorted(versions))
    lead = [f"{len(comparison.runs)} runs in {len(comparison.groups)} groups, made by {made_by}."]
    if common := _common_settings(comparison):
        lead.append(f"In all of them: {common}.")
    return Page("Comparison of runs", lead, sections)


def _common_settings(comparison: ComparisonTables) -> str:
    """Returns a text for the top of the page: the values of the most important settings that are the same in all
    runs."""
    same = {}
    for key in COMMON:
        values = [run.settings.get(key) for run in comparison.runs]
        if values[0] is not None and all(value == values[0] for value in values):
            same[key] = values[0]
    return ", ".join(f"{key}={value}" for key, value in same.items())
