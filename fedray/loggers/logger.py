"""What all loggers have in common: how a run is called in them, and how they find it again when it is resumed."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedray.config import Config, flat
from fedray.errors import UserError
from fedray.util.files import write_whole

IDS = "loggers.json"
"""The file of a run folder with the names under which loggers know the run."""


class Begun(Protocol):
    """What a logger uses of a :class:`fedray.RunStart`."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> Config: ...


class Shown(Protocol):
    """What a logger uses of a :class:`fedray.Report`."""

    @property
    def round(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, Any]: ...


class Ended(Protocol):
    """What a logger uses of a :class:`fedray.RunResult`."""

    @property
    def status(self) -> str: ...

    @property
    def summary(self) -> dict[str, Any]: ...


class Logger:
    """The base class of loggers. ``package`` is the library that a logger needs, and ``extra`` the name under which
    fedray installs it."""

    package: str
    extra: str

    def prepare(self, group: str | None) -> None:
        """Called once before runs of ``group`` begin side by side, to make what they would otherwise all make at the
        same time. Raises :class:`UserError` if the library is missing."""
        self.library()

    def start(self, run: Begun) -> None:
        """Called before the first round, and again if the run goes back to a checkpoint."""
        raise NotImplementedError

    def round(self, report: Shown) -> None:
        """Called after each round."""
        raise NotImplementedError

    def end(self, result: Ended) -> None:
        """Called when the run has ended."""
        raise NotImplementedError

    def failed(self) -> None:
        """Called if an error has ended the run, in place of :meth:`end`."""
        raise NotImplementedError

    def library(self) -> Any:
        """Imports the library of this logger."""
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise UserError(
                f"run.loggers: {self.extra} needs the library {self.package}, as in pip install 'fedray[{self.extra}]' "
                f"({error})"
            ) from None

    def known(self, folder: Path) -> str | None:
        """Returns the name under which this logger has known the run in ``folder`` before, or None."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / IDS).read_text()).get(self.extra)
            return found if isinstance(found, str) else None
        return None

    def remember(self, folder: Path, name: str) -> None:
        """Records the name under which this logger knows the run in ``folder``."""
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / IDS).read_text())
        write_whole(folder / IDS, json.dumps({**found, self.extra: name}) + "\n")


def name_of(run: Begun) -> str:
    """Returns what a run is called: the name of its folder, or, in a group, its place below the group's folder, such as
    ``0007/seed-0`` for a trial of a sweep."""
    group, parts = run.config.run.group, run.folder.parts
    last = (group or "").rpartition("/")[2]
    if not last or last not in parts[:-1]:
        return run.folder.name
    at = len(parts) - 1 - parts[::-1].index(last, 1)
    return "/".join(part for part in parts[at + 1 :] if part != "trials")


def settings_of(run: Begun) -> dict[str, Any]:
    """Returns the run's settings by dotted key, without those that are null or empty."""
    found = flat(run.config.model_dump(mode="json"))
    return {key: value for key, value in found.items() if value not in (None, [], {}, "")}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of a round's ``metrics`` that are finite numbers."""
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if math.isfinite(value) and name != "round"}
