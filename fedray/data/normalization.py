"""Normalisation of inputs: finds the scale and shift of each channel, so that models get ``float32(x) * scale + shift``
(channels are axis 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedray.core.structure import leaves, map_leaves, outline
from fedray.data.sources.features import ReadLater, form_of
from fedray.errors import UserError

DEFAULT = "default"
"""The default of ``data.normalization``."""

OF_TOKENS = {DEFAULT: "tokens stay as they are"}

OF_PIXELS = {DEFAULT: "mean and standard deviation of its training samples", "unit": "pixels are divided by 255"}

OF_IMAGES = {
    DEFAULT: "pixels are divided by 255",
    "imagenet": "mean and standard deviation of ImageNet, which pretrained models expect",
}

OF_PHOTOGRAPHS = {DEFAULT: OF_IMAGES["imagenet"], "imagenet": OF_IMAGES["imagenet"]}

OF_TABLES = {
    DEFAULT: "inputs stay as they are; bytes are divided by 255",
    "standard": "mean and standard deviation of each column or channel of the training samples",
    "imagenet": OF_IMAGES["imagenet"],
}

IMAGENET_MEAN, IMAGENET_STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
"""The mean and standard deviation of ImageNet's pixels/255, in the order red, green, blue, as in torchvision."""

ROWS = 4096
"""The number of samples that are summed at a time, to limit the memory."""


@dataclass(frozen=True)
class _Pair:
    """The scale and shift of one input, float32 ``[channels]``; both are None for an input that stays as it is."""

    scale: np.ndarray | None = None
    shift: np.ndarray | None = None


def checked(where: str, x: Any, scale: Any, shift: Any) -> dict[str, Any]:
    """Checks the ``scale`` and ``shift`` that a user gives for the inputs ``x``, and returns them as a dict
    ``{"scale": ..., "shift": ...}``. The dict is empty if no input is scaled.

    A model's inputs are float32(x) * scale + shift. If ``x`` is an array, scale and shift in the result are float32
    ``[channels]``. If ``x`` is a tuple or dict of arrays, they are tuples or dicts of the same structure, with None for
    inputs that stay as they are. If the user gives only a scale, the shift is 0; if only a shift, the scale is 1. If
    the user gives neither, uint8 inputs in a tuple or dict are divided by 255, and all other inputs stay as they are.
    Raises :class:`UserError`, whose message begins with ``where``, if scale or shift do not fit ``x``.
    """
    structured = isinstance(x, (tuple, Mapping))
    if scale is None and shift is None:
        return of_bytes(x) if structured else {}
    parts = [map_leaves(lambda leaf: None, x) if each is None else each for each in (scale, shift)]
    if structured and any(outline(each) != outline(x) for each in parts):
        raise UserError(
            f"{where}: scale and shift must have the same parts as the inputs; None keeps an input as it is"
        )
    return _fields(x, lambda leaf, *pair: _checked_pair(where, leaf, *pair), *parts)


def of_bytes(x: Any) -> dict[str, Any]:
    """Returns the scale and shift that divide uint8 inputs by 255, as a dict ``{"scale": ..., "shift": ...}``. The dict
    is empty if no input is uint8.

    ``x`` has the inputs: an array, or a tuple or dict of arrays. Scale and shift have the structure of ``x``, with a
    float32 array ``[channels]`` for each uint8 input, and None for the others.
    """
    return _fields(x, _unit)


def of_choice(choice: str, where: str, x: Any) -> dict[str, Any]:
    """Returns the scale and shift for the value ``choice`` of ``data.normalization``, as
    ``{"scale": ..., "shift": ...}``.

    A model's inputs are float32(x) * scale + shift. ``x`` are the training inputs: an array, or a tuple or dict of
    arrays, and scale and shift have the same structure. ``choice`` is one of

    * ``standard``: subtract each channel's mean over ``x``, and divide by its standard deviation; for floats and uint8
    * ``imagenet``: the same with the mean and standard deviation of ImageNet; for uint8 images with 3 channels
    * ``unit``: divide by 255; for uint8
    * ``default``: keep the source's scale and shift; the result is an empty dict.

    In a tuple or dict, arrays of other types stay as they are: their scale and shift are None. Raises
    :class:`UserError`, whose message begins with ``where``, if that is so for all inputs, or if ``choice`` is
    ``standard`` and the inputs are not in memory but read one by one.
    """
    if choice == DEFAULT:
        return {}
    if choice == "standard" and isinstance(x, ReadLater):
        raise UserError(f"{where}: data.normalization=standard needs inputs in memory, and these are read when used")
    found = _fields(form_of(x), {"standard": _standard, "imagenet": _imagenet, "unit": _unit}[choice])
    if not found:
        needed = {
            "standard": "numbers with a fraction or bytes", "imagenet": "images [n, 3, height, width] of bytes",
            "unit": "bytes",
        }  # fmt: skip
        raise UserError(f"{where}: data.normalization={choice} needs {needed[choice]}")
    return found


