"""Runs that last long enough to be killed in the middle."""

from __future__ import annotations

from typing import Any

from fedray.testing.contracts import SETTINGS

SLOW_ROUNDS = {**SETTINGS, "model.hidden": [64], "train.local_epochs": 8, "run.rounds": 12, "run.checkpoint_every": 3}
SLOW_ROUNDS |= {"model.proj_dim": 16}


def slow_rounds(algorithm: str) -> dict[str, Any]:
    """A run of rounds that last long enough to be killed in the middle."""
    # the rate of the adaptive server rules is in units of their normalised step
    server_lr = {"train.server_lr": 0.02} if algorithm in ("fedadam", "fedyogi", "fedadagrad") else {}
    # its local steps take four times as long as others'
    epochs = {"train.local_epochs": 2} if algorithm == "fedsiam_da" else {}
    return {**SLOW_ROUNDS, "algorithm.name": algorithm, **server_lr, **epochs}
