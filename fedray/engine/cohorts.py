"""Describes the clients that take part in a round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Cohort
from fedray.core.batches import steps_of
from fedray.engine.state.run import RunState
from fedray.experiment.cohorts import weights_of
from fedray.experiment.experiment import Experiment


def cohort_of(chosen: NDArray[np.int64], state: RunState, experiment: Experiment, number: int) -> Cohort:
    """Returns the clients ``chosen``, sorted ids, as the cohort of round ``number`` (from 1), with their aggregation
    weights, numbers of samples and local steps, and the rounds since they last took part. ``chosen`` may be empty."""
    if not len(chosen):
        return Cohort()
    training, sizes = experiment.training, state.sizes
    return Cohort(
        ids=chosen.tolist(),
        sizes=sizes[chosen].tolist(),
        weights=weights_of(sizes[chosen], experiment.weighting),
        steps=[
            steps_of(int(size), training.batch_size, training.local_steps, training.local_epochs)
            for size in sizes[chosen]
        ],
        gaps=[state.server.gap(client, number) for client in chosen.tolist()],
    )
