"""Checks what rules and attacks return, which users may have written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedray.errors import UserError
from fedray.robust.rule import Rule
from fedray.usercode.importing import as_user_error

LARGE = 1e18
"""Rows of numbers below this are an ordinary run's: their squares are finite in float32. A rule gets no NaN from
them."""


def checked(found: Any, like: Tensor, what: str) -> Tensor:
    """Returns ``found``, which ``what`` has returned. Raises :class:`UserError` if it is anything but a tensor of the
    shape, type and device of ``like``."""
    if not isinstance(found, Tensor):
        raise UserError(f"{what} must return {_form(like)}, not {type(found).__name__}")
    if (found.shape, found.dtype, found.device) != (like.shape, like.dtype, like.device):
        raise UserError(f"{what} must return {_form(like)}, not {_form(found)}")
    return found


def aggregated(rule: Rule, rows: Tensor, weights: Tensor, before: Tensor | None, where: str) -> Tensor:
    """Returns what ``rule`` makes of ``rows [m, d]``, float32 ``[d]``. The other arguments are the rule's, and
    ``where`` says of which upload the rows are.

    Raises:
        UserError: The rule has failed, has returned something else than float32 ``[d]``, or has made NaN of rows that
            were finite.
    """
    what = f"train.aggregation: {type(rule).__name__}"
    like = torch.empty_like(rows[0])
    least, greatest = map(float, rows.aminmax())
    with as_user_error(f"{what} failed on {where}"):
        found = rule(rows, weights, before)
    found = checked(found, like, what)
    if least > -LARGE and greatest < LARGE and bool(found.isnan().any()):
        raise UserError(f"{what} has made NaN of {where}, all of whose rows were finite")
    return found


def _form(value: Tensor) -> str:
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{list(value.shape)} {value.dtype}{device}"
