"""What the virtual clock and asynchronous rounds cost: seconds per round with them against those without.

    python analysis/benchmarks/clock.py [--turns 9] [--rounds 30]

C, whose rounds are short, is logistic regression on MNIST with 10,000 clients, of which 100 make two steps of 10. With
`devices` the clients have one of two phones, with `own devices` each has numbers of its own, and all share a connection
that they can fill. `rounds` is LeNet-5 with 20 of 100 clients, 10 steps of 32; `buffered` makes as many client updates,
from 40 clients at a time; its rounds have unequal work, so that there the mean over all rounds counts, else the median.
As in diagnostics.py, runs take turns, and ratios are of medians over the turns.
"""

from __future__ import annotations

from typing import Any

from diagnostics import compare, turns_and_rounds

ALIKE = {
    "algorithm.name": "fedavg", "data.source": "mnist", "data.partition.kind": "iid", "data.public_samples": 0,
    "train.lr": 0.01, "run.eval_every": 0, "run.checkpoint_every": 0,
}  # fmt: skip
C = ALIKE | {
    "data.clients": 10_000, "model.name": "logistic", "train.cohort_size": 100, "train.local_steps": 2,
    "train.batch_size": 10, "engine.kind": "local",
}  # fmt: skip
SHARED = {"system.server_mbps": 1000, "system.deadline_seconds": 1000}
PHONES = {"system.devices": {"phone_low": 0.5, "phone_mid": 0.5}, "system.networks": "mobile_4g"}
OWN = {
    "system.flops_per_second": {"lognormal": [1e9, 0.5]}, "system.down_mbps": {"lognormal": [20, 0.5]},
    "system.up_mbps": {"lognormal": [8, 0.5]}, "system.latency_ms": {"uniform": [10, 80]},
}  # fmt: skip
ROUNDS = ALIKE | {
    "data.clients": 100, "model.name": "lenet5", "train.cohort_size": 20, "train.local_steps": 10,
    "train.batch_size": 32, "engine.kind": "local",
}  # fmt: skip
ON_RAY = {"engine.kind": "ray", "engine.actors": 2, "engine.address": "local"}
BUFFERED = PHONES | {"system.mode": "buffered", "system.concurrency": 40}

CASES: dict[str, dict[str, Any]] = {
    "C": C,
    "C, devices": C | SHARED | PHONES,
    "C, own devices": C | SHARED | OWN,
    "rounds": ROUNDS,
    "rounds, buffered": ROUNDS | BUFFERED,
    "rounds on Ray": ROUNDS | ON_RAY,
    "rounds on Ray, buffered": ROUNDS | ON_RAY | BUFFERED,
}

if __name__ == "__main__":
    options = turns_and_rounds(__doc__, turns=9, rounds=30)
    whole = [case for case in CASES if case.startswith("rounds")]
    compare("clock", CASES, options.turns, options.rounds, whole)
