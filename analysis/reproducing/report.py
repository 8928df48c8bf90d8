"""Writes what was measured beside what was published: Markdown, CSV and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from fedray.results.style import save
from fedray.results.tables import markdown
from fedray.util.files import write_whole
from reproducing.measure import EVALUATED, PERCENT, Measured, frame, name_of, on_one_scale, without_value
from reproducing.pictures import curves, picture
from reproducing.provenance import sentence
from reproducing.published import PublishedTable

MEANINGS = {
    "rounds": "Rounds until the target, as {over} over seeds. {bound}",
    "ratio": "Rounds until the target, as {over} over seeds: of the first row, and of the others over those of the "
    "first. {bound}",
    "loss": "{Name} at the end, {seeds}.",
    "final": "{Name} at the end in percent, {seeds}.",
    "last": "{Name} in percent, as the mean of the last rounds, {seeds}.",
    "best": "{Name} of the round in which it was best, in percent, {seeds}.",
    "minutes": "Minutes of the virtual clock until {until}, as {over} over seeds. {bound}",
    "gflops": "GFLOPs of a client, by the paper's accounting, in the {one} of the rounds until the target. {bound}",
    "gib": "GiB by the paper's accounting: those of all rounds of a run, times its rounds to {until}, divided by "
    "FedAvg's rounds to it. A run that does not reach it counts in full.",
    "gib_sent": "GiB that all clients sent and received until {until}, as {over} over seeds. {bound}",
    "at_round": "{Name} after the round that is named, in percent, {seeds}.",
}

UNTIL = {"target": "the target", "first row": "FedAvg's accuracy, the mean of its last rounds"}

BOUND = "`>` stands before a bound: runs that did not reach it count with what they took."

SEEDS = "as the mean over seeds with half the width of its 95 % interval; of two seeds, both values are shown"


def write(table: PublishedTable, found: Sequence[Measured], folder: Path, made: Mapping[str, Any]) -> list[Path]:
    """Writes the files of a table into ``folder``, and returns their paths.

    ``made`` says how its runs were made (:mod:`reproducing.provenance`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "table.md": text_of(table, found, made),
        "table.csv": frame(table, found).to_csv(index=False),
        "made.json": json.dumps(dict(made), indent=2) + "\n",
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    figures = {"table": picture(table, found), "curves": curves(table, found)}
    pictures = [path for name, figure in figures.items() if figure is not None for path in save(figure, folder, name)]
    return [*(folder / name for name in texts), *pictures]


def text_of(table: PublishedTable, found: Sequence[Measured], made: Mapping[str, Any]) -> str:
    """Returns the table in Markdown, with the published value behind each measured one."""
    cells = pd.DataFrame({"": list(table.rows)})
    for column in table.columns:
        of_column = {one.cell.row: one for one in found if one.cell.column == column}
        cells[column] = [_cell(table, of_column[row], made["seeds"]) for row in table.rows]
    shown = "Measured (published)." if _has_published(table) else "Measured; no such numbers are published."
    lines = [f"**{table.title}**", "", markdown(cells), f"{shown} {_meaning(table)}"]
    if agreements := _agreements(table, found):
        lines += ["", f"Agreement of the order of the rows (Kendall's tau, 1 if it is the same): {agreements}."]
    lines += [f"\n{note}" for note in table.notes]
    left_out = dict.fromkeys(each for one in found for each in one.left_out)
    lines += [f"\nLeft out: {each.folder}: {each.reason}." for each in left_out]
    return "\n".join([*lines, "", sentence(made), ""])


def _meaning(table: PublishedTable) -> str:
    """Returns what the numbers of a table are."""
    first = name_of(table)
    others = {cell.row: name_of(table, cell) for cell in table.cells if name_of(table, cell) != first}
    over = {"one": table.over_runs, "over": f"{table.over_runs}s", "until": UNTIL[table.until]}
    text = MEANINGS[table.measure].format(Name=first.capitalize(), seeds=SEEDS, bound=BOUND, **over)
    if table.measure in EVALUATED:
        for other in dict.fromkeys(others.values()):
            rows = [f"'{row}'" for row, name in others.items() if name == other]
            text += f" In the row{'s' * (len(rows) > 1)} {', '.join(rows)} it is the {other}."
    return text


def _has_published(table: PublishedTable) -> bool:
    return any(cell.published is not None for cell in table.cells)


def _cell(table: PublishedTable, one: Measured, seeds: int) -> str:
    published = one.cell.published
    published = "-" if published is None else f"{published:g}" if isinstance(published, float) else published
    behind = f" ({published})" if _has_published(table) else ""
    if not one.runs:
        return f"not run{behind}"
    if table.measure in PERCENT:
        both = len(one.values) == 2
        values = [f"{value:.2f}" for value in (one.values if both else [one.value]) if not math.isnan(value)]
        text = ", ".join(values) or without_value(table, one)
        text += "" if math.isnan(one.margin) else f" ± {one.margin:.2f}"
    else:
        text = f"{one.value:.3g}" if math.isfinite(one.value) else without_value(table, one)
        text += "" if math.isnan(one.margin) else f" ± {one.margin:.2g}"
    counts = [f"{one.diverged} of {len(one.runs)} diverged"] if one.diverged else []
    if one.reached is not None and one.reached + one.diverged < len(one.runs):
        counts.append(f"{one.reached} of {len(one.runs)} reached it")
    if len(one.runs) < seeds:
        counts.append(f"{len(one.runs)} of {seeds} runs")
    return f"{', '.join(filter(None, [text, *counts]))}{behind}"


def _agreements(table: PublishedTable, found: Sequence[Measured]) -> str:
    parts = []
    for column in table.columns:
        pairs = pd.DataFrame([on_one_scale(table, one) for one in found if one.cell.column == column]).dropna()
        if len(pairs) > 2:
            ranks = pairs.rank()
            value = float(kendalltau(ranks[0], ranks[1]).statistic)
            parts += [] if math.isnan(value) else [f"{column} {value:.2f}"]
    return ", ".join(parts)
