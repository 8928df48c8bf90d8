"""Whether a sweep's folder holds the sweep that is asked for, by the record in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedray.config import expand
from fedray.errors import UserError
from fedray.tracking.folder import keys_that_differ, names_that_differ
from fedray.tuning.settings import TuneConfig
from fedray.tuning.spec import RECORD, SweepSpec, read_record

EFFORT = ("trials", "concurrency", "storage", "name", "output", "resume")
"""Keys of TuneConfig that may differ when a sweep goes on."""


def check_recorded(spec: SweepSpec) -> None:
    """Raises :class:`UserError` if the folder of ``spec`` holds another sweep: a report would say of old trials what
    they did not have."""
    if not (spec.folder / RECORD).exists():
        return
    old, new = read_record(spec.folder), spec.record()
    # what opening a sweep adds to what it is asked to do
    added = {key: old["base"][key] for key in ("data.validation_samples", "run.given") if key in old["base"]}
    new["base"] = added | new["base"]
    if new["tune"]["prune"]["axis"] == "auto":
        new["tune"]["prune"]["axis"] = old["tune"].get("prune", {}).get("axis")
    if differ := differing_keys_of(old, {**new, "inputs": old.get("inputs", {})}):
        raise UserError(
            f"{spec.folder} holds another sweep ({', '.join(differ[:6])} differ{'s' if len(differ) == 1 else ''}): a "
            "report is of what was run; give what was asked for then, or another tune.name"
        )


def differing_keys_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys in which two sweeps differ that can't be taken for one."""
    a, b = (dict(each["tune"]) for each in (old, new))
    # as texts: 1 is not 1.0 for Optuna, nor are keys in another order the same
    tune = [
        f"tune.{key}"
        for key in TuneConfig.model_fields
        if key not in EFFORT and json.dumps(a.get(key)) != json.dumps(b.get(key))
    ]
    others = [key for key in ("spaces", "first") if json.dumps(old.get(key)) != json.dumps(new.get(key))]
    # a run may be made longer, the trials of a sweep not
    rounds = ["run.rounds"] if old["base"].get("run.rounds") != new["base"].get("run.rounds") else []
    inputs = names_that_differ(old.get("inputs", new["inputs"]), new["inputs"])
    return [*tune, *others, *rounds, *keys_that_differ(expand(old["base"]), expand(new["base"])), *inputs]