def of_numbers(mean: Sequence[float], std: Sequence[float], where: str, x: Any) -> dict[str, Any]:
    """Returns the scale and shift, as ``{"scale": ..., "shift": ...}``, with which a model gets (x - mean) / std for
    the inputs x. If these are uint8, they are divided by 255 first.

    ``x`` is the array of training inputs. ``mean`` and ``std`` have a number for each channel, or one for all. Raises
    :class:`UserError`, whose message begins with ``where``, if they do not fit the inputs.
    """
    first = form_of(x)
    if not isinstance(first, np.ndarray) or first.dtype not in (np.float32, np.uint8):
        raise UserError(f"{where}: data.mean and data.std are for inputs that are one array of bytes or floats")
    channels, unit = first.shape[1], 255.0 if first.dtype == np.uint8 else 1.0
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise UserError(f"{where}: data.{key} has {len(values)} numbers for {channels} channels")
    pair = _pair(*(np.broadcast_to(np.array(values) * unit, channels) for values in (mean, std)))
    return {"scale": pair.scale, "shift": pair.shift}


def _fields(x: Any, pair_of: Callable[..., _Pair], *others: Any) -> dict[str, Any]:
    pairs = map_leaves(pair_of, x, *others)
    if all(pair.scale is None for pair in leaves(pairs)):
        return {}
    return {key: map_leaves(lambda pair, key=key: getattr(pair, key), pairs) for key in ("scale", "shift")}


def _checked_pair(where: str, x: np.ndarray, scale: Any, shift: Any) -> _Pair:
    if scale is None and shift is None:
        return _Pair()
    found = {}
    for key, value, default in (("scale", scale, 1), ("shift", shift, 0)):
        array = _all(x, default) if value is None else np.asarray(value)
        if array.shape != (x.shape[1],) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise UserError(f"{where}: {key} must be {x.shape[1]} finite numbers, one per channel (axis 1 of x)")
        found[key] = array.astype(np.float32)
    return _Pair(**found)


def _standard(x: np.ndarray) -> _Pair:
    """Returns the scale and shift that subtract each channel's mean and divide by its standard deviation.

    A channel that is constant becomes 0.
    """
    if x.dtype not in (np.float32, np.uint8):
        return _Pair()
    mean = _mean(x, lambda part: part)
    std = np.sqrt(_mean(x, lambda part: (part - mean[:, None]) ** 2))
    return _pair(mean, np.where(std > 0, std, 1))


def _mean(x: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the mean of ``function`` of the inputs for each channel, float64 ``[channels]``.

    To limit the memory, ``function`` is applied to parts of the inputs, which are float64 ``[rows, channels, values]``.
    """
    total = np.zeros(x.shape[1])
    for start in range(0, len(x), ROWS):
        part = x[start : start + ROWS].astype(np.float64)
        total += function(part.reshape(*part.shape[:2], -1)).sum(axis=(0, 2))
    mean: np.ndarray = total * x.shape[1] / x.size
    return mean


def _unit(x: np.ndarray) -> _Pair:
    return _Pair(_all(x, 1 / 255), _all(x, 0)) if x.dtype == np.uint8 else _Pair()


def _imagenet(x: np.ndarray) -> _Pair:
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] != 3:
        return _Pair()
    return _pair(255 * IMAGENET_MEAN, 255 * IMAGENET_STD)


def _pair(mean: np.ndarray, std: np.ndarray) -> _Pair:
    return _Pair((1 / std).astype(np.float32), (-mean / std).astype(np.float32))


def _all(x: np.ndarray, value: float) -> np.ndarray:
    return np.full(x.shape[1], value, np.float32)
