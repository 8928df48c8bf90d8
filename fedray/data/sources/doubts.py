"""Warns about inputs and targets that can be used, but are probably not what their owner meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedray.core.structure import leaves
from fedray.data.sources.features import form_of
from fedray.data.sources.source import Source
from fedray.warning import WARNING

ROWS, NUMBERS = 4096, 1 << 21
"""At most so many samples are looked at, from the first, and so many numbers in them, which limits the memory."""

LARGE = 10.0
"""A column whose standard deviation is larger than this takes steps that are 100 times as large, or more, as those of a
scaled column, so that a usual learning rate lets a model diverge."""

LARGE_TARGETS = 50.0
"""With targets whose root mean square is larger than this, training often diverges: at the default learning rate a
network of three layers learned scaled targets that were multiplied by 30, and diverged if they were by 60."""

COLOURS = (1, 3, 4)

CHANNELS_FIRST = "channels come first: np.moveaxis(x, -1, 1)"


def seems_channels_last(shape: Any) -> bool:
    """Returns whether a sample of this shape seems to be an image ``[height, width, channels]``."""
    is_image = isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(length, int) for length in shape)
    return is_image and shape[2] in COLOURS and shape[0] not in COLOURS and min(shape[:2]) > max(COLOURS)


def doubts(source: Source) -> list[str]:
    """Returns a warning for each input of ``source`` that has columns of very different sizes although nothing scales
    it, for images whose last axis seems to be the channels, and for a regression with large targets."""
    inputs = leaves(form_of(source.x_train))
    scales = [None] * len(inputs) if source.scale is None else leaves(source.scale)
    found = [
        line
        for leaf, scale in zip(inputs, scales, strict=True)
        for line in _of_inputs(leaf, scale, source.column_names)
    ]
    if source.kind == "regression":
        found += _of_targets(source.y_train)
    return [f"{WARNING}{source.name}: {line}" for line in found]


def _of_inputs(x: np.ndarray, scale: Any, names: Sequence[str] | None) -> Iterator[str]:
    if seems_channels_last(x.shape[1:]):
        shape = list(x.shape[1:])
        yield (
            f"samples have shape {shape}, which models read as {shape[0]} channels of {shape[1]} x {shape[2]}; "
            + CHANNELS_FIRST
        )
        return
    if x.dtype != np.float32 or scale is not None or len(x) == 1:
        return
    _, deviations = _moments(x)
    widest = int(deviations.argmax())
    if deviations[widest] > LARGE:
        which = f"{'column' if x.ndim == 2 else 'channel'} {widest} (counted from 0)"
        yield (
            f"nothing scales the inputs, and {which if names is None else f'column {names[widest]!r}'} has a standard "
            f"deviation of {deviations[widest]:.3g}; data.normalization=standard scales each one"
        )


def _of_targets(y: np.ndarray) -> Iterator[str]:
    means, deviations = _moments(y.reshape(len(y), 1) if y.ndim == 1 else y)
    sizes = np.hypot(means, deviations)
    largest = int(sizes.argmax())
    if sizes[largest] > LARGE_TARGETS:
        which = "the targets have" if len(sizes) == 1 else f"column {largest} (counted from 0) of the targets has"
        yield (
            f"{which} a mean of {means[largest]:.3g} and a standard deviation of {deviations[largest]:.3g}, and "
            "nothing scales targets: with such numbers training often diverges, so divide them, or subtract the mean "
            "and divide by the standard deviation, before you hand them over"
        )


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the standard deviation of each column or channel of ``values [n, channels, ...]``, float64
    ``[channels]``."""
    part = values[: max(2, min(ROWS, NUMBERS // max(1, values[0].size)))].astype(np.float64)
    part = part.reshape(*part.shape[:2], -1)
    return part.mean(axis=(0, 2)), part.std(axis=(0, 2))
