"""Shows the progress of sweeps: as a table on a terminal, and elsewhere as a line per trial."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from fedray.tracking.progress import Terminal, clock, printable
from fedray.tuning.study import ENDED, sampled_values

if TYPE_CHECKING:
    # imported for types only: it loads torch, which should happen while Ray starts
    from fedray.tuning.sweep import RunningTrial, Sweep

LINE_SECONDS = 60
"""The time after which, without a table, a line shows the progress of the running trials if none has ended."""

TABLE_SECONDS = 0.2
"""The shortest time between two drawings of the table, unless a trial has ended."""


class View:
    """Shows the progress of several sweeps on one console: as a table on a terminal, and elsewhere as a line for each
    trial.

    It implements :class:`~fedray.tuning.sweep.SweepView`, whose docstrings say when its methods are called.

    Args:
        console: Where to show it. None means standard output.
        quiet: Whether to show nothing, and pass lines for the user to ``warn`` instead.
        warn: A function that receives a line of text.
    """

    def __init__(
        self, console: Console | None = None, quiet: bool = False, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        self.console = console or Terminal()
        self.quiet, self.warn = quiet, warn
        self.sweeps: Sequence[Sweep] = ()
        self._live: Live | None = None
        self._start_time, self._ended = time.monotonic(), 0
        self._shown = 0.0

    def say(self, line: str) -> None:
        """Prints a line, above the table of trials if one is shown. With ``quiet``, the line is passed to ``warn``
        instead."""
        if self.quiet:
            self.warn(line)
        else:
            console = self._live.console if self._live else self.console
            console.print(printable(line, console), markup=False)

    def start(self, sweeps: Sequence[Sweep]) -> None:
        """Begins to show the trials of ``sweeps``. The remaining time is estimated from how much was done since this
        call."""
        self.sweeps, self._start_time = sweeps, time.monotonic()
        self._shown = self._start_time
        if not self.quiet and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
            self._shown = 0.0
            self.progress()

    def stop(self) -> None:
        """Shows the table of trials a last time, and leaves it on the terminal."""
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def progress(self) -> None:
        """Shows how far the running trials are. It can be called often, because it does nothing if it has shown this
        less than 0.2 s ago (as a table) or less than a minute ago (as a line)."""
        now = time.monotonic()
        if now - self._shown < (TABLE_SECONDS if self._live else LINE_SECONDS):
            return
        self._shown = now
        if self._live:
            self._live.update(self._table(), refresh=True)
            return
        for sweep in self.sweeps:
            parts = [f"{number} {sweep.fraction_done(trial):.0%}" for number, trial in sorted(sweep.running.items())]
            if parts:
                self.say(f"{sweep.name} {_counts(sweep)}: running {', '.join(parts)}{self._time_left()}")

    def ended(self, sweep: Sweep, number: int, trial: RunningTrial, how: str) -> None:
        """Shows that trial ``number`` of ``sweep`` has ended. ``trial`` has its sampled values and the value of its
        objective, and ``how`` is complete, pruned, diverged or failed."""
        self._ended += 1
        if self._live:
            self._shown = 0.0
            return self.progress()
        self._shown = time.monotonic()
        value = f" {sweep.objectives[0]} {trial.value:.4f}" if math.isfinite(trial.value) else ""
        with_values = f"{how}{value} ({format_values(trial.values)})"
        self.say(f"{sweep.name} {_counts(sweep)}: trial {number} {with_values}{self._time_left()}")

    def _time_left(self) -> str:
        """Returns the estimated remaining time as text, such as ``  2:10 left``, or an empty text before any trial has
        begun."""
        begun = [sweep.fraction_done(trial) for sweep in self.sweeps for trial in sweep.running.values()]
        done = self._ended + sum(begun)
        left = sum(sweep.study.left(sweep.total) for sweep in self.sweeps) + sum(1 - part for part in begun)
        return f"  {clock(left * (time.monotonic() - self._start_time) / done)} left" if done and left else ""

    def _table(self) -> Group:
        sweeps = _empty_table("sweep", "ended", "pruned", "failed", "best", "of trial", "with")
        running = _empty_table("running", "trial", "done", "now", "with")
        for sweep in self.sweeps:
            pruned, failed = (str(sweep.study.count(state)) for state in (TrialState.PRUNED, TrialState.FAIL))
            sweeps.add_row(sweep.name, _counts(sweep), pruned, failed, *_best_cells(sweep))
            for number, trial in sorted(sweep.running.items()):
                value = f"{trial.value:.4f}" if math.isfinite(trial.value) else ""
                done = f"{sweep.fraction_done(trial):.0%}"
                running.add_row(sweep.name, str(number), done, value, format_values(trial.values))
        return Group(sweeps, *([running] if running.row_count else []), self._time_left().strip())


def _empty_table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place in (0, len(titles) - 1) else "right")
    return table


def _counts(sweep: Sweep) -> str:
    """Returns how many trials of a sweep have ended, of how many in total, as text: ``3/30``."""
    return f"{sweep.study.count(*ENDED)}/{sweep.study.wanted(sweep.total)}"


def _best_cells(sweep: Sweep) -> tuple[str, str, str]:
    """Returns the cells of the progress table about a sweep's best trial: its value, its number and its sampled values.
    With several objectives these are the size of the Pareto front, and two empty texts."""
    best = sweep.study.best()
    if not best:
        return "", "", ""
    if len(sweep.objectives) > 1:
        return f"{len(best)} on the front", "", ""
    return f"{best[0].value:.4f}", str(best[0].number), format_values(sampled_values(best[0]))


def format_values(values: Mapping[str, Any]) -> str:
    """Returns the sampled values of a trial as one line for the user, as in ``train.lr=0.03162, train.local_steps=5``.
    ``values`` maps each dotted key to its value. Floats are rounded to four significant digits."""
    return ", ".join(f"{k}={value:.4g}" if isinstance(value, float) else f"{k}={value}" for k, value in values.items())
