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

from fedray.config import read_file
from fedray.errors import UserError, first_sentence
from fedray.results.measure import Measure
from fedray.tracking.folder import INPUTS, read_metrics, with_unrecorded
from fedray.tracking.records import KEY, changed

SEEDS = ("run.seed", "data.seed")
"""The keys in which the repetitions of a run differ from each other."""

SECTIONS = ("run", "algorithm", "data", "model", "train", "engine")
"""The sections that every config.yaml has, in the order of the file."""

LAST_KEY = "portable_bits"
"""A key at the end of the last section, as long as there has been one."""

FILES = {"config.yaml", INPUTS, "metrics.csv", "summary.json"}
"""A folder with two of these files is a run folder, so that one is found, and named, if another one is gone."""

REMAINS = {"metrics.csv", "summary.json", INPUTS, "clients.parquet", "partition.parquet"}
"""A folder with one of these is what is left of a run folder. A config.yaml alone may be anything."""

CODE = {"algorithm.code": "code of the algorithm", "model.code": "code of the model"}
"""The further keys of :attr:`RecordedRun.identity`, and the names in inputs.json of the digests that they hold."""

NEEDED = ("round", "iterations", "cohort_size", "bytes_down", "bytes_up", "flops", "round_seconds", "wall_seconds")
"""Columns that every metrics.csv has."""

SET_ASIDE = ".bak-"
"""What the name of a folder contains that ``run.resume=false`` has renamed."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run that has ended, as its folder records it.

    ``settings`` are its configuration by dotted key, ``summary`` and ``inputs`` what the files of these names hold, and
    ``rows`` is metrics.csv with a further column ``bytes``: those of both directions.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    inputs: Mapping[str, str]
    rows: pd.DataFrame

    @property
    def measure(self) -> Measure:
        """The main metric of its task, on the test set."""
        return Measure(self.summary.get("metric", "accuracy"), self.summary.get("mode", "max"))

    @property
    def diverged(self) -> bool:
        """Whether its loss or its model was not finite any more."""
        return bool(self.summary["status"] == "diverged")

    @property
    def versions(self) -> dict[str, Any]:
        """The versions of fedray and of libraries that made it, by name."""
        return dict(self.summary.get("versions") or {})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings, and beside them the beginning of the digests of the algorithm's and the model's code, so that
        runs of an algorithm that was changed since are not taken for others of its seeds."""
        return {**self.settings, **{key: self.inputs[name][:8] for key, name in CODE.items() if name in self.inputs}}

    @property
    def seeds(self) -> tuple[Hashable, ...]:
        """The values of :data:`SEEDS`."""
        return tuple(self.settings.get(key) for key in SEEDS)

    def evaluations(self, measure: Measure) -> pd.DataFrame:
        """Returns the rows of the evaluated rounds, with the metric in a further column ``value``."""
        return self.rows.assign(value=self.rows.get(measure.column, np.nan)).dropna(subset="value")

    def final(self, measure: Measure) -> float:
        """Returns the metric at the last evaluation; NaN if there was none."""
        values = self.evaluations(measure)["value"]
        return float(values.iloc[-1]) if len(values) else math.nan

    def best(self, measure: Measure) -> float:
        """Returns the best of all evaluations; NaN if there was none."""
        values = measure.sign * self.evaluations(measure)["value"]
        return float(measure.sign * values.max())

    def last(self, measure: Measure, rounds: int | None = None) -> float:
        """Returns the mean of the evaluations in the last ``rounds`` rounds, or by default of the last ten."""
        rows = self.evaluations(measure)
        rows = rows.iloc[-10:] if rounds is None else rows[rows["round"] > self.rows["round"].max() - rounds]
        return float(rows["value"].mean())

    def first_to_reach(self, target: float, measure: Measure) -> pd.Series[Any] | None:
        """Returns the row of the first evaluation that was ``target`` or better; None if there is none.

        A run that diverged later has not reached it, because its model is lost.
        """
        rows = self.evaluations(measure)
        # by rounding, a target that is the mean of equal accuracies may be a little larger than these
        reached = rows[measure.sign * rows["value"] >= measure.sign * target - 1e-9]
        return None if self.diverged or not len(reached) else reached.iloc[0]


@dataclass(frozen=True)
class LeftOut:
    """A run folder that can't be compared, and why."""

    folder: Path
    reason: str


