"""Copies data to a device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``; it is copied if it is on another kind of device. A copy to a GPU does not wait
    until the GPU has finished what it is computing."""
    if tensor.device.type == device.type:
        return tensor
    # only from pinned memory is a copy made beside the computation
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def column(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns numbers of C clients, one ``values[i]`` for each, as a column ``[C, 1]`` on ``device``, by which the
    clients' rows ``[C, width]`` can be multiplied."""
    return sent(torch.tensor(values, dtype=dtype), device)[:, None]
