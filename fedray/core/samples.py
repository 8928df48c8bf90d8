"""The samples of a data set, and how they become a model's inputs on the device where models are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.seeds import SERVER, Purpose, global_generators, torch_seed
from fedray.core.sending import sent
from fedray.core.structure import leaves, map_leaves

Indices = NDArray[np.int64]


class SampleSeeds(NamedTuple):
    """The round, the clients and the local steps for which samples ``[steps, C, b]`` are read. If a data set's items
    are transformed at random when they are read, these numbers seed the transform of each sample.

    Args:
        round: the number of the round.
        ids: the numbers of the C clients.
        start: the local step to which the first samples belong.
        size: b, the number of samples in a mini-batch.
    """

    round: int
    ids: Sequence[int]
    start: int
    size: int

    def coordinates(self, place: int) -> tuple[int, int, int]:
        """Returns three numbers that seed the random transform of one sample: the round, the number of the client that
        gets the sample, and how many samples the client has drawn before it in the round. ``place`` is the position of
        the sample in the samples ``[steps, C, b]``, counted as if they were one list."""
        step, rest = divmod(place, len(self.ids) * self.size)
        row, position = divmod(rest, self.size)
        return self.round, self.ids[row], (self.start + step) * self.size + position


@dataclass(frozen=True)
class Samples:
    """The samples of a data set in their stored form, which can be read by index as a model's inputs and targets.

    Floats and uint8 reach a model as float32(x) * scale + shift, other integers as int64, and booleans and complex
    numbers unchanged.

    Args:
        x: the stored inputs, a tensor ``[n, ...]``, or a tuple or dict of such tensors.
        y: the targets ``[n, ...]``.
        scale: a factor for each channel (axis 1 of the inputs), in the structure of ``x``; None for 1.
        shift: a number that is added to each channel, in the structure of ``x``; None for 0.
        on: the device where models are trained, to which mini-batches are copied; None if all samples are there.
    """

    x: Any
    y: Tensor
    scale: Any = None
    shift: Any = None
    on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The device where models are trained. The inputs and targets that the methods return are on this device."""
        return self.y.device if self.on is None else self.on

    @property
    def slow(self) -> bool:
        """Whether reading samples takes so long that a thread should read the next mini-batches during training: they
        are on another kind of device than the models."""
        # by their types: "cuda" and "cuda:0" are the same device, but not equal
        return self.device.type != self.y.device.type

    @property
    def form(self) -> Any:
        """At least one stored input, from which shapes and types can be read: a tensor ``[n, ...]``, or a tuple or dict
        of such tensors."""
        return self.x

    @cached_property
    def bytes_each(self) -> int:
        """The number of bytes that the inputs of one sample take in their stored form."""
        return sum(leaf[0].nbytes for leaf in leaves(self.form))

    def gather(self, indices: Indices) -> tuple[Any, Tensor]:
        """Returns the inputs and the targets of the samples with these ``indices``, both ``[*indices.shape, ...]``, on
        the device where models are trained. Inputs are converted and scaled as a model gets them. The memory of both is
        new, and so aligned."""
        raw, y = self.raw(indices)
        return self.inputs(raw), y

    def raw(self, indices: Indices, draws: SampleSeeds | None = None) -> tuple[Any, Tensor]:
        """Returns the inputs and the targets of the samples with these ``indices``, both ``[*indices.shape, ...]``, on
        the device where models are trained. Inputs are in their stored form; :meth:`inputs` makes a model's inputs of
        them. ``draws`` says for which clients and local steps the samples are read; only :class:`ReadSamples`, whose
        items may be transformed at random, uses it."""
        flat = sent(torch.from_numpy(indices.reshape(-1)), self.y.device)

        def chosen(stored: Tensor) -> Tensor:
            return self._sent(stored.index_select(0, flat)).view(*indices.shape, *stored.shape[1:])

        return map_leaves(chosen, self.x), chosen(self.y)

    def targets(self, indices: Indices) -> Tensor:
        """Returns the targets ``[*indices.shape, ...]`` of the samples with these ``indices``, on the device where
        models are trained."""
        return self._sent(self.y[sent(torch.from_numpy(indices), self.y.device)])

    def _sent(self, chosen: Tensor) -> Tensor:
        """Returns ``chosen`` on the device where models are trained."""
        return sent(chosen, self.device)

    def inputs(self, raw: Any) -> Any:
        """Converts inputs in their stored form, ``raw [..., *sample]`` as :meth:`raw` returns them, to inputs as a
        model gets them, in the same shape: floats and uint8 become scaled float32, other integers int64. Floats are in
        newly allocated memory."""
        if self.scale is None or self.shift is None:
            return map_leaves(_as_input, raw)

        def scaled(stored: Tensor, whole: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
            if scale is None or shift is None:
                return _as_input(stored)
            shape = (-1,) + (1,) * (whole.dim() - 2)
            return stored.to(torch.float32, copy=True).mul_(scale.view(shape)).add_(shift.view(shape))

        return map_leaves(scaled, raw, self.form, self.scale, self.shift)


class Items(Protocol):
    """A data set that is read item by item. ``first`` is the input of item 0, and ``read(i)`` returns the input of item
    i: an array ``[1, ...]``, or a tuple or dict of such arrays."""

    first: Any

    def read(self, i: int) -> Any: ...


@dataclass(frozen=True)
class ReadSamples(Samples):
    """Samples whose inputs are read item by item at the time when they are used: ``x`` is of type :class:`Items`.

    The global random generators are seeded before each item is read: in training by ``seed``, the round, the client and
    the number of samples that the client has drawn before. So random transforms differ from draw to draw, and do not
    depend on which process reads the item. In evaluations an item always has the same seed.
    """

    seed: int = 0

    @property
    def form(self) -> Any:
        return map_leaves(torch.from_numpy, self.x.first)

    @property
    def slow(self) -> bool:
        return True

    def raw(self, indices: Indices, draws: SampleSeeds | None = None) -> tuple[Any, Tensor]:
        flat = indices.reshape(-1)
        read = []
        for place, i in enumerate(flat.tolist()):
            coordinates = (0, SERVER, i) if draws is None else draws.coordinates(place)
            with global_generators(torch_seed(self.seed, Purpose.ITEM, *coordinates)):
                read.append(self.x.read(i))

        def together(*parts: NDArray[Any]) -> Tensor:
            whole = self._sent(torch.from_numpy(np.concatenate(parts)))
            return whole.view(*indices.shape, *whole.shape[1:])

        y = self.targets(flat)
        return map_leaves(together, *read), y.view(*indices.shape, *y.shape[1:])


def _as_input(stored: Tensor) -> Tensor:
    if stored.is_floating_point() or stored.dtype == torch.uint8:
        return stored.to(torch.float32, copy=True)
    return stored if stored.dtype == torch.bool or stored.is_complex() else stored.to(torch.int64)
