"""Copies data to a device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies ``tensor`` to ``device`` and returns the copy. If it is on the same kind of device (CPU or GPU) already,
    ``tensor`` itself is returned. A copy to a GPU is asynchronous: the call does not wait until the GPU has finished
    what it is computing."""
    if tensor.device.type == device.type:
        return tensor
    # only from pinned memory is a copy made beside the computation
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def column(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Makes a column ``[C, 1]`` on ``device`` from numbers of C clients, where ``values[i]`` belongs to client i, so
    that the clients' rows ``[C, width]`` can be multiplied by it. ``dtype`` is the type of the column."""
    return sent(torch.tensor(values, dtype=dtype), device)[:, None]
