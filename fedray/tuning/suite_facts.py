"""What the runs of a suite were given, which shows whether two rows of its table differ in more than the algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedray.config import flat, read_file


def facts_of(run: Path) -> dict[str, Any]:
    """What the run in a folder had: the ``parameters`` of its model, the ``weighting`` of clients, and on how many
    labelled ``public_samples`` it trained, at the server or dealt out to the clients: 0 where these were held out."""
    from fedray.algorithms import find_algorithm

    config = flat(read_file(run / "config.yaml"))
    used = config["data.public_to"] == "clients" or find_algorithm(config["algorithm.name"]).needs_public
    return {
        "parameters": json.loads((run / "summary.json").read_text())["parameters"],
        "weighting": config["train.weighting"],
        "public_samples": config["data.public_samples"] if used else 0,
    }
