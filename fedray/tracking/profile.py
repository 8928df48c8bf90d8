"""The table that shows how the time of a run's rounds was spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fedray.tracking.columns import PURPOSES

if TYPE_CHECKING:
    import pandas as pd


def _left_out(profile: pd.DataFrame) -> str | None:
    """Returns a line about the first round, which the table of a profile leaves out, or None if it is the only
    round."""
    if len(profile) < 2:
        return None
    first = profile.iloc[0]
    compiling = first["compilation"]
    of_it = f", {compiling:.1f} s of it to compile gradients" if compiling >= 0.1 else ""
    return f"without round {first['round']:.0f}, which took {first[list(PURPOSES)].sum():.1f} s{of_it}"


def profile_table(profile: pd.DataFrame) -> Table:
    """Returns a table for the terminal that shows how many seconds of a round went into each purpose, such as
    gradients.

    ``profile`` has the rows of profile.csv, one for each round, and the table has their means. If there are several
    rounds, the first one is left out, because it includes things that happen only once.
    """
    rows = profile.iloc[1:] if len(profile) > 1 else profile
    means = rows[list(PURPOSES)].mean()
    table = Table(title=f"seconds per round, mean of {len(rows)}", caption=_left_out(profile))
    for heading in ("", "seconds", "share", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for purpose, text in PURPOSES.items():
        table.add_row(purpose, f"{means[purpose]:.4f}", f"{means[purpose] / means.sum():.1%}", text)
    table.add_row("whole round", f"{means.sum():.4f}", "", "")
    return table
