"""Converts numbers of any type to float32 and back, because models are stored as rows of float32.

A float32 has 24 bits, so a longer number is split into several float32 numbers, its *parts*: a 64-bit integer into
three parts of up to 22 bits, and a float64 into three float32 numbers that add up to it. No bit is lost, except of
a float64 that is larger than the largest float32 (3e38), or whose last bits are smaller than the smallest (1e-45).
Parts may be averaged like the numbers themselves if the numbers are float64, or integers below four million.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SINGLE = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16)
"""The types all of whose values a float32 represents exactly."""

_BITS = 22


def parts_of(dtype: torch.dtype) -> int:
    """Returns how many float32 numbers are needed to store one number of type ``dtype`` without losing a bit: 1 for
    types such as float32 and int16, 3 for int64 and float64, and twice as many for complex types."""
    if dtype.is_complex:
        return 2 * parts_of(dtype.to_real())
    return 1 if dtype in SINGLE else 3


def split(values: Tensor) -> Tensor:
    """Splits numbers of any type into float32 numbers, without losing a bit: returns ``[parts, n]`` for ``values [n]``,
    where column i has the parts of number i. A float64 is the sum of its 3 parts; the 3 parts of a long integer have
    its upper, middle and lower bits. :func:`join` is the inverse."""
    if values.is_complex():
        return torch.cat([split(part) for part in torch.view_as_real(values).unbind(1)])
    if values.dtype in SINGLE:
        return values.to(torch.float32)[None]
    if values.is_floating_point():
        parts, rest = [], values
        for _ in range(3):
            part = rest.to(torch.float32)
            # nothing is left of an infinite number, or of NaN
            rest = torch.where(part.isfinite(), rest - part, 0)
            parts.append(part)
        return torch.stack(parts)
    shifts, masks = _of_parts(values.device)
    return torch.bitwise_right_shift(values.to(torch.int64), shifts).bitwise_and_(masks).to(torch.float32)


@lru_cache
def _of_parts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the shift and the bit mask for each of the three parts into which a long integer is split, both ``[3,
    1]``. They are cached: made when a module is packed, before anything is traced."""
    low = (1 << _BITS) - 1
    shifts = torch.tensor([[2 * _BITS], [_BITS], [0]], device=device)
    return shifts, torch.tensor([[-1], [low], [low]], device=device)


def join(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Restores numbers ``[n]`` of type ``dtype`` from their float32 parts ``[parts, n]``, as :func:`split` makes them.
    The parts may have been averaged over clients, so those of integers are rounded to whole numbers first."""
    if dtype.is_complex:
        return torch.complex(*(join(part, dtype.to_real()) for part in parts.chunk(2)))
    if dtype in SINGLE:
        if dtype is torch.float32:
            return parts[0]
        return (parts[0] if dtype.is_floating_point else parts[0].round()).to(dtype)
    if dtype.is_floating_point:
        return parts.to(torch.float64).sum(0).to(dtype)
    shifts, _ = _of_parts(parts.device)
    return parts.round().to(torch.int64).bitwise_left_shift_(shifts).sum(0).to(dtype)
