"""Counts how many published numbers come out: all cells of the papers' tables, against what is stored in
analysis/results/reproduced.

    python analysis/published_rows.py                    # prints the table of analysis/results/published_rows.md
    python analysis/published_rows.py --results FOLDER   # of other results

A published number is *reproduced* if the 95 % interval of the mean over seeds covers it, or, where there is no interval
(medians, one or two seeds), if what was measured is within 5 % of it. Otherwise it has the *same place* if its row has
the published rank among the published rows of its column, if several of them were made; else it is *other*. A table may
have been made in several readings of its paper (``table4``, ``table4_authors``); a number counts by the best of them.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from reproducing.measure import PERCENT
from reproducing.published import PublishedTable, known_tables, read_table

from fedray.results.tables import markdown

RESULTS = Path(__file__).parent / "results" / "reproduced"

OUTCOMES = ("reproduced", "same place", "other", "not run")
"""What can become of a published number, the best first."""

READING = re.compile(r"_(authors|alexnet|emnist_test|signals|unit|coverage|test|ablation|variants\w*|gib|sent)$")
"""The end of the name of a table that is another reading, or a part, of the table before it."""

CLOSE = 0.05
"""The largest relative difference that counts as reproduced where there is no interval."""


def count(results: Path) -> pd.DataFrame:
    """Returns a row for each published table, with how many of its numbers have each of :data:`OUTCOMES`, and a row
    with their sums. ``results`` is a folder like ``analysis/results/reproduced``."""
    rows = []
    for name in known_tables():
        # other readings of a table, such as table4_authors, have its numbers, too
        table = read_table(name)
        published = {} if READING.search(name) else numbers_of(table)
        if published:
            best = dict.fromkeys(published, "not run")
            for found in readings(results, name):
                for cell, outcome in outcomes(table, found, published).items():
                    best[cell] = min(best[cell], outcome, key=OUTCOMES.index)
            counted = Counter(best.values())
            rows.append({"table": name, "numbers": len(published), **{each: counted[each] for each in OUTCOMES}})
    table = pd.DataFrame(rows)
    total = {"table": "all", **{column: int(table[column].sum()) for column in table.columns[1:]}}
    return pd.concat([table, pd.DataFrame([total])], ignore_index=True)


def numbers_of(table: PublishedTable) -> dict[tuple[str, str], float | str]:
    """Returns the published numbers of a table by column and row: numbers, or ``diverged`` or ``never``."""
    return {(cell.column, cell.row): cell.published for cell in table.cells if cell.published is not None}


def readings(results: Path, name: str) -> Iterator[pd.DataFrame]:
    """Yields the stored results of the table ``name``, in all readings. Those of shortened runs do not count."""
    paper, table = name.split("/")
    for path in sorted(results.glob(f"{paper}/{table}*/table.csv")):
        if path.parent.name == table or READING.fullmatch(path.parent.name.removeprefix(table)):
            yield pd.read_csv(path)


def outcomes(table: PublishedTable, found: pd.DataFrame, published: Mapping[Any, float | str]) -> dict[Any, str]:
    """Returns what became of each number in ``published``, by column and row, in one stored result of the ``table``.
    Numbers that this lacks are left out."""
    told: dict[Any, str] = {}
    worst = -math.inf if table.measure in PERCENT else math.inf
    for column, cells in found[found["runs"] > 0].groupby("column", sort=False):
        shared = [row for row in cells["row"] if (column, row) in published]
        measured = cells.set_index("row").loc[shared]
        # infinity stands for what diverged or never reached its target, here as in the paper
        texts = {row: published[column, row] for row in shared}
        wanted = pd.Series({row: worst if isinstance(each, str) else each for row, each in texts.items()}, dtype=float)
        values = measured["measured"].where(measured["diverged"] < measured["runs"], worst).astype(float)
        # a single row has no place
        same = (_places(table, values) == _places(table, wanted)) & (len(shared) > 1)
        for row in shared:
            value, number, margin = values[row], wanted[row], measured["margin"][row]
            allowed = CLOSE * number if math.isnan(margin) else margin
            covered = value == number or (math.isfinite(value) and abs(value - number) <= allowed)
            told[column, row] = "reproduced" if covered else "same place" if same[row] else "other"
    return told


def _places(table: PublishedTable, values: pd.Series[float]) -> pd.Series[float]:
    """Returns the ranks of a column's rows. In a table of ratios the first row has rounds, and its ratio is 1."""
    first = table.rows[0]
    return values.where(values.index != first, 1.0).rank() if table.measure == "ratio" else values.rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of stored tables")
    print(markdown(count(parser.parse_args().results)))


if __name__ == "__main__":
    main()
