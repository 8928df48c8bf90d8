"""The file of measured points, which grows by a line for each, so that measuring can be interrupted and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from round_time.model import Measured
from round_time.points import Point

Row = dict[str, Any]
"""What was measured at a point, as :func:`round_time.measuring.measure` returns it."""


class Records:
    """The file ``path`` with measured points, as lines of JSON. ``say`` shows a line to the user."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self.rows: list[Row] = []
        text = path.read_text() if path.exists() else ""
        whole, _, torn = text.rpartition("\n")
        if torn:
            say(f"{path}: the last line was not written to its end, and its point is measured again")
            path.write_text(whole + "\n" if whole else "")
        self.rows = [json.loads(line) for line in whole.splitlines()]

    def missing(self, points: Iterable[Point]) -> list[Point]:
        """Returns those of ``points`` that have not been measured, in their order."""
        done = {point_of(row) for row in self.rows}
        return [point for point in points if point not in done]

    def add(self, row: Row) -> None:
        """Adds what was measured at a point."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def point_of(row: Row) -> Point:
    """Returns the point at which ``row`` was measured."""
    return Point(**row["point"])


def on_cpus(rows: Sequence[Row]) -> list[Measured]:
    """Returns the rows of clients on CPUs, in the form that the model of a round's time takes."""
    return [
        Measured(point_of(row), row["seconds"], row["worker_seconds"], row["processors"], row["parameters"])
        for row in rows
        if row["point"]["device"] == "cpu"
    ]
