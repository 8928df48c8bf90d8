"""Finds run folders and reads them: the settings of each run, and its results in each round."""

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
from fedray.tracking.failure import has_failed
from fedray.tracking.folder import INPUTS, with_unrecorded
from fedray.tracking.records import KEY, changed
from fedray.tracking.tables import read_metrics

SEEDS = ("run.seed", "data.seed")
"""The keys in which the repetitions of a run differ from each other."""

SECTIONS = ("run", "algorithm", "data", "model", "train", "engine")
"""The sections that every config.yaml has, in the order of the file."""

LAST_KEY = "portable_bits"
"""A key at the end of the last section, in all versions of fedray. A config.yaml without it was cut off."""

FILES = {"config.yaml", INPUTS, "metrics.csv", "summary.json"}
"""The main files of a run folder. A folder with two of them is a run folder; a missing one is then reported."""

REMAINS = {"metrics.csv", "summary.json", INPUTS, "clients.parquet", "partition.parquet"}
"""Files that only runs write. A folder with one of them is the rest of a run folder. A config.yaml alone may be
anything."""

DIGESTS = {
    "training data": "data.training_set",
    "test data": "data.test_set",
    "loss": "task.loss.code",
    "code of the algorithm": "algorithm.code",
    "code of the model": "model.code",
    "configuration of the model": "model.configuration",
    "code of the head": "model.head.code",
    "rule of train.aggregation": "train.aggregation.code",
    "attack": "attack.code",
    "code of train.sampling": "train.sampling.code",
}
"""The names of digests in inputs.json that are the same in all repetitions of a run, each with its key in
:attr:`RecordedRun.identity`. More of them have a name that depends on the run (:func:`_key_of_digest`)."""

NEEDED = ("round", "iterations", "cohort_size", "bytes_down", "bytes_up", "flops", "round_seconds", "wall_seconds")
"""Columns that every metrics.csv has."""

SET_ASIDE = ".bak-"
"""A part of the names of folders that ``run.resume=false`` has renamed."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run that has ended, as recorded in its ``folder``.

    ``settings`` is its configuration by dotted key. ``summary`` and ``inputs`` are the contents of summary.json
    (status, main metric, versions and so on) and inputs.json (digests of data and code). ``rows`` is metrics.csv, with
    a row for each round and an additional column ``bytes``, the sum of ``bytes_down`` and ``bytes_up``. The columns
    ``virtual_seconds`` and ``joules`` are NaN without a virtual clock.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    inputs: Mapping[str, str]
    rows: pd.DataFrame

    @property
    def measure(self) -> Measure:
        """The main metric of the run's task on the test set, such as the accuracy, by which the run is compared with
        others."""
        return Measure(self.summary.get("metric", "accuracy"), self.summary.get("mode", "max"))

    @property
    def diverged(self) -> bool:
        """Whether the run ended early because a loss or the model was not finite any more."""
        return bool(self.summary["status"] == "diverged")

    @property
    def has_private_layers(self) -> bool:
        """Whether layers stayed at each client. The global model then has their initial values, so that its metrics say
        little about the run, whose result are the personal models."""
        return "private_parameters" in self.summary

    @property
    def versions(self) -> dict[str, Any]:
        """The versions of fedray and of the libraries with which the run was made, by name, such as
        ``{"fedray": "0.2.0"}``."""
        return dict(self.summary.get("versions") or {})

    @property
    def identity(self) -> dict[str, Any]:
        """The values that say what was run, by which runs are grouped. Two runs are repetitions of each other if these
        values are the same, except for the seeds and other settings in which repetitions may differ
        (:func:`~fedray.results.grouping.is_ignored`).

        It has all settings by dotted key, and the :attr:`digests`.
        """
        return {**self.settings, **self.digests}

    @property
    def digests(self) -> dict[str, str]:
        """The first 8 digits of the digests of the data and of the user's code, by keys such as ``data.test_set`` and
        ``algorithm.code``. Because of them, two runs between which these were changed do not count as repetitions."""
        metric = f"metric {self.measure.metric}"
        keys = {name: "task.metric.code" if name == metric else _key_of_digest(name) for name in self.inputs}
        return {key: self.inputs[name][:8] for name, key in keys.items() if key is not None}

    @property
    def seeds(self) -> tuple[Hashable, ...]:
        """The values of ``run.seed`` and ``data.seed`` in the run's configuration, in this order. Repetitions of a run
        differ in them."""
        return tuple(self.settings.get(key) for key in SEEDS)

    def evaluations(self, measure: Measure) -> pd.DataFrame:
        """Returns the rows of metrics.csv of the rounds in which the metric ``measure`` was evaluated. The additional
        column ``value`` is the metric."""
        return self.rows.assign(value=self.rows.get(measure.column, np.nan)).dropna(subset="value")

    def final(self, measure: Measure) -> float:
        """Returns the value of the metric ``measure`` at the last evaluation of the run; NaN if there was none."""
        values = self.evaluations(measure)["value"]
        return float(values.iloc[-1]) if len(values) else math.nan

    def best(self, measure: Measure) -> float:
        """Returns the best value of the metric ``measure`` among all evaluations of the run; NaN if there was none."""
        values = measure.sign * self.evaluations(measure)["value"]
        return float(measure.sign * values.max())

    def last(self, measure: Measure, rounds: int | None = None) -> float:
        """Returns the mean of the metric ``measure`` over the evaluations in the last ``rounds`` rounds, or by default
        over the last ten evaluations. It varies less by chance than a single evaluation."""
        return float(self.last_values(measure, rounds).mean())

    def last_values(self, measure: Measure, rounds: int | None = None) -> pd.Series[Any]:
        """Returns the values of the metric ``measure`` at the evaluations in the last ``rounds`` rounds, or by default
        at the last ten evaluations. :meth:`last` is their mean."""
        rows = self.evaluations(measure)
        rows = rows.iloc[-10:] if rounds is None else rows[rows["round"] > self.rows["round"].max() - rounds]
        return rows["value"]

    def first_to_reach(self, target: float, measure: Measure) -> pd.Series[Any] | None:
        """Returns the row of metrics.csv for the first evaluation in which the metric ``measure`` was ``target`` or
        better. The row says what reaching the target cost: rounds, bytes, FLOPs and seconds.

        Returns None if the target was not reached, or if the run diverged, even after reaching it, because its model is
        lost.
        """
        rows = self.evaluations(measure)
        # because of rounding, a target that is the mean of equal accuracies may be slightly larger than they are
        reached = rows[measure.sign * rows["value"] >= measure.sign * target - 1e-9]
        return None if self.diverged or not len(reached) else reached.iloc[0]


def _key_of_digest(name: str) -> str | None:
    """Returns the key in :attr:`RecordedRun.identity` of the digest ``name`` in inputs.json; None if repetitions may
    differ in it, as they do in the partition and the initial weights."""
    if name.startswith("step "):
        return f"train.upload.{name.split()[1]}.code"
    return DIGESTS.get(name, "data.transform.code" if name.startswith("code of ") else None)


@dataclass(frozen=True)
class LeftOut:
    """The ``folder`` of a run that can't be compared with other runs, and the ``reason`` in words."""

    folder: Path
    reason: str


