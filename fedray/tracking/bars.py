"""Progress bars: on a terminal, and in a notebook."""

from __future__ import annotations

import html
import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

UPDATE_SECONDS = 0.1
"""The shortest time between two drawings of a bar in a notebook, each of which is a message to the browser."""


class Bar(Protocol):
    """A progress bar, which is shown from its creation on."""

    def update(self, done: int, status: str = "") -> None:
        """Shows that ``done`` steps are done, and a text beside the bar."""

    def stop(self) -> None:
        """Leaves the bar as it is."""


class TerminalBar:
    """A bar at the bottom of the terminal ``console``, named ``label``, of ``total`` steps, of which ``done`` are
    done."""

    def __init__(self, console: Console, label: str, total: int, done: int) -> None:
        self._bar = Progress(
            TextColumn(label), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(), TextColumn("left"), console=console,
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=done, status="")

    def update(self, done: int, status: str = "") -> None:
        self._bar.update(self._task, completed=done, status=status)

    def stop(self) -> None:
        self._bar.stop()


class NotebookBar:
    """A bar in the output of a notebook's cell, with the same meaning as on a terminal."""

    def __init__(self, label: str, total: int, done: int) -> None:
        import IPython.display

        shown: Any = IPython.display
        self.label, self.total, self._html, self._shown = label, total, shown.HTML, 0.0
        self._done, self._status = done, ""
        self._handle: Any = shown.display(self._drawn(), display_id=True)

    def update(self, done: int, status: str = "") -> None:
        self._done, self._status = done, status
        now = time.monotonic()
        if now - self._shown >= UPDATE_SECONDS:
            self._shown = now
            self._handle.update(self._drawn())

    def stop(self) -> None:
        self._handle.update(self._drawn())

    def _drawn(self) -> Any:
        bar = f'<progress value="{self._done}" max="{self.total}" style="width: 16em"></progress>'
        return self._html(f"{self.label} {self._done}/{self.total} {bar} {html.escape(self._status)}")


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which can show what changes."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return type(running).__name__ == "ZMQInteractiveShell"
