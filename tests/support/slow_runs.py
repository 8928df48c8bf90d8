"""Runs that last long enough to be killed in the middle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fedray.algorithms import known_algorithms
from fedray.testing.contracts import SETTINGS

SLOW_ROUNDS = {**SETTINGS, "model.hidden": [64], "train.local_epochs": 8, "run.rounds": 12, "run.checkpoint_every": 3}
SLOW_ROUNDS |= {"model.proj_dim": 16}


def slow_rounds(algorithm: str) -> dict[str, Any]:
    """A run of rounds that last long enough to be killed in the middle."""
    # the rate of the adaptive server rules is in units of their normalised step
    server_lr = {"train.server_lr": 0.02} if algorithm in ("fedadam", "fedyogi", "fedadagrad") else {}
    # its local steps take four times as long as others'
    epochs = {"train.local_epochs": 2} if algorithm == "fedsiam_da" else {}
    found = {**SLOW_ROUNDS, "algorithm.name": algorithm, **server_lr, **epochs}
    if algorithm == "fedbn":
        # with norms to keep
        del found["model.hidden"]
        found["model.name"] = "small_runs:Normed"
    return found


def every(quick: Iterable[str]) -> list[Any]:
    """All algorithms as parameters, of which those that are not ``quick`` are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in known_algorithms()]


BUFFERED = {
    "system.mode": "buffered", "system.flops_per_second": {"lognormal": [2e7, 1.0]}, "system.buffer": 3,
    "train.cohort_size": None,
}  # fmt: skip
"""Asynchronous rounds, in which clients of several updates train at the same time."""

CLOCK = {
    "system.flops_per_second": {"lognormal": [2e7, 1.0]}, "system.up_mbps": {"uniform": [0.1, 1]}, "system.watts": 5,
    "system.server_mbps": 2, "system.availability": {"from": 0, "to": 23, "shift": {"uniform": [0, 24]}},
    "system.dropout": 0.1,
}  # fmt: skip
PROFILES = {
    "system.devices": {"phone_low": 0.5, "raspberry_pi_4": 0.5}, "system.networks": {"mobile_4g": 0.6, "ethernet": 0.4},
    "system.server_mbps": 2, "system.availability": {"from": 0, "to": 20, "shift": {"uniform": [0, 24]}},
    "system.dropout": 0.1, "system.deadline_seconds": 0.15, "system.on_late": "keep",
    "system.server_flops_per_second": 1e7,
}  # fmt: skip
TIMED = {
    "deadline": {
        **slow_rounds("scaffold"), **CLOCK, "system.deadline_seconds": 5, "system.over_select": 1.4,
        "system.server_flops_per_second": 1e7,
    },
    "buffered": {**slow_rounds("fedadam"), **CLOCK, "system.mode": "buffered", "system.concurrency": 8},
    "buffered, with what uploads leave behind": {
        **slow_rounds("fedavg"), **CLOCK, "system.mode": "buffered", "system.concurrency": 8,
        "train.upload": [{"topk": 0.3}],
    },
    "two phases": {**slow_rounds("mime"), **PROFILES},
    "a server that trains": {**slow_rounds("pfedmo"), **PROFILES},
}  # fmt: skip
"""Such runs with everything that the virtual clock has."""
