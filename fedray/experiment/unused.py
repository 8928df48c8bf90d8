"""Finds keys that change nothing in a run, because of what its other keys say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.config import Config
from fedray.config.section import in_message
from fedray.util.uris import is_uri

WITH_RAY = (
    "address", "actors", "cpus_per_actor", "gpus_per_actor", "actors_per_gpu", "start_timeout", "answer_timeout",
    "max_retries", "server_cpus",
)  # fmt: skip
"""The keys of ``engine`` that are about Ray and the processes that it starts."""


def notes_on_unused(config: Config, resolved: Mapping[str, Any]) -> list[str]:
    """Returns a line for each key of ``config``, the user's configuration, that has another value than its default but
    changes nothing.

    ``resolved`` has the values of the stages by dotted key, such as ``task.kind``, in place of ``auto`` and null. Keys
    that can't be combined with others at all are no part of this: they are errors where they are checked.
    """
    run, data, kind = config.run, config.data, resolved["task.kind"]
    reasons = {
        "run.keep_checkpoints": not run.checkpoint_every and "run.checkpoint_every=0 makes no checkpoints",
        "run.output_timeout": not is_uri(run.output) and "run.output is a folder and not a URI",
        "run.last_rounds": (run.last_rounds or 0) > config.rounds and f"the run has only {config.rounds} rounds",
        "task.ignore_index": kind != "tokens" and f"task.kind is {kind} and not tokens",
        "model.proj_dim": resolved["model.head"] == "none" and "model.head is none",
        "data.root": data.source == "sample" and "the source sample comes with fedray",
        "data.public_overlap": not resolved["data.public_samples"] and "there is no public set",
    }
    reasons |= {f"engine.{key}": config.engine.kind == "local" and "engine.kind is local" for key in WITH_RAY}
    given = {key: _given(config, key) for key, reason in reasons.items() if reason}
    return [
        f"warning: {key}={in_message(value)} changes nothing, as {reasons[key]}"
        for key, value in given.items()
        if value is not None
    ]


def _given(config: Config, key: str) -> Any:
    """Returns the value of ``key``, such as ``run.group``, or None if it is the default."""
    section, name = key.split(".")
    values = getattr(config, section)
    value = getattr(values, name)
    return None if value == type(values).model_fields[name].default else value
