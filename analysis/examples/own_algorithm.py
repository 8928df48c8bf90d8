"""An algorithm of your own: FedAvg whose server takes a step along the mean of the last three updates.

python analysis/examples/own_algorithm.py [FOLDER]

The class is the whole algorithm; `fedray run algorithm.name=analysis/examples/own_algorithm.py:LastThree` runs it with
any settings. It is compared with FedAvg over three seeds, side by side on Ray. Writes own_algorithm.png into FOLDER
(runs/examples).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedray
from fedray.algorithms import ServerState
from fedray.algorithms.fedavg import FedAvg


class LastThree(FedAvg):
    """x <- x - eta_g (d^r + d^{r-1} + d^{r-2}) / 3 with d^r = x - xbar, and 0 for rounds before the first one."""

    def init_server(self, server: ServerState) -> None:
        server["last"] = server["before"] = server["x"].zeros()

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        x = server["x"].with_buffers_of(sums["y"])
        d = x - sums["y"]
        server["x"] = x - server.server_lr / 3 * (d + server["last"] + server["before"])
        server["before"], server["last"] = server["last"], d


KEYS = {
    "data.clients": 10, "data.partition.alpha": 0.1, "model.name": "mlp", "train.local_steps": 10,
    "train.batch_size": 32, "train.lr": 0.05, "run.rounds": 25, "run.name": "own-algorithm",
}  # fmt: skip


def main(folder: Path = Path("runs/examples"), seeds: int = 3, **settings: Any) -> fedray.Comparison:
    names = ["fedavg", f"{Path(__file__)}:LastThree"]
    done = fedray.simulate_many(
        {**KEYS, "run.output": str(folder), **settings}, seeds=seeds, over={"algorithm.name": names}, verbose=True
    )
    found = done.compare()
    print(found.table[["group", "runs", "final"]])
    (_, figure), *_ = found.figures()
    figure.savefig(folder / "own_algorithm.png", dpi=150)
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
