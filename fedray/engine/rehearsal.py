"""Computes one gradient and one evaluation before the first round, to find operations that are not deterministic.

torch has no deterministic version of some operations on GPUs. The user should know that before a run of many hours, not
after it.
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
"""The kinds of devices on which a rehearsal looks for operations that are not deterministic. On a CPU there are almost
no such operations."""

SAMPLES = 2
"""The number of samples of the rehearsal's gradient and evaluation. Which operations a model uses does not depend on
this number."""


class Rehearsed(NamedTuple):
    """The result of a rehearsal: one gradient and one evaluation that are computed before the first round, to find the
    model's operations that are not deterministic.

    ``operations`` are the names of the operations that have no deterministic version in torch. ``strict`` is true if
    flash attention was the only operation that did not run deterministically. All tasks must then be done in strict
    mode (:func:`~fedray.engine.determinism.strictly`), in which torch uses its deterministic flash attention. In this
    case the rehearsal is repeated in strict mode, and ``operations`` are those that the repetition has found.
    """

    operations: tuple[str, ...] = ()
    strict: bool = False


def rehearsed(clients: Clients, evaluator: Evaluator) -> Rehearsed:
    """Finds out before the first round which of the model's operations have no deterministic version on this device:
    computes a gradient of the task loss and an evaluation, with the network and data of ``clients`` and with
    ``evaluator``. The network is left as it was.

    Exceptions are ignored, because they will be raised again in the first round, with the number of the client.
    """
    if clients.device.type not in REHEARSING:
        return Rehearsed()
    found = _met(clients, evaluator)
    if found != (FLASH,):
        return Rehearsed(found)
    with strictly():
        return Rehearsed(_met(clients, evaluator), strict=True)


def _met(clients: Clients, evaluator: Evaluator) -> tuple[str, ...]:
    """Computes a gradient and an evaluation, and returns the names of the operations in them that have no
    deterministic version."""
    network, data, before = clients.network, clients.data, torch.is_warn_always_enabled()
    model = network.loaded()
    # torch warns about some operations only once in the life of a process
    torch.set_warn_always(True)
    try:
        with contextlib.suppress(Exception):
            x, y = clients.train.gather(data.client(int(data.sizes().argmax()))[None, :SAMPLES])
            # a copy, because some models write into their parameters
            at = model.clone().rows(1)
            network.gradients(at, Batch(x, y, 0), rng=lambda row: network.rng(0, Purpose.DROPOUT))
        with contextlib.suppress(Exception), evaluator.draws(0):
            evaluator.sums_over(model, clients.test, np.arange(min(SAMPLES, len(data.y_test))))
    finally:
        torch.set_warn_always(before)
        network.load(model)
    return nondeterministic_operations()
