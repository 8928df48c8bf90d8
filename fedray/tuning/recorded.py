"""Compares the record in a sweep's folder with a sweep that should continue in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedray.config import expand
from fedray.errors import UserError
from fedray.tracking.folder import keys_that_differ, names_that_differ
from fedray.tuning.settings import TuneConfig
from fedray.tuning.spec import RECORD, SweepSpec, read_record

MAY_CHANGE = ("trials", "max_concurrent_trials", "storage", "name", "output", "working_copy", "resume")
"""The keys of TuneConfig that may change when a sweep is continued."""


def check_record(spec: SweepSpec) -> None:
    """Checks, before a report is made, that the folder of ``spec`` holds the sweep that ``spec`` describes. Raises
    :class:`UserError` if there is none (no sweep.yaml), or sweep.yaml records another sweep."""
    if not (spec.folder / RECORD).exists():
        raise UserError(f"there is no sweep in {spec.folder}")
    old, new = read_record(spec.folder), spec.record()
    # these keys are added to a sweep's base when it is opened
    added = {key: old["base"][key] for key in ("data.validation_samples", "run.given") if key in old["base"]}
    new["base"] = added | new["base"]
    new["tune"]["objective"] = _with_directions(new["tune"]["objective"], old)
    if new["tune"]["pruner"]["axis"] == "auto":
        new["tune"]["pruner"]["axis"] = old["tune"].get("pruner", {}).get("axis")
    if differ := record_keys_that_differ(old, {**new, "inputs": old.get("inputs", {})}):
        raise UserError(
            f"{spec.folder} holds another sweep ({list_keys(differ)}): a report is of what was run; ask for what was "
            "asked for then, or use another tune.name"
        )


def with_recorded_objective(spec: SweepSpec) -> SweepSpec:
    """Returns ``spec`` with ``tune.objective`` filled in, so that a report knows by which column the trials of this
    sweep were compared. If the space file sets no objective, or not in which direction, that is taken from sweep.yaml,
    the record in the sweep's folder. If there is no record, ``spec`` is returned unchanged."""
    is_whole = spec.tune.objective and all(spec.tune.objective.values())
    if is_whole or not (spec.folder / RECORD).exists():
        return spec
    objective = _with_directions(spec.tune.objective, read_record(spec.folder))
    return replace(spec, tune=spec.tune.model_copy(update={"objective": objective}))


def _with_directions(objective: Mapping[str, Any] | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``objective`` with the directions (max, min) that it lacks as they are in ``record``, the content of a
    sweep.yaml; without an objective, the one that is recorded."""
    recorded = record["tune"].get("objective") or {}
    return {name: way or recorded.get(name) for name, way in (objective or recorded).items()}


def objective_of(spec: SweepSpec) -> str | None:
    """Returns the name of the first objective of a sweep, such as ``validation_accuracy``. Returns None if the space
    file sets none and the sweep has not begun."""
    return next(iter(with_recorded_objective(spec).tune.objective), None)


def record_keys_that_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compares two records of sweeps, to decide whether a sweep may be continued. Returns the names of the keys, such
    as ``tune.seeds``, and inputs (data and code) that differ although they must be equal. An empty list means that the
    sweep may be continued.

    Records are contents of sweep.yaml: ``old`` is the one in the folder, and ``new`` that of the sweep that should
    continue there. Keys that may change, such as ``tune.trials``, are ignored.
    """
    a, b = (dict(each["tune"]) for each in (old, new))
    # compared as texts, because Optuna distinguishes 1 from 1.0, and the order of objectives or values matters
    tune = [
        f"tune.{key}"
        for key in TuneConfig.model_fields
        if key not in MAY_CHANGE and json.dumps(a.get(key)) != json.dumps(b.get(key))
    ]
    others = [key for key in ("spaces", "first") if json.dumps(old.get(key)) != json.dumps(new.get(key))]
    # keys_that_differ accepts more rounds, because a run may be extended; the trials of a sweep may not
    rounds = ["run.rounds"] if old["base"].get("run.rounds") != new["base"].get("run.rounds") else []
    inputs = names_that_differ(old.get("inputs", new["inputs"]), new["inputs"])
    return [*tune, *others, *rounds, *keys_that_differ(expand(old["base"]), expand(new["base"])), *inputs]


def list_keys(keys: Sequence[str]) -> str:
    """Returns the end of a sentence for error messages, which names the first six of ``keys``, such as
    ``tune.seeds, run.rounds differ``."""
    return f"{', '.join(keys[:6])} differ{'s' if len(keys) == 1 else ''}"
