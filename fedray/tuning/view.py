"""What a sweep shows while it runs: a table on a terminal, a line per trial elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from fedray.tracking.progress import clock
from fedray.tuning.study import ENDED, values_of

if TYPE_CHECKING:
    from fedray.tuning.sweep import Progress, Sweep

LINE_SECONDS = 60
"""Where there is no table, how long nothing may be said of trials that get on."""


class View:
    """Shows the sweeps that are started."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.sweeps: Sequence[Sweep] = ()
        self._live: Live | None = None
        self._began, self._ended = time.monotonic(), 0
        self._shown = 0.0

    def say(self, line: str) -> None:
        """A line above the table."""
        if not self.quiet:
            (self._live.console if self._live else self.console).print(line, markup=False)

    def start(self, sweeps: Sequence[Sweep]) -> None:
        """The trials begin."""
        self.sweeps, self._began = sweeps, time.monotonic()
        self._shown = self._began
        if not self.quiet and self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
            self._shown = 0.0
            self.progress()

    def stop(self) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def progress(self) -> None:
        """A running trial has got on."""
        now = time.monotonic()
        if now - self._shown < (0.2 if self._live else LINE_SECONDS):
            return
        self._shown = now
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            for sweep in self.sweeps:
                if parts := [f"{number} {sweep.done(trial):.0%}" for number, trial in sorted(sweep.running.items())]:
                    self.say(f"{sweep.name} {_counts(sweep)}: running {', '.join(parts)}{self._left_in_words()}")

    def ended(self, sweep: Sweep, number: int, trial: Progress, how: str) -> None:
        """A trial has ended: complete, pruned, diverged or failed."""
        self._ended += 1
        if self._live:
            self._shown = 0.0
            return self.progress()
        self._shown = time.monotonic()
        value = f" {sweep.objectives[0]} {trial.value:.4f}" if math.isfinite(trial.value) else ""
        with_values = f"{how}{value} ({described(trial.values)})"
        self.say(f"{sweep.name} {_counts(sweep)}: trial {number} {with_values}{self._left_in_words()}")

    def _left(self) -> float | None:
        """Seconds, at the pace so far."""
        begun = [sweep.done(trial) for sweep in self.sweeps for trial in sweep.running.values()]
        done = self._ended + sum(begun)
        left = sum(sweep.study.left(sweep.total) for sweep in self.sweeps) + sum(1 - part for part in begun)
        return left * (time.monotonic() - self._began) / done if done and left else None

    def _left_in_words(self) -> str:
        left = self._left()
        return f"  {clock(left)} left" if left is not None else ""

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("sweep", "ended", "pruned", "failed", "best", "of trial", "with"):
            table.add_column(title, justify="left" if title in ("sweep", "with") else "right")
        running = Table(box=None, pad_edge=False)
        for title in ("running", "trial", "done", "now", "with"):
            running.add_column(title, justify="left" if title in ("running", "with") else "right")
        for sweep in self.sweeps:
            study = sweep.study
            table.add_row(
                sweep.name,
                _counts(sweep),
                str(study.count(TrialState.PRUNED)),
                str(study.count(TrialState.FAIL)),
                *best_of(sweep),
            )
            for number, trial in sorted(sweep.running.items()):
                value = f"{trial.value:.4f}" if math.isfinite(trial.value) else ""
                running.add_row(sweep.name, str(number), f"{sweep.done(trial):.0%}", value, described(trial.values))
        return Group(table, *([running] if running.row_count else []), self._left_in_words().strip())


def _counts(sweep: Sweep) -> str:
    return f"{sweep.study.count(*ENDED)}/{sweep.study.wanted(sweep.total)}"


def best_of(sweep: Sweep) -> tuple[str, str, str]:
    """The best value so far, its trial, and what was sampled; of several objectives, how many are on the front."""
    best = sweep.study.best()
    if not best:
        return "", "", ""
    if len(sweep.objectives) > 1:
        return f"{len(best)} on the front", "", ""
    return f"{best[0].value:.4f}", str(best[0].number), described(values_of(best[0]))


def described(values: Mapping[str, Any]) -> str:
    """What was sampled, in short."""
    return ", ".join(f"{k}={value:.4g}" if isinstance(value, float) else f"{k}={value}" for k, value in values.items())
