"""Checks that user-defined code treats each client of a stack by itself: it has to give a client the same without the
others.

A norm over all rows of a stack, for example, mixes its clients, and no error says so. This is looked for with the first
stack, in two local steps, after which rounding has made almost no difference yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import Result
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model, row_of
from fedray.engine.output_check import things_of
from fedray.engine.tasks import PhaseTask
from fedray.warning import WARNING

STEPS = 2
"""The number of local steps for which an algorithm is tried."""

TOLERANCE = 1e-3
"""How much results may differ by rounding, as a share of their change in those steps."""

ROUNDING = 1e-6
"""How much more, as a share of their size."""

OF_A_TRIAL = -1
"""The attempt of a trial's tasks. What they keep for later phases is not taken for that of other tasks."""


def mixing_phase(
    task: PhaseTask, rows: slice, phase: str, run: Callable[[PhaseTask, slice], tuple[Result, ClientPhase]]
) -> str | None:
    """Tries the phase of ``task``, whose name is ``phase``, for a few local steps of the clients in ``rows``, and then
    of the first and the last of them alone; ``run(task, rows)`` does that. Returns a line for the user if the results
    of one differ, or None. Exceptions are ignored, because the task itself will raise them."""
    few = replace(task, attempt=OF_A_TRIAL, steps=[min(STEPS, each) for each in task.steps])
    with contextlib.suppress(Exception):
        together, _ = run(few, rows)
        for row in (rows.start, rows.stop - 1):
            alone, client = run(few, slice(row, row + 1))
            sent, ones = client.shared.get("x"), {key: value for key, value, _ in things_of(alone)}
            for key, value, _ in things_of(together):
                base = row_of(sent)[-1] if isinstance(value, Model) and isinstance(sent, Model) else 0.0
                if _differ(row_of(value)[row - rows.start], row_of(ones[key])[0], base):
                    return _line(phase, f"returns another {key}")
    return None


def mixing_step(step: str, together: Tensor, alone: Callable[[int], Tensor]) -> str | None:
    """Returns a line for the user if a step of ``train.upload``, whose name is ``step``, has made another row of the
    first or the last client in ``together`` than ``alone(row)`` makes of that row by itself, or None."""
    with contextlib.suppress(Exception):
        if any(_differ(together[row], alone(row)[0], 0.0) for row in (0, len(together) - 1)):
            return _line(f"the step {step} of train.upload", "makes another row")
    return None


def _line(what: str, does: str) -> str:
    return (
        f"{WARNING}{what} mixes clients that are trained together: it {does} for a client alone. What makes one number "
        "of a row must do so for each row, as in v.norm(dim=-1, keepdim=True)"
    )


def _differ(one: Tensor, other: Tensor, base: Any) -> bool:
    """Returns whether two vectors, which began at ``base``, differ by more than rounding."""
    one, other = one.double(), other.double()
    change, size = torch.linalg.vector_norm(other - base), torch.linalg.vector_norm(other)
    return bool(torch.linalg.vector_norm(one - other) > TOLERANCE * change + ROUNDING * size)
