"""Sweeps on Ray with the contract tests' small problem, and what they leave in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
from small_sweeps import SPACE

from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning import tune
from fedray.tuning.report import state_of
from fedray.tuning.spec import read_sweeps
from fedray.tuning.storage import study_of


def described(space=SPACE, **base: Any) -> dict[str, Any]:
    """Returns the content of a space file for FedProx; `base` changes its settings, with `__` for the dot in a key."""
    settings = {key: value for key, value in SETTINGS.items() if key not in ("engine.kind", "data.public_samples")}
    settings |= {"algorithm.name": "fedprox", "run.rounds": 5}
    return {"base": settings | {key.replace("__", "."): v for key, v in base.items()}, "spaces": {"wide": space}}


def go(folder: Path, *overrides: str, sweep=None, **options: Any):
    """Runs a sweep in `folder`/s on the small source, and returns its result."""
    everything = [f"tune.output={folder}", "tune.name=s", *overrides]
    (result,) = tune(sweep or described(), everything, data=small_source(), **options)
    return result


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """Returns the trials that the study in a sweep's folder holds."""
    return study_of(*read_sweeps(folder)).get_trials(deepcopy=False)


def states(folder: Path) -> list[str]:
    """Returns how each trial of a sweep's folder ended."""
    return [state_of(trial) for trial in trials(folder)]


def same_model(one: Path, other: Path, number: int) -> None:
    """Checks that a trial ended with the same model in two sweeps' folders."""
    summaries = [
        json.loads((folder / f"trials/{number:04d}/seed-0/summary.json").read_text()) for folder in (one, other)
    ]
    assert summaries[0]["model_sha256"] == summaries[1]["model_sha256"]
