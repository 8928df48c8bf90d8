"""Finds run folders and reads them: what each run was, and what it reached in each round."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedray.comparing.measure import Measure
from fedray.config import read_file
from fedray.errors import UserError, first_sentence
from fedray.tracking.folder import INPUTS, read_metrics, with_unrecorded

SEEDS = ("run.seed", "data.seed")
"""The keys in which the repetitions of a run differ from each other."""

SET_ASIDE = ".bak-"
"""What the name of a folder contains that ``run.resume=false`` has renamed."""


@dataclass(frozen=True)
class Reached:
    """What a run took to reach a target: the ``rounds``, the ``bytes`` both ways, the ``flops`` and ``seconds``.

    All are infinite for a run that did not reach it.
    """

    rounds: float = math.inf
    bytes: float = math.inf
    flops: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True, eq=False)
class Run:
    """A run that has ended.

    ``settings`` are its configuration by dotted key, ``summary`` and ``inputs`` what the files of these names hold, and
    ``rows`` is metrics.csv with a further column ``bytes``: those of both ways.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    inputs: Mapping[str, str]
    rows: pd.DataFrame

    @property
    def diverged(self) -> bool:
        """Whether its loss or its model was not finite any more."""
        return bool(self.summary["status"] == "diverged")

    @property
    def versions(self) -> dict[str, Any]:
        """The versions of fedray and of libraries that made it, by name."""
        return dict(self.summary.get("versions") or {})

    @property
    def seeds(self) -> tuple[Hashable, ...]:
        """The values of :data:`SEEDS`."""
        return tuple(self.settings.get(key) for key in SEEDS)

    def evaluations(self, measure: Measure) -> pd.DataFrame:
        """Returns the rows of the evaluated rounds, with the metric in a further column ``value``."""
        if measure.column not in self.rows:
            return self.rows.iloc[:0].assign(value=np.float64())
        return self.rows.assign(value=self.rows[measure.column]).dropna(subset="value")

    def final(self, measure: Measure) -> float:
        """Returns the metric at the last evaluation; NaN if there was none."""
        values = self.evaluations(measure)["value"]
        return float(values.iloc[-1]) if len(values) else math.nan

    def best(self, measure: Measure) -> float:
        """Returns the best of all evaluations; NaN if there was none."""
        values = self.evaluations(measure)["value"]
        return float(measure.sign * (measure.sign * values).max()) if len(values) else math.nan

    def last(self, measure: Measure, rounds: int | None = None) -> float:
        """Returns the mean of the evaluations in the last ``rounds`` rounds; of the last ten evaluations if it is
        None."""
        rows = self.evaluations(measure)
        rows = rows.iloc[-10:] if rounds is None else rows[rows["round"] > self.rows["round"].max() - rounds]
        return float(rows["value"].mean())

    def to_reach(self, target: float, measure: Measure) -> Reached:
        """Returns what it took until the first evaluation that was ``target`` or better.

        A run that diverged later has not reached it, because its model is lost.
        """
        rows = self.evaluations(measure)
        # by rounding, a target that is the mean of equal accuracies may be a little larger than these
        there = rows[measure.sign * rows["value"] >= measure.sign * target - 1e-9]
        if self.diverged or not len(there):
            return Reached()
        first = there.iloc[0]
        return Reached(*(float(first[name]) for name in ("round", "bytes", "flops", "wall_seconds")))


@dataclass(frozen=True)
class LeftOut:
    """A run folder that can't be compared, and why."""

    folder: Path
    reason: str


def find_runs(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Returns the runs that have ended in the folders ``paths`` and below them, and the folders that are left out.

    Raises :class:`UserError` for a path that does not exist, or below which there is no run folder.
    """
    runs, left_out = [], []
    for folder in run_folders(paths):
        found = read_run(folder)
        if isinstance(found, Run):
            runs.append(found)
        else:
            left_out.append(found)
    return runs, left_out


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Returns the run folders in ``paths`` and below them.

    Raises :class:`UserError` for a path that does not exist, or below which there is none.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'not there'}: give folders of runs")
        below = list(_below(path))
        if not below:
            raise UserError(f"there is no run folder in {path}: it would have a config.yaml and a metrics.csv")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    """Yields the run folders in ``path``, in the order of their names. A run folder has no other below it."""
    seen = set()
    for place, folders, files in os.walk(path, followlinks=True):
        # a link may lead back
        if (there := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(there)
        if "config.yaml" in files and ("metrics.csv" in files or "summary.json" in files):
            folders.clear()
            yield Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def read_run(folder: Path) -> Run | LeftOut:
    """Reads a run folder. It is left out if it is damaged, if the run has not ended, or was set aside."""
    if SET_ASIDE in folder.name:
        return LeftOut(folder, "it was set aside by run.resume=false")
    try:
        settings = settings_of(folder)
        if not (folder / "summary.json").exists():
            return LeftOut(folder, "the run has not ended")
        summary = json.loads((folder / "summary.json").read_text())
        status, rounds = summary["status"], settings["run.rounds"]
        if status == "interrupted":
            return LeftOut(folder, f"the run was interrupted after {summary['rounds']} of {rounds} rounds")
        rows = read_metrics(folder)
        if not {"round", "bytes_down", "bytes_up", "flops", "wall_seconds"} <= {*rows.columns} or not len(rows):
            return LeftOut(folder, "metrics.csv is damaged: it lacks columns or rounds")
        rows = rows.assign(bytes=rows["bytes_down"] + rows["bytes_up"])
        has_inputs = (folder / INPUTS).exists()
        inputs = json.loads((folder / INPUTS).read_text()) if has_inputs else {}
        return Run(folder, settings, summary, inputs, rows)
    except UserError as error:
        return LeftOut(folder, f"it is damaged: {error}")
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        return LeftOut(folder, f"it is damaged: {first_sentence(error)}")


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the settings of the run in ``folder`` by dotted key. Those that an older fedray did not have are
    what it did without them. Raises :class:`UserError` if they can't be read."""
    return with_unrecorded(read_file(folder / "config.yaml"))
