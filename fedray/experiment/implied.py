"""Finds the values that null stands for in a configuration, and notes keys that may not mean what the user expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.core.local_training import LocalTraining
from fedray.data.federated import FederatedData
from fedray.data.partitions.partition import resolved_defaults
from fedray.data.sources.source import Source


def implied_values(
    kind: str, algorithm: Algorithm, cohort: int, clients: int, training: LocalTraining
) -> dict[str, Any]:
    """Returns the values, by dotted key, of the keys that are null although they have an effect.

    These are options of a partition of the ``kind``, and the algorithm's hyper-parameters; ``cohort`` of ``clients``
    clients take part in a round.
    """
    options = resolved_defaults(kind)
    hyper = algorithm.resolved_defaults(cohort, clients, training.local_steps)
    return {f"data.partition.{name}": value for name, value in options.items()} | {
        f"algorithm.{name}": value for name, value in hyper.items()
    }


def values_for_nulls(section: BaseModel, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the values for the keys of ``section`` that are null, by name.

    ``values`` has dotted keys; those of the section begin with ``prefix``.
    """
    own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    return {name: value for name, value in own.items() if getattr(section, name) is None}


def notes_on(config: Config, rounds: int, steps: int, source: Source, data: FederatedData) -> Iterator[str]:
    """Yields lines about keys that may not mean what the user expects.

    ``steps`` is the number of local steps in a round.
    """
    asked, made = config.run.iterations, rounds * steps
    if asked is not None and made != asked:
        yield (
            f"warning: run.iterations={asked} is not a multiple of train.local_steps={steps}: "
            f"{rounds} round{'s' if rounds > 1 else ''} of {steps} make {made} iterations"
        )
    public = len(data.public)
    if config.data.public_samples == "auto" and public and source.x_public is None:
        yield (
            f"warning: data.public_samples=auto: {public:,} of the {len(source.y_train):,} training samples are the "
            f"server's public set, and no client's; to compare with an algorithm that has none, give "
            f"data.public_samples={public} in both runs"
        )
