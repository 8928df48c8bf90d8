"""Where a round's time goes: the purposes, and the table of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    import pandas as pd

PURPOSES = {
    "data": "batches gathered and normalised",
    "gradient": "forward and backward passes",
    "algorithm": "the algorithm's arithmetic and the sums over clients",
    "transport": "broadcasts and clients' states, read and written",
    "evaluation": "accuracies",
    "waiting": "actors without work: Ray's own time, the first task and the last of a phase",
    "server": "the server's rule, broadcasts and records, while actors have nothing to do",
    "checkpoint": "checkpoints",
}
"""What the seconds of a round are spent on; they add up to the round's time."""


def profile_table(profile: pd.DataFrame) -> Table:
    """What a round's time goes into, from the rows of profile.csv: means over all rounds but the first, which also
    holds what only happens once."""
    rows = profile.iloc[1:] if len(profile) > 1 else profile
    means = rows[list(PURPOSES)].mean()
    table = Table(title=f"seconds per round, mean of {len(rows)}")
    for heading in ("", "seconds", "share", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for purpose, text in PURPOSES.items():
        table.add_row(purpose, f"{means[purpose]:.4f}", f"{means[purpose] / means.sum():.1%}", text)
    table.add_row("whole round", f"{means.sum():.4f}", "", "")
    return table
