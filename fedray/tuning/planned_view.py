"""Shows the progress of planned runs: as a table on a terminal, and elsewhere as a line per run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from fedray.tracking.progress import Terminal, clock, number_text, printable

LINE_SECONDS = 60
"""The time after which, without a table, a line shows the progress of the runs if none has ended."""

TABLE_SECONDS = 0.2
"""The shortest time between two drawings of the table, unless a run has ended."""

MOST_ROWS = 40
"""How many rows the table has at most. Runs that have ended are left out first, and then those that wait."""


class RunsView:
    """Shows how planned runs go on (:class:`~fedray.tuning.planned.Watcher`): on a terminal as a table of all runs, and
    elsewhere as lines.

    Args:
        tell: Shows a line, where there is no table. Unless given, it is printed on ``console``.
        console: Where to show the table. None means standard output.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, console: Console | None = None) -> None:
        self.console = console or Terminal()
        self._tell = tell
        self._live: Live | None = None
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._how: dict[str, str] = {}
        self._began = self._shown = time.monotonic()

    def say(self, line: str) -> None:
        console = self._live.console if self._live else self.console
        if self._tell is None:
            console.print(printable(line, console), markup=False)
        else:
            self._tell(line)

    def began(self, runs: Sequence[str]) -> None:
        self._rows = {run: {} for run in runs}
        self._began = self._shown = time.monotonic()
        if self._tell is None and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()

    def round(self, run: str, row: Mapping[str, Any]) -> None:
        self._rows[run] = row
        now = time.monotonic()
        if now - self._shown < (TABLE_SECONDS if self._live else LINE_SECONDS):
            return
        self._shown = now
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            running = [f"{name} round {int(last['round'])}" for name, last in self._running().items()]
            self.say(f"{len(self._how)}/{len(self._rows)}: {', '.join(running)}{self._left()}")

    def ended(self, run: str, how: str, row: Mapping[str, Any]) -> None:
        # a run whose process was lost after its end reports it again
        self._how[run] = how
        self._rows[run] = row or self._rows[run]
        self._shown = time.monotonic()
        if self._live:
            self._live.update(self._table(), refresh=True)
            return
        value = _value(row)
        self.say(f"{len(self._how)}/{len(self._rows)} {run}: {how}{f', {value}' if value else ''}{self._left()}")

    def stop(self) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def _running(self) -> dict[str, Mapping[str, Any]]:
        return {run: row for run, row in self._rows.items() if row and run not in self._how}

    def _left(self) -> str:
        """Returns the estimated remaining time as text, or an empty text before any run has ended."""
        ended, total = len(self._how), len(self._rows)
        if not ended or ended == total:
            return ""
        return f"  {clock((time.monotonic() - self._began) / ended * (total - ended))} left"

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for place, title in enumerate(("run", "", "round", "")):
            table.add_column(title, justify="right" if place == 2 else "left")
        running = self._running()
        rest = [run for run in self._rows if run not in running]
        waiting = [run for run in rest if run not in self._how]
        shown = [*running, *waiting, *[run for run in rest if run in self._how][::-1]][:MOST_ROWS]
        for run in (run for run in self._rows if run in shown):
            row = self._rows[run]
            number = str(int(row["round"])) if row else ""
            table.add_row(run, self._how.get(run, "running" if row else "waits"), number, _value(row))
        counts = f"{len(self._how)} of {len(self._rows)} have ended{self._left()}"
        return Group(table, counts)


def _value(row: Mapping[str, Any]) -> str:
    """Returns the main number of a row of metrics.csv as text: the metric on the test set if there is one, or else the
    training loss."""
    for name, value in row.items():
        if name.startswith("test_") and name != "test_loss" and isinstance(value, float) and math.isfinite(value):
            return f"{name.removeprefix('test_').replace('_', ' ')} {number_text(value)}"
    loss = row.get("train_loss")
    return "" if loss is None or not math.isfinite(loss) else f"loss {number_text(loss)}"
