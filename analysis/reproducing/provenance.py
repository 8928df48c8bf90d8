"""Says how a table was made: the command, the versions, the machine, and what the runs took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedray.results.runs import RecordedRun

SHOWN = ("fedray", "torch", "ray", "numpy", "python")
"""The versions that are named. They decide about the results."""


def made_by(asked: Mapping[str, Any], runs: Iterable[RecordedRun]) -> dict[str, Any]:
    """Returns what ``asked`` says, with the versions and processors of all ``runs``, and the hours that they took.

    Runs side by side count once each, so that the hours are more than those that passed.
    """
    runs = {run.folder: run for run in runs}.values()
    versions = {name: _all_of(run.versions.get(name) for run in runs) for name in SHOWN}
    hours = math.fsum(float(run.rows["wall_seconds"].iloc[-1]) for run in runs) / 3600
    return {**asked, "versions": versions, "processors": _processors(list(runs)), "runs": len(runs), "hours": hours}


def sentence(made: Mapping[str, Any]) -> str:
    """Returns it as a line for a table."""
    versions = ", ".join(f"{name} {value}" for name, value in made["versions"].items() if value)
    text = f"Made by `{made['command']}` with {made['seeds']} seed{'s' if made['seeds'] > 1 else ''}"
    if not made["runs"]:
        return f"{text}."
    return (
        f"{text}: {made['runs']} runs of {made['hours']:.3g} h in all, on {made['processors'] or 'unknown processors'};"
        f" {versions}."
    )


def _processors(runs: Sequence[RecordedRun]) -> str:
    """Returns the models of the processors or GPUs on which the runs trained."""
    machines = [run.summary.get("machine") or {} for run in runs]
    found = [str(process.get("device")) for machine in machines for process in machine.get("processes", [])]
    return ", ".join(dict.fromkeys(found))


def _all_of(values: Iterable[Any]) -> str:
    return " and ".join(sorted({str(value) for value in values if value}))
