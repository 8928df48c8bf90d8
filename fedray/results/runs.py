"""Finds run folders and reads them: what each run was, and what it reached in each round."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from fedray.config import read_file
from fedray.errors import UserError, first_sentence
from fedray.results.measure import Measure
from fedray.tracking.folder import INPUTS, read_metrics, with_unrecorded
from fedray.tracking.records import KEY, changed

SEEDS = ("run.seed", "data.seed")
"""The keys in which the repetitions of a run differ from each other."""

SECTIONS = ("run", "algorithm", "data", "model", "train", "engine")
"""The sections that every config.yaml has, in the order of the file."""

FILES = {"config.yaml", INPUTS, "metrics.csv", "summary.json"}
"""A folder with two of these files is a run folder, so that one is found, and named, if another one is gone."""

REMAINS = {"metrics.csv", "summary.json", INPUTS, "clients.parquet", "partition.parquet"}
"""A folder with one of these is what is left of a run folder. A config.yaml alone may be anything."""

CODE = {"algorithm.code": "code of the algorithm", "model.code": "code of the model"}
"""The names of :attr:`Run.told` for what inputs.json says of the code."""

LAST_KEY = "portable_bits"
"""A key at the end of the last section, as long as there has been one."""

NEEDED = ("round", "iterations", "cohort_size", "bytes_down", "bytes_up", "flops", "round_seconds", "wall_seconds")
"""Columns that every metrics.csv has."""

SET_ASIDE = ".bak-"
"""What the name of a folder contains that ``run.resume=false`` has renamed."""


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
    def told(self) -> dict[str, Any]:
        """The settings, and beside them ``algorithm.code`` and ``model.code``: the beginning of the digest of each
        code, so that runs of an algorithm that was changed since are not taken for others of its seeds."""
        return {**self.settings, **{key: self.inputs[name][:8] for key, name in CODE.items() if name in self.inputs}}

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

    def first_to_reach(self, target: float, measure: Measure) -> pd.Series | None:
        """Returns the row of the first evaluation that was ``target`` or better; None if there is none.

        A run that diverged later has not reached it, because its model is lost.
        """
        rows = self.evaluations(measure)
        # by rounding, a target that is the mean of equal accuracies may be a little larger than these
        there = rows[measure.sign * rows["value"] >= measure.sign * target - 1e-9]
        return None if self.diverged or not len(there) else there.iloc[0]


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
        found = read_run(folder, whole=True)
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
    """Yields the run folders in ``path``, and what is left of such, in the order of their names. A run folder has no
    other below it."""
    for folder, below, files in walk(path):
        is_run = len(FILES.intersection(files)) >= 2
        if is_run or REMAINS.intersection((*files, *below)):
            yield folder
        if is_run:
            below.clear()


def walk(path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yields the folder ``path`` and each one below it, behind links too, with the names of the folders and files in
    it. Those that the caller takes out of the folders' names are not entered, nor are hidden ones."""
    seen = set()
    for place, folders, files in os.walk(path, followlinks=True):
        # a link may lead back
        if (there := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(there)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), folders, files


def read_run(folder: Path, *, whole: bool = False) -> Run | LeftOut:
    """Reads a run folder. It is left out if it is damaged, if the run has not ended, or was set aside.

    ``whole`` is for what depends on all settings: then config.yaml must have all of its sections.
    """
    if SET_ASIDE in folder.name:
        return LeftOut(folder, "it was set aside by run.resume=false")
    try:
        recorded = read_file(folder / "config.yaml")
        if whole:
            _check_whole(recorded)
        settings = with_unrecorded(recorded)
        if not (folder / "summary.json").exists():
            return LeftOut(folder, "the run has not ended")
        summary = _checked_summary(_read_object(folder / "summary.json", ("status", "rounds")))
        if summary["status"] == "interrupted":
            done = f"{summary['rounds']} of {settings['run.rounds']} rounds"
            return LeftOut(folder, f"the run was interrupted after {done}")
        inputs = _read_object(folder / INPUTS) if (folder / INPUTS).exists() else {}
        run = Run(folder, settings, summary, inputs, _rows_of(folder, summary))
        _check_last_part(folder / "evaluation.parquet")
        differs = _disagreement(run)
        if differs is None and (others := [*changed(folder, summary.get(KEY), ("metrics.csv", "evaluation.parquet"))]):
            return LeftOut(folder, f"{others[0]} is damaged: it is not what the run recorded")
    except UserError as error:
        return LeftOut(folder, str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return LeftOut(folder, f"it is damaged: {first_sentence(error)}")
    return run if differs is None else LeftOut(folder, f"metrics.csv is damaged: {differs}")


def _check_whole(recorded: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` if a part of what config.yaml holds is gone."""
    lacking = [name for name in SECTIONS if not isinstance(recorded.get(name), Mapping)]
    if lacking:
        raise UserError(f"config.yaml is damaged: it lacks {', '.join(lacking)}")
    if LAST_KEY not in recorded["engine"]:
        raise UserError("config.yaml is damaged: it lacks its end")


def _read_object(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a JSON file that holds an object with ``keys``. Raises :class:`UserError` if it does not."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is damaged: {first_sentence(error)}") from None
    if not isinstance(found, dict) or any(key not in found for key in keys):
        raise UserError(f"{path.name} is damaged: it does not hold {' and '.join(keys) or 'an object'}")
    return found


def _checked_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns what summary.json holds. Raises :class:`UserError` if a part of it is no object."""
    for name in ("versions", "machine"):
        if not isinstance(summary.get(name) or {}, dict):
            raise UserError(f"summary.json is damaged: {name} is no object")
    return summary


def _check_last_part(folder: Path) -> None:
    """Raises :class:`UserError` if the last part of a table, which is a folder of Parquet files, is not whole."""
    parts = sorted(folder.glob("part-*.parquet"))
    if parts:
        try:
            pq.read_metadata(parts[-1])
        except (OSError, ValueError) as error:
            raise UserError(f"{folder.name} is damaged: {first_sentence(error)}") from None


def _rows_of(folder: Path, summary: Mapping[str, Any]) -> pd.DataFrame:
    """Reads metrics.csv, with a further column ``bytes``. Raises :class:`UserError` if it lacks columns or rounds."""
    try:
        rows = read_metrics(folder)
    except StopIteration:
        raise UserError("metrics.csv is damaged: it is empty") from None
    except OSError as error:
        raise UserError(f"can't read metrics.csv: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"metrics.csv is damaged: {first_sentence(error)}") from None
    lacking = [name for name in NEEDED if name not in rows]
    if lacking:
        raise UserError(f"metrics.csv is damaged: it lacks {', '.join(lacking)}")
    rounds = int(summary["rounds"])
    if not len(rows) or rows["round"].tolist() != [*range(1, rounds + 1)]:
        raise UserError(f"metrics.csv is damaged: it does not have each of the {rounds} rounds once")
    return rows.assign(bytes=rows["bytes_down"] + rows["bytes_up"])


def _disagreement(run: Run) -> str | None:
    """Returns how the last evaluation in metrics.csv differs from that of summary.json; None if it does not."""
    recorded = run.summary.get("final")
    found = run.final(Measure(run.summary.get("metric", "accuracy"), run.summary.get("mode", "max")))
    if recorded is None or math.isnan(found) or math.isclose(recorded, found, rel_tol=1e-9):
        return None
    return f"it ends with {found:g}, and summary.json has {recorded:g}"


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the settings of the run in ``folder`` by dotted key. Those that an older fedray did not have are
    what it did without them. Raises :class:`UserError` if they can't be read."""
    return with_unrecorded(read_file(folder / "config.yaml"))
