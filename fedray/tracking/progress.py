"""Shows the progress of a run: as a bar on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 2.0
"""The shortest time between two plain lines, apart from those of the first and the last round."""


class Display:
    """A display of a run's progress on ``console``, with lines above it."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self._bar: Progress | None = None
        self._began = self._shown = 0.0
        self._clients = 0
        self._rounds = 0
        self._first = 0

    def say(self, line: str) -> None:
        if not self.quiet:
            (self._bar.console if self._bar else self.console).print(line, markup=False)

    def start(self, rounds: int, done: int) -> None:
        """Says that the rounds begin, of which ``done`` were made before."""
        self._rounds, self._first, self._began = rounds, done, time.monotonic()
        if self.quiet or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(), TextColumn("left"), console=self.console,
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task("", total=rounds, completed=done, status="")

    def round(self, metrics: Mapping[str, Any]) -> None:
        """Says that a round is done, with its row of metrics.csv."""
        number, now = int(metrics["round"]), time.monotonic()
        self._clients += int(metrics["cohort_size"])
        speed = self._clients / max(now - self._began, 1e-9)
        status = f"{_status(metrics)}  {speed:,.0f} clients/s"
        if self._bar:
            self._bar.update(self._task, completed=number, status=status)
        elif number in (self._first + 1, self._rounds) or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            left = (self._rounds - number) * (now - self._began) / max(number - self._first, 1)
            self.say(f"round {number}/{self._rounds}  {status}  {clock(left)} left")

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _status(metrics: Mapping[str, Any]) -> str:
    shown = [
        ("train_loss", "loss", ".4f"),
        ("test_accuracy", "accuracy", ".4f"),
        ("validation_accuracy", "validation", ".4f"),
        ("personalized_accuracy", "personal", ".4f"),
        ("representation_accuracy", "representation", ".4f"),
        ("finetuned_accuracy", "fine-tuned", ".4f"),
        ("clients_accuracy_mean", "clients", ".4f"),
    ]
    return "  ".join(f"{word} {metrics[key]:{form}}" for key, word, form in shown if metrics.get(key) is not None)


def clock(seconds: float) -> str:
    """Returns a number of seconds as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
