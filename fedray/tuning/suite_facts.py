"""Collects facts about the runs of a suite which show whether two rows of its table differ in more than the
algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedray.config import flat, read_file


def facts_of(run: Path) -> dict[str, Any]:
    """Returns facts about the run in the folder ``run``.

    ``parameters`` is the number of parameters of its model, and ``weighting`` says how clients were weighed.
    ``public_samples`` is the number of labelled public samples on which the server trained, or the clients to whom they
    were dealt; it is 0 if they were only held out.
    """
    from fedray.algorithms import find_algorithm

    config = flat(read_file(run / "config.yaml"))
    used = config["data.public_to"] == "clients" or find_algorithm(config["algorithm.name"]).needs_public
    return {
        "parameters": json.loads((run / "summary.json").read_text())["parameters"],
        "weighting": config["train.weighting"],
        "public_samples": config["data.public_samples"] if used else 0,
    }
