"""Warns about inputs that can be used, but are probably not what their owner meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedray.core.structure import leaves
from fedray.data.sources.features import form_of
from fedray.warning import WARNING

ROWS, NUMBERS = 4096, 1 << 21
"""At most so many samples are looked at, from the first, and so many numbers in them, which limits the memory."""

LARGE = 10.0
"""A column whose standard deviation is larger than this takes steps that are 100 times as large, or more, as those of a
scaled column, so that a usual learning rate lets a model diverge."""

COLOURS = (1, 3, 4)

CHANNELS_FIRST = "channels come first: np.moveaxis(x, -1, 1)"


def seems_channels_last(shape: Any) -> bool:
    """Returns whether a sample of this shape seems to be an image ``[height, width, channels]``."""
    is_image = isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(length, int) for length in shape)
    return is_image and shape[2] in COLOURS and shape[0] not in COLOURS and min(shape[:2]) > max(COLOURS)


def doubts(name: str, x: Any, scale: Any) -> list[str]:
    """Returns a warning for each input that has columns of very different sizes although nothing scales it, and for
    images whose last axis seems to be the channels.

    ``x`` are the training inputs: an array ``[n, channels, ...]``, a tuple or dict of arrays, or a ``ReadLater``,
    and ``scale`` their scale (:class:`~fedray.data.sources.source.Source`).
    ``name`` is what the warnings call the data.
    """
    inputs = leaves(form_of(x))
    scales = [None] * len(inputs) if scale is None else leaves(scale)
    found = zip(inputs, scales, strict=True)
    return [WARNING + line for leaf, its_scale in found for line in _doubts(name, leaf, its_scale)]


def _doubts(name: str, x: np.ndarray, scale: Any) -> Iterator[str]:
    if seems_channels_last(x.shape[1:]):
        shape = list(x.shape[1:])
        yield (
            f"{name}: samples have shape {shape}, which models read as {shape[0]} channels of {shape[1]} x {shape[2]}; "
            + CHANNELS_FIRST
        )
        return
    if x.dtype != np.float32 or scale is not None or len(x) == 1:
        return
    part = x[: max(2, min(ROWS, NUMBERS // max(1, x[0].size)))].astype(np.float64)
    deviations = part.reshape(*part.shape[:2], -1).std(axis=(0, 2))
    widest = int(deviations.argmax())
    if deviations[widest] > LARGE:
        which = f"column {widest}" if x.ndim == 2 else f"channel {widest}"
        yield (
            f"{name}: nothing scales the inputs, and {which} (counted from 0) has a standard deviation of "
            f"{deviations[widest]:.3g}; data.normalization=standard scales each one"
        )
