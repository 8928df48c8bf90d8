"""Sweeps on the contract tests' small problem that need no Ray, and the messages of their trials."""

from __future__ import annotations

from fedray.experiment.custom import CustomObjects
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.opening import open_sweep
from fedray.tuning.spec import read_sweeps
from fedray.tuning.trial import RunEnd, TrialEnd

SPACE = {"algorithm.mu": {"loguniform": [0.001, 1]}, "train.lr": {"uniform": [0.01, 0.5]}}


def described(**more):
    """Returns the content of a space file for FedProx, with `more` sections."""
    base = {k: v for k, v in SETTINGS.items() if k != "train.local_epochs"}
    base |= {"algorithm.name": "fedprox", "train.local_steps": 4, "run.rounds": 10}
    return {"base": base, "spaces": {"wide": SPACE}, **more}


def opened(tmp_path, *overrides, say=print, **more):
    """Opens the sweep of `described(**more)` in the folder `tmp_path`/s."""
    (spec,) = read_sweeps(described(**more), [f"tune.output={tmp_path}", "tune.name=s", *overrides])
    return open_sweep(spec, CustomObjects(small_source()), say)


def row(round, accuracy=0.5, size=100):
    """Returns the columns of metrics.csv that a sweep reads, where each round sends `size` bytes each way."""
    return {"round": round, "bytes_down": size * round, "bytes_up": size * round, "flops": 7.0 * round,
            "validation_accuracy": accuracy}  # fmt: skip


def ends(sweep, number, accuracy, runs=1):
    """Reports that each run of a trial completed its ten rounds with this accuracy, and that the trial ended."""
    for run in range(runs):
        sweep.report(str(number), RunEnd(run, "completed", row(10, accuracy)))
    sweep.report(str(number), TrialEnd(None))
