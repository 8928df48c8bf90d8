"""Computes one gradient and one evaluation before the first round, to tell what is not deterministic.

Of some operations torch has no deterministic version for GPUs. A user should know that before a run of hours, and not
when it has ended.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import torch

from fedray.core.batches import Batch
from fedray.core.seeds import Purpose
from fedray.engine.clients import Clients
from fedray.engine.determinism import FLASH, nondeterministic_operations, strictly
from fedray.engine.evaluation.evaluator import Evaluator

REHEARSING = {"cuda"}
"""The kinds of devices on which it is done. On a CPU there are next to no such operations."""

SAMPLES = 2
"""The samples of the gradient and of the evaluation. Which operations a model has does not depend on their number."""


class Rehearsed(NamedTuple):
    """The ``operations`` without a deterministic version that were met. ``strict`` says that there is none if tasks are
    done :func:`~fedray.engine.determinism.strictly`."""

    operations: tuple[str, ...] = ()
    strict: bool = False


def rehearsed(clients: Clients, evaluator: Evaluator) -> Rehearsed:
    """Returns what a gradient of the task loss and an evaluation of the model of ``clients`` meet. The network is left
    as it was.

    What raises is passed over: it raises in the first round again, where the client is known.
    """
    if clients.device.type not in REHEARSING:
        return Rehearsed()
    found = _met(clients, evaluator)
    if found != (FLASH,):
        return Rehearsed(found)
    with strictly():
        return Rehearsed(_met(clients, evaluator), strict=True)


def _met(clients: Clients, evaluator: Evaluator) -> tuple[str, ...]:
    """Returns the operations without a deterministic version of a gradient and of an evaluation."""
    network, data, before = clients.network, clients.data, torch.is_warn_always_enabled()
    model = network.loaded()
    # of some operations torch warns once in the life of a process
    torch.set_warn_always(True)
    try:
        with contextlib.suppress(Exception):
            x, y = clients.train.gather(data.client(int(data.sizes().argmax()))[None, :SAMPLES])
            # its own, because some models write into their parameters
            at = model.clone().rows(1)
            network.gradients(at, Batch(x, y, 0), rng=lambda row: network.rng(0, Purpose.DROPOUT))
        with contextlib.suppress(Exception), evaluator.draws(0):
            evaluator.sums_over(model, clients.test, np.arange(min(SAMPLES, len(data.y_test))))
    finally:
        torch.set_warn_always(before)
        network.load(model)
    return nondeterministic_operations()
