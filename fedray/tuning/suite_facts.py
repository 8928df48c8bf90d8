"""Collects facts about the runs of a suite which show whether two rows of its table differ in more than the
algorithm."""

from __future__ import annotations

from typing import Any

from fedray.results.runs import RecordedRun
from fedray.results.unequal import public_samples


def facts_of(run: RecordedRun) -> dict[str, Any]:
    """Returns facts about a run.

    ``parameters`` is the number of parameters of its model, and ``weighting`` says how clients were weighed.
    ``public_samples`` are those that were trained on (:func:`~fedray.results.unequal.public_samples`).
    """
    return {
        "parameters": run.summary["parameters"],
        "weighting": run.settings["train.weighting"],
        "public_samples": public_samples(run),
    }
