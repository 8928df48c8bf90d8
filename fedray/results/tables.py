"""Makes the tables of a comparison for readers, in Markdown and in LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedray.results.clients import FINETUNED, OF_CLIENTS, PERSONAL, finals_of_clients
from fedray.results.comparison import ComparisonTables, Environment
from fedray.results.grouping import Group
from fedray.results.measure import Measure
from fedray.results.statistics import with_interval

UNITS = ("", "k", "M", "G", "T", "P", "E")

AMOUNTS = {
    "rounds": ("rounds", ""), "bytes": ("bytes", "B"), "FLOPs": ("flops", "FLOP"),
    "virtual seconds": ("virtual_seconds", ""), "joules": ("joules", "J"), "seconds": ("seconds", ""),
}  # fmt: skip
"""The columns about costs, each with the key of its number and its unit. Those that no run has are left out."""

PRIVATE = "private layers"
"""The cell of a difference that means nothing, because a global model has initial values in its private layers."""


@dataclass(frozen=True)
class Table:
    """A table for readers: a ``title``, and ``cells``, a DataFrame of texts. The first column has the names of the
    rows."""

    title: str
    cells: pd.DataFrame


def tables_of(comparison: ComparisonTables, environment: Environment) -> Iterator[Table]:
    """Yields the tables of a comparison for one ``environment``, that is, for groups of runs on the same data and
    model. Each table has a row for each group, whose runs differ only in their seeds.

    The tables show the metric that was reached, what it took to reach each target, the metric for single clients if
    they were scored, and the costs of whole runs.
    """
    yield Table(f"test {comparison.measure.words}", _reached(comparison, environment))
    for target in dict.fromkeys(row["target"] for row in environment.targets):
        rows = [row for row in environment.targets if row["target"] == target]
        yield Table(f"what it took to reach {comparison.measure.shown(target)}", _took(rows))
    clients = _clients(comparison, environment)
    if len(clients.columns) > 1:
        yield Table(f"test {comparison.measure.words} for single clients, at the end", clients)
    yield Table("what whole runs took", _costs(environment.rows))


def _reached(comparison: ComparisonTables, environment: Environment) -> pd.DataFrame:
    measure, rows = comparison.measure, environment.rows
    last = "up to ten last evaluations" if comparison.last is None else f"last {comparison.last} rounds"
    found: dict[str, list[str]] = {
        "": [row["group"] for row in rows],
        "runs": [_runs(row) for row in rows],
        f"final{measure.unit}": [shown_values(row["finals"], measure) for row in rows],
        f"best{measure.unit}": [shown_values(row["bests"], measure) for row in rows],
        f"{last}{measure.unit}": [shown_values(row["lasts"], measure) for row in rows],
    }
    if environment.baseline is not None and len(rows) > 1:
        points = ", points" if measure.percent else ""
        name = environment.baseline.label
        found[f"difference to {name}{points}"] = [
            _difference(row, group, environment.baseline, measure)
            for row, group in zip(rows, environment.groups, strict=True)
        ]
        if any("p_holm" in row for row in rows):
            found["p (Holm)"] = [p_value(row.get("p_holm", math.nan)) for row in rows]
    return pd.DataFrame(found)


def _took(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    reached = {"": [row["group"] for row in rows], "reached": [f"{row['reached']} of {row['runs']}" for row in rows]}
    amounts = {
        title: [_to_target(row, name, unit) for row in rows]
        for title, (name, unit) in AMOUNTS.items()
        if not all(math.isnan(row[f"{name}_to"]) for row in rows)
    }
    return pd.DataFrame(reached | amounts)


def _to_target(row: Mapping[str, Any], name: str, unit: str) -> str:
    text = amount(row[f"{name}_to"], row[f"{name}_bound"], unit)
    speed_up = row[f"{name}_speedup"]
    return text if math.isnan(speed_up) else f"{text} ({speed_up:.2f}x)"


def _clients(comparison: ComparisonTables, environment: Environment) -> pd.DataFrame:
    """Returns a row for each kind of models of each group that was scored at single clients."""
    measure, found = comparison.measure, {}
    for group in environment.groups:
        for model, words in {"": "", PERSONAL: ", personal models", FINETUNED: ", fine-tuned"}.items():
            values = finals_of_clients(group.runs, measure, model)
            if not model or any(values.values()):
                found[group.label + words] = values
    columns = {"": list(found)}
    for what, words in OF_CLIENTS.items():
        if any(each[what] for each in found.values()):
            columns[f"{words}{measure.unit}"] = [shown_values(each[what], measure) for each in found.values()]
    return pd.DataFrame(columns)


def _costs(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    amounts = {
        title: [in_units(row[name], unit) for row in rows]
        for title, (name, unit) in AMOUNTS.items()
        if title == "rounds" or not all(math.isnan(row[name]) for row in rows)
    }
    return pd.DataFrame({"": [row["group"] for row in rows], **amounts})


def _runs(row: Mapping[str, Any]) -> str:
    return f"{row['runs']}, {row['diverged']} diverged" if row["diverged"] else str(row["runs"])


def shown_values(values: Sequence[float], measure: Measure, sign: str = "") -> str:
    """Returns ``values`` of the metric ``measure``, those of several runs, as a text (:func:`with_interval`),
    with as many digits as they need."""
    if any(math.isnan(value) for value in values):
        return "not evaluated"
    return with_interval([measure.scale * value for value in values], digits_of(values, measure), sign)


def digits_of(values: Sequence[float], measure: Measure) -> int:
    """Returns the number of digits after the point with which ``values`` of the metric ``measure`` are shown: two for a
    percentage; for another metric so many that the largest value has at least four significant digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if measure.percent or not largest:
        return 2
    return min(12, max(0, 3 - math.floor(math.log10(largest))))