def find_runs(paths: Iterable[Path]) -> tuple[list[RecordedRun], list[LeftOut]]:
    """Finds all run folders in the folders ``paths`` and below them, and reads them. Returns the runs that have ended,
    and the run folders that are left out: those that are damaged, were renamed by ``run.resume=false``, or belong to a
    run that has not ended.

    Raises :class:`UserError` for a path that does not exist, or that contains no run folder.
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
    """Yields the run folders in ``path`` and below it, sorted by name, and also folders with remains of a run. Links
    are followed; hidden folders are skipped."""
    seen = set()
    for place, folders, files in os.walk(path, followlinks=True):
        # a link may lead in a circle
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if SET_ASIDE in Path(place).name and Path(place) != path:
            # a run, or a whole sweep of runs
            yield Path(place)
            folders.clear()
            continue
        is_run = len(FILES.intersection(files)) >= 2
        if is_run or REMAINS.intersection((*files, *folders)):
            yield Path(place)
        if is_run:
            # there is no other run folder below a run folder
            folders.clear()


def read_run(folder: Path) -> RecordedRun | LeftOut:
    """Reads a run folder: its settings, summary and metrics. Returns a :class:`LeftOut` with the reason if the run has
    not ended, or if its folder is damaged or was renamed because ``run.resume=false`` started the run over."""
    if SET_ASIDE in folder.name:
        return LeftOut(folder, "it was set aside by run.resume=false or tune.resume=false")
    try:
        settings = _read_settings(folder)
        if not (folder / "summary.json").exists():
            return LeftOut(folder, "the run has not ended")
        summary = _read_object(folder / "summary.json", {"status": str, "rounds": int})
        if has_failed(folder):
            return LeftOut(folder, f"the run failed after round {summary['rounds']}: {summary.get('reason')}")
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
    """Reads config.yaml in a run's ``folder``, and returns the settings by dotted key. Raises :class:`UserError` if the
    file is incomplete."""
    recorded = read_file(folder / "config.yaml")
    lacking = [name for name in SECTIONS if not isinstance(recorded.get(name), Mapping)]
    if lacking:
        raise UserError(f"config.yaml is damaged: it lacks {', '.join(lacking)}")
    if LAST_KEY not in recorded["engine"]:
        raise UserError("config.yaml is damaged: it lacks its end")
    return with_unrecorded(recorded)


def _read_object(path: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """Reads a JSON file that holds an object, and returns it as a dict. Raises :class:`UserError` if the object lacks a
    key in ``types`` or has a value of another type than ``types`` says."""
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
    """Reads metrics.csv in a run's ``folder`` as a DataFrame with a row for each round, and adds the column ``bytes``.
    Raises :class:`UserError` if columns or rounds are missing."""
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
    of_clock = {name: rows.get(name, np.nan) for name in ("virtual_seconds", "joules")}
    return rows.assign(bytes=rows["bytes_down"] + rows["bytes_up"], **of_clock)
