"""Writes what was measured beside what was published: Markdown, CSV and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from fedray.comparing.tables import markdown
from fedray.files import replacement_of, write_whole
from fedray.reproducing.measure import ACCURACIES, PERCENT, Measured, accuracy_of, frame
from fedray.reproducing.pictures import picture
from fedray.reproducing.provenance import sentence
from fedray.reproducing.published import PublishedTable

MEANINGS = {
    "rounds": "Rounds until the target, as medians over seeds; `> R` says that too few runs reached it in R rounds.",
    "ratio": "Rounds until the target, as medians over seeds: of the first row, and of the others over those of the "
    "first.",
    "final": "{Accuracy} at the end in percent, {seeds}.",
    "last": "{Accuracy} in percent, as the mean of the last rounds, {seeds}.",
    "gflops": "GFLOPs of a client, by the paper's accounting, in the median of the rounds until the target.",
    "gib": "GiB, by the paper's accounting: of a whole run, times the rounds until FedAvg's final accuracy over "
    "FedAvg's rounds until it.",
    "at_round": "{Accuracy} after the round that is named, in percent, {seeds}.",
}

SEEDS = "as the mean over seeds with half the width of its 95 % interval; of two seeds, both values are shown"


def write(table: PublishedTable, found: Sequence[Measured], folder: Path, made: Mapping[str, Any]) -> list[Path]:
    """Writes the files of a table into ``folder``, and returns their paths.

    ``made`` says how its runs were made (:mod:`fedray.reproducing.provenance`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("table.md", "table.csv", "table.png", "made.json")]
    write_whole(paths[0], text_of(table, found, made))
    write_whole(paths[1], frame(table, found).to_csv(index=False))
    figure = picture(table, found)
    if figure is not None:
        with replacement_of(paths[2]) as staging:
            figure.savefig(staging, dpi=150, format="png")
    write_whole(paths[3], json.dumps(dict(made), indent=2) + "\n")
    return [path for path in paths if path.exists()]


def text_of(table: PublishedTable, found: Sequence[Measured], made: Mapping[str, Any]) -> str:
    """Returns the table in Markdown, with the published value behind each measured one."""
    cells = pd.DataFrame({"": list(table.rows)})
    for column in table.columns:
        own = {one.cell.row: one for one in found if one.cell.column == column}
        cells[column] = [_cell(table, own[row], made["seeds"]) for row in table.rows]
    lines = [f"**{table.title}**", "", markdown(cells), f"Measured (published). {_meaning(table)}"]
    if agreements := _agreements(table, found):
        lines += ["", f"Agreement of the order of the rows (Kendall's tau, 1 if it is the same): {agreements}."]
    lines += [f"\n{note}" for note in table.notes]
    left_out = dict.fromkeys(each for one in found for each in one.left_out)
    lines += [f"\nLeft out: {each.folder}: {each.reason}." for each in left_out]
    return "\n".join([*lines, "", sentence(made), ""])


def _meaning(table: PublishedTable) -> str:
    """Returns what the numbers of a table are."""
    accuracy = accuracy_of(table)
    others = [name for name in ACCURACIES.values() if name != accuracy]
    rows = dict.fromkeys(cell.row for cell in table.cells if ACCURACIES[cell.of] in others)
    text = MEANINGS[table.measure].format(Accuracy=accuracy.capitalize(), seeds=SEEDS)
    if rows and table.measure in PERCENT:
        text += f" Of {' and '.join(rows)} it is the {others[0]}."
    return text


def _cell(table: PublishedTable, one: Measured, seeds: int) -> str:
    published = one.cell.published
    published = "-" if published is None else f"{published:g}" if isinstance(published, float) else published
    if not one.runs:
        return f"not run ({published})"
    if table.measure in PERCENT:
        both = len(one.values) == 2
        text = ", ".join(f"{value:.2f}" for value in (one.values if both else [one.value]) if not math.isnan(value))
        text += "" if math.isnan(one.margin) else f" ± {one.margin:.2f}"
        counts = [f"{one.diverged} of {len(one.runs)} diverged"] if one.diverged else []
    else:
        text = f"{one.value:.3g}" if math.isfinite(one.value) else f"> {one.rounds:g}"
        missed = one.reached is not None and one.reached < len(one.runs)
        counts = [f"{one.reached} of {len(one.runs)} reached it"] if missed else []
    if len(one.runs) < seeds:
        counts.append(f"{len(one.runs)} of {seeds} runs")
    return f"{', '.join(filter(None, [text, *counts]))} ({published})"


def _agreements(table: PublishedTable, found: Sequence[Measured]) -> str:
    parts = []
    for column in table.columns:
        pairs = [
            (one.value, float(one.cell.published))
            for one in found
            if one.cell.column == column and isinstance(one.cell.published, (int, float)) and not math.isnan(one.value)
        ]
        if len(pairs) > 2:
            value = float(kendalltau(*zip(*pairs, strict=True)).statistic)
            parts += [] if math.isnan(value) else [f"{column} {value:.2f}"]
    return ", ".join(parts)