def _difference(row: Mapping[str, Any], group: Group, baseline: Group, measure: Measure) -> str:
    if group is baseline:
        return "baseline"
    if "differences" not in row:
        return PRIVATE if group.has_private_layers or baseline.has_private_layers else "no pairs"
    text = shown_values(row["differences"], measure, sign="+")
    pairs = len(row["differences"])
    return f"{text} ({pairs} pair{'s' if pairs > 1 else ''})" if pairs < row["runs"] else text


def p_value(p: float) -> str:
    """Returns a p-value as the text of a table's cell, such as ``0.031`` or ``< 0.001``. The text is empty for NaN."""
    return "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def amount(median: float, bound: float, unit: str = "") -> str:
    """Returns the text of a table's cell that says how much it took a group's runs to reach a target, such as ``40`` or
    ``191.5 MB``.

    ``median`` is the median over the runs. It is infinite if at least half of them did not reach the target. Then the
    cell shows ``bound`` instead, as in ``> 40``; or ``diverged`` if ``bound`` is NaN, because at least half of the runs
    diverged. If ``median`` is NaN, because there are no runs, the cell is empty. ``unit`` is a unit
    such as ``B``, or empty for a plain number.
    """
    if math.isnan(median):
        return ""
    if math.isfinite(median):
        return in_units(median, unit)
    return "diverged" if math.isnan(bound) else f"> {in_units(bound, unit)}"


def in_units(value: float, unit: str = "") -> str:
    """Returns a number as text with four significant digits; a number without a unit has at least all digits before the
    point, as in ``12,345``. With a ``unit`` it gets a metric prefix, as in ``191.5 MB``. NaN becomes an empty text."""
    if math.isnan(value):
        return ""
    if not unit:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    thousands = min(len(UNITS) - 1, max(0, int(math.log10(abs(value)) // 3))) if value else 0
    return f"{value / 1000**thousands:.4g} {UNITS[thousands]}{unit}"


def markdown(table: pd.DataFrame) -> str:
    """Returns a DataFrame as a table in Markdown, with its columns as header and without its index. Floats have four
    significant digits, and missing values are empty cells."""

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:.4g}"
        return "" if value is None else plain_markdown(str(value))

    lines = [[plain_markdown(str(name)) for name in table.columns], ["---"] * len(table.columns)]
    lines += [[shown(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plain_markdown(text: str) -> str:
    """Returns ``text`` with backslashes before the characters that Markdown would read as markup, so that a name such
    as ``a_b<script>.py:X`` is shown as it is."""
    return re.sub(r"[\\`*|<&~\[\]]|(?<!\w)_|_(?!\w)", lambda found: f"\\{found[0]}", text)


def latex(table: Table) -> str:
    """Returns a table in LaTeX, for a paper: a table environment with a caption and the rules of the package
    booktabs."""
    style = table.cells.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    columns = "l" + "r" * (table.cells.shape[1] - 1)
    # pandas escapes cells, but not the caption, so the caption is escaped as a cell here
    cell = pd.DataFrame([[table.title]]).style.format(escape="latex").hide(axis="index").hide(axis="columns")
    caption = str(cell.to_latex()).splitlines()[1].removesuffix(r" \\")
    label = "tab:" + "-".join(re.findall(r"[a-z0-9]+", table.title.lower()))
    text = str(
        style.to_latex(hrules=True, caption=caption, label=label, column_format=columns, position_float="centering")
    )
    return text.replace("±", r"$\pm$").replace(">", "$>$").replace("<", "$<$")
