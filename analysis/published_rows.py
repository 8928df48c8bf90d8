"""Lists all published numbers, all cells of the papers' tables, with what came out here, and counts them.

python analysis/published_rows.py                    # prints the table of analysis/results/published_rows.md
python analysis/published_rows.py --list FILE        # writes all numbers, as into analysis/results/published_rows.csv
python analysis/published_rows.py --results FOLDER   # of other results than those in analysis/results/reproduced

A published number is *reproduced* if the 95 % interval of the mean over seeds covers it, or, where there is no interval
(medians, one or two seeds), if what was measured is within 5 % of it. Otherwise it has the *same place* if its row has
the published rank among the published rows of its column, if several of them were made; else it is *other*. A table may
have been made in several readings of its paper (``table4``, ``table4_authors``); a number counts by the best of them.
"""

from __future__ import annotations

import argparse
import math
import re
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

READING = re.compile(
    r"_(authors|fresh|alexnet|emnist_test|signals|unit|coverage|test|ablation|variants\w*|readings\w*|gib|sent|2000)$"
)
"""The end of the name of a table that is another reading, a part, or a shortened repetition of others, whose numbers it
has."""

CLOSE = 0.05
"""The largest relative difference that counts as reproduced where there is no interval."""


def every(results: Path) -> pd.DataFrame:
    """Returns a row for each published number: the ``table``, ``column``, ``row``, what was ``published``, one of
    :data:`OUTCOMES`, and the stored result to which it applies, if there is one: its ``reading`` (a folder of
    ``results``), ``measured``, ``margin`` (half the 95 % interval; NaN of medians and of fewer than three runs),
    ``runs`` and how many of these ``diverged``. ``results`` is a folder like ``analysis/results/reproduced``."""
    rows = []
    # other readings of a table, such as table4_authors, have its numbers, too
    for name in (each for each in known_tables() if not READING.search(each)):
        table = read_table(name)
        published = numbers_of(table)
        best: dict[Any, dict[str, Any]] = {cell: {"outcome": "not run"} for cell in published}
        for folder, found in readings(results, name):
            of_cell = found.set_index(["column", "row"])[["measured", "margin", "runs", "diverged"]]
            for cell, outcome in outcomes(table, found, published).items():
                if OUTCOMES.index(outcome) < OUTCOMES.index(best[cell]["outcome"]):
                    best[cell] = {"outcome": outcome, "reading": folder, **of_cell.loc[cell]}
        for (column, row), number in published.items():
            rows.append({"table": name, "column": column, "row": row, "published": number, **best[column, row]})
    whole = {"runs": "Int64", "diverged": "Int64"}
    names = ["table", "column", "row", "published", "outcome", "reading", "measured", "margin", *whole]
    return pd.DataFrame(rows, columns=names).astype(whole)


def count(numbers: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each published table, with how many of its ``numbers``, as :func:`every` returns them, have
    each of :data:`OUTCOMES`, and a row with their sums."""
    table = pd.crosstab(numbers["table"], numbers["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)
    table.insert(0, "numbers", table.sum(axis=1))
    table.loc["all"] = table.sum()
    return table.reset_index()


def numbers_of(table: PublishedTable) -> dict[tuple[str, str], float | str]:
    """Returns the published numbers of a table by column and row: numbers, or ``diverged`` or ``never``."""
    return {(cell.column, cell.row): cell.published for cell in table.cells if cell.published is not None}


def readings(results: Path, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the stored results of the table ``name``, in all readings, each after the name of its folder. Those of
    shortened runs do not count."""
    paper, table = name.split("/")
    for path in sorted(results.glob(f"{paper}/{table}*/table.csv")):
        if path.parent.name == table or READING.fullmatch(path.parent.name.removeprefix(table)):
            yield f"{paper}/{path.parent.name}", pd.read_csv(path)


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
    parser.add_argument("--list", metavar="FILE", type=Path, help="write all numbers into a CSV")
    options = parser.parse_args()
    numbers = every(options.results)
    if options.list is not None:
        options.list.write_text(numbers.to_csv(index=False, float_format="%.6g"))
    print(markdown(count(numbers)))


if __name__ == "__main__":
    main()
