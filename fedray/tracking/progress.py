"""Shows the progress of a run: as a bar on a terminal and in a notebook, and as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.console import Console

from fedray.tracking.bars import Bar, NotebookBar, TerminalBar, in_notebook

PLAIN_SECONDS = 2.0
"""The shortest time between two plain lines, in seconds. The lines about the first and the last round are always
shown."""


class Terminal(Console):
    """Standard output. If its reader has gone, as in ``| head``, a print raises BrokenPipeError, like any print of
    Python's. By itself rich would end the process without a word."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


class Display:
    """Shows the progress of a run on ``console``: a progress bar if it is a terminal or in a notebook, and otherwise
    plain lines. Lines for the user, such as warnings, are shown by :meth:`say`, above the bar if there is one.

    If ``quiet`` is true, nothing is shown, and :meth:`say` calls the function ``warn`` with each of its lines instead.
    """

    def __init__(
        self, console: Console | None = None, quiet: bool = False, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        self.console = console or Terminal()
        self.quiet, self.warn = quiet, warn
        self._bar: Bar | None = None
        self._began = self._shown = self._timed = 0.0
        self._clients = self._rounds = self._first = 0
        self._metric = "accuracy"

    def say(self, line: str) -> None:
        if self.quiet:
            self.warn(line)
        else:
            self.console.print(printable(line, self.console), markup=False)

    def start(self, rounds: int, done: int, metric: str = "accuracy") -> None:
        """Starts to show the progress of a run of ``rounds`` rounds.

        ``done`` is the number of rounds that were made before, if the run is resumed. ``metric`` is the task's main
        metric, which is shown.
        """
        self._metric, self._rounds, self._first, self._began = metric, rounds, done, time.monotonic()
        if done:
            self.say(f"round {done} reached before; going on from its checkpoint")
        if not self.quiet and self._has_bars:
            self._start_bar("round", rounds, done)

    def _start_bar(self, label: str, total: int, done: int) -> None:
        self.stop()
        self._bar = NotebookBar(label, total, done) if in_notebook() else TerminalBar(self.console, label, total, done)

    @property
    def _has_bars(self) -> bool:
        return self.console.is_terminal or in_notebook()

    def round(self, metrics: Mapping[str, Any]) -> None:
        """Shows on the terminal that a round is done, with its loss and metrics.

        ``metrics`` is the round's row of metrics.csv, by column.
        """
        number, now = int(metrics["round"]), time.monotonic()
        self._clients += int(metrics["cohort_size"])
        speed = self._clients / max(now - self._began, 1e-9)
        status = printable(f"{_status(metrics, self._metric)}  {speed:,.0f} clients/s", self.console)
        if self._bar:
            self._bar.update(number, status)
        elif number in (self._first + 1, self._rounds) or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            # the first round has the start in it, and says little about the others
            timed = number - self._first - 1
            left = f"  {clock((self._rounds - number) * (now - self._timed) / timed)} left" if timed else ""
            self.say(f"round {number}/{self._rounds}  {status}{left}")
        if number == self._first + 1:
            self._timed = now

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[..., dict[str, Any]]]:
        """Returns a context, for a ``with`` statement, in which this display shows how many samples of a data set have
        been read.

        The value of the context is a function that writes samples into files and returns them mapped into memory. It is
        :func:`fedray.data.storage.mapping.map_arrays` with the argument ``progress`` set, so that each call reports its
        progress to this display.
        """
        from fedray.data.storage.mapping import map_arrays

        try:
            yield partial(map_arrays, progress=self.read)
        finally:
            self.stop()

    def read(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` samples have been read, while samples are copied into files that are then
        mapped into memory."""
        if self.quiet:
            return
        now = time.monotonic()
        if self._has_bars:
            if self._bar is None:
                self._start_bar("reading samples", total, done)
            assert self._bar is not None
            self._bar.update(done)
        elif done == total or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self.say(f"reading samples: {done:,} of {total:,}")

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def _status(metrics: Mapping[str, Any], metric: str) -> str:
    """Returns the text about a round: its training loss, and the main metric of all models that were evaluated."""
    shown = {
        "train_loss": "loss",
        f"test_{metric}": metric.replace("_", " "),
        f"validation_{metric}": "validation",
        f"personalized_{metric}": "personal",
        f"representation_{metric}": "representation",
        f"finetuned_{metric}": "fine-tuned",
        f"local_{metric}": "local",
        f"clients_{metric}_mean": "clients",
    }
    return "  ".join(
        f"{word} {number_text(metrics[key])}" for key, word in shown.items() if metrics.get(key) is not None
    )


def printable(line: str, console: Console) -> str:
    """Returns ``line`` in a form that ``console`` can print: characters that its encoding lacks are replaced by escapes
    with a backslash."""
    return line.encode(console.encoding, "backslashreplace").decode(console.encoding)


def number_text(value: float) -> str:
    """Returns a loss or metric as text for the terminal, with four digits after the point: ``0.7143``.

    Values below 0.001 have three significant digits: ``0.000123``.
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def clock(seconds: float) -> str:
    """Returns a number of seconds as text: ``1:02:03``, or ``2:03`` for less than an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