def find_runs(paths: Iterable[Path]) -> tuple[list[RecordedRun], list[LeftOut]]:
    """Returns the runs that have ended in the folders ``paths`` and below them, and the folders that are left out.

    Raises :class:`UserError` for a path that does not exist, or below which there is no run folder.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'not there'}: give folders of runs")
        below = list(_run_folders(path))
        if not below:
            raise UserError(f"there is no run folder in {path}: it would have a config.yaml and a metrics.csv")
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    found = [read_run(folder) for folder in folders.values()]
    runs = [each for each in found if isinstance(each, RecordedRun)]
    return runs, [each for each in found if isinstance(each, LeftOut)]


def _run_folders(path: Path) -> Iterator[Path]:
    """Yields the run folders in ``path`` and below it, behind links too, and what is left of such, in the order of
    their names. Hidden folders are skipped."""
    seen = set()
    for place, folders, files in os.walk(path, followlinks=True):
        # a link may lead back
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        is_run = len(FILES.intersection(files)) >= 2
        if is_run or REMAINS.intersection((*files, *folders)):
            yield Path(place)
        if is_run:
            # a run folder has no other below it
            folders.clear()


def read_run(folder: Path) -> RecordedRun | LeftOut:
    """Reads a run folder. It is left out if it is damaged, if the run has not ended, or if it was set aside."""
    if SET_ASIDE in folder.name:
        return LeftOut(folder, "it was set aside by run.resume=false")
    try:
        settings = _read_settings(folder)
        if not (folder / "summary.json").exists():
            return LeftOut(folder, "the run has not ended")
        summary = _read_object(folder / "summary.json", {"status": str, "rounds": int})
        if summary["status"] == "interrupted":
            done = f"{summary['rounds']} of {settings['run.rounds']} rounds"
            return LeftOut(folder, f"the run was interrupted after {done}")
        inputs = _read_object(folder / INPUTS, {}) if (folder / INPUTS).exists() else {}
        run = RecordedRun(folder, settings, summary, inputs, _read_rows(folder, summary["rounds"]))
        for name in changed(folder, summary.get(KEY), ("metrics.csv", "evaluation.parquet")):
            return LeftOut(folder, f"{name} is damaged: it is not what the run recorded")
    except (UserError, OSError) as error:
        return LeftOut(folder, str(error))
    return run


def _read_settings(folder: Path) -> dict[str, Any]:
    """Reads config.yaml, and returns the settings by dotted key. Raises :class:`UserError` if a part of it is gone."""
    recorded = read_file(folder / "config.yaml")
    lacking = [name for name in SECTIONS if not isinstance(recorded.get(name), Mapping)]
    if lacking:
        raise UserError(f"config.yaml is damaged: it lacks {', '.join(lacking)}")
    if LAST_KEY not in recorded["engine"]:
        raise UserError("config.yaml is damaged: it lacks its end")
    return with_unrecorded(recorded)


def _read_object(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """Reads a JSON file that holds an object with keys of these types. Raises :class:`UserError` if it does not."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is damaged: {first_sentence(error)}") from None
    if not isinstance(found, dict) or any(not isinstance(found.get(key), kind) for key, kind in types.items()):
        raise UserError(f"{path.name} is damaged: it does not hold {' and '.join(types) or 'an object'}")
    for key in ("versions", "machine"):
        if not isinstance(found.get(key, {}), dict):
            raise UserError(f"{path.name} is damaged: {key} is no object")
    return found


def _read_rows(folder: Path, rounds: int) -> pd.DataFrame:
    """Reads metrics.csv, with a further column ``bytes``. Raises :class:`UserError` if it lacks columns or rounds."""
    try:
        rows = read_metrics(folder)
    except OSError as error:
        raise UserError(f"can't read metrics.csv: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"metrics.csv is damaged: {first_sentence(error)}") from None
    if lacking := [name for name in NEEDED if name not in rows]:
        raise UserError(f"metrics.csv is damaged: it lacks {', '.join(lacking)}")
    if not rounds or rows["round"].tolist() != [*range(1, rounds + 1)]:
        raise UserError(f"metrics.csv is damaged: it does not have each of the {rounds} rounds once")
    return rows.assign(bytes=rows["bytes_down"] + rows["bytes_up"])
