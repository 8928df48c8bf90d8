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
    """Identifies samples that are read from a data set, so that a random transform of each of them can be seeded. The
    samples are an array ``[steps, C, b]``: the mini-batches of C clients for some consecutive local steps of a round.

    Args:
        round: the number of the round.
        ids: the numbers of the C clients.
        start: the number of the first of these local steps, from 0.
        size: b, the number of samples in the largest mini-batch.
        own: for each client the number of samples in its own mini-batches.
    """

    round: int
    ids: Sequence[int]
    start: int
    size: int
    own: Sequence[int]

    def coordinates(self, place: int) -> tuple[int, int, int]:
        """Returns three numbers that seed the random transform of one sample: the round, the number of the client that
        gets the sample, and how many samples the client has drawn before it in the round. ``place`` is the position of
        the sample in the flattened array ``[steps * C * b]``."""
        step, rest = divmod(place, len(self.ids) * self.size)
        row, position = divmod(rest, self.size)
        return self.round, self.ids[row], (self.start + step) * self.own[row] + position


@dataclass(frozen=True)
class Samples:
    """The samples of a data set, from which a model's inputs and targets are read by index. Inputs are held in their
    stored form, such as uint8, and converted when a model needs them.

    Floats and uint8 reach a model as float32(x) * scale + shift, other integers as int64, and booleans and complex
    numbers unchanged.

    Args:
        x: the stored inputs, a tensor ``[n, ...]``, or a tuple or dict of such tensors.
        y: the targets ``[n, ...]``.
        scale: a tensor with a factor for each channel (axis 1 of the inputs), or a tuple or dict of tensors if ``x`` is
            one; None if inputs are not scaled.
        shift: what is added to each channel, in the same form as ``scale``; None if inputs are not scaled.
        on: the device where models are trained, to which mini-batches are copied; None if ``x`` and ``y`` are there.
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
        """Whether reading mini-batches takes so long that a thread should read the next ones ahead during training.
        This is true if the samples are on another kind of device (CPU or GPU) than the models, and always true for
        :class:`ReadSamples`."""
        # by their types: "cuda" and "cuda:0" are the same device, but not equal
        return self.device.type != self.y.device.type

    @property
    def form(self) -> Any:
        """One or more stored inputs, for code that needs only their shapes and types: a tensor ``[n, ...]``, or a tuple
        or dict of such tensors."""
        return self.x

    @cached_property
    def bytes_each(self) -> int:
        """The number of bytes that the inputs of one sample take in their stored form."""
        return sum(leaf[0].nbytes for leaf in leaves(self.form))

    def gather(self, indices: Indices) -> tuple[Any, Tensor]:
        """Returns the inputs and the targets of the samples with these ``indices`` (an array of any shape), both
        ``[*indices.shape, ...]``, on the device where models are trained. Inputs are converted and scaled as a model
        gets them. Both are in newly allocated memory. Such memory is aligned; elsewhere kernels may round
        differently."""
        raw, y = self.raw(indices)
        return self.inputs(raw), y

    def raw(self, indices: Indices, draws: SampleSeeds | None = None) -> tuple[Any, Tensor]:
        """Returns the inputs of some samples in their stored form, and their targets, both ``[*indices.shape, ...]``,
        on the device where models are trained. :meth:`inputs` converts stored inputs to a model's inputs.

        Args:
            indices: the numbers of the samples in the data set, an array of any shape.
            draws: for which clients and local steps the samples are read; None if they are read for other purposes,
                such as an evaluation. Only :class:`ReadSamples` uses it, whose items may be transformed at random.
        """
        flat = sent(torch.from_numpy(indices.reshape(-1)), self.y.device)

        def chosen(stored: Tensor) -> Tensor:
            return self._sent(stored.index_select(0, flat)).view(*indices.shape, *stored.shape[1:])

        return map_leaves(chosen, self.x), chosen(self.y)

    def targets(self, indices: Indices) -> Tensor:
        """Returns the targets ``[*indices.shape, ...]`` of the samples with these ``indices`` (an array of any shape),
        on the device where models are trained."""
        return self._sent(self.y[sent(torch.from_numpy(indices), self.y.device)])

    def _sent(self, chosen: Tensor) -> Tensor:
        """Returns ``chosen`` on the device where models are trained."""
        return sent(chosen, self.device)

    def inputs(self, raw: Any) -> Any:
        """Converts inputs from their stored form to the form in which a model gets them, with the same shape. Floats
        and uint8 become float32 and are scaled, other integers become int64, and other types stay as they are.

        ``raw`` are inputs that :meth:`raw` has returned, ``[..., *sample]``, where ``sample`` is the shape of one
        sample. Results of type float32 are copies; others may share the memory of ``raw``.
        """
        if self.scale is None or self.shift is None:
            return map_leaves(_as_input, raw)

        def scaled(stored: Tensor, whole: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
            if scale is None or shift is None:
                return _as_input(stored)
            shape = (-1,) + (1,) * (whole.dim() - 2)
            return stored.to(torch.float32, copy=True).mul_(scale.view(shape)).add_(shift.view(shape))

        return map_leaves(scaled, raw, self.form, self.scale, self.shift)


class Items(Protocol):
    """A data set whose inputs are read one by one, for example from files. ``first`` is the input of item 0, and
    ``read(i)`` returns the input of item i: an array ``[1, ...]``, or a tuple or dict of such arrays."""

    first: Any

    def read(self, i: int) -> Any: ...


@dataclass(frozen=True)
class ReadSamples(Samples):
    """Samples whose inputs are read one by one when they are used, for example from files: ``x`` is of type
    :class:`Items`. The inputs may be transformed at random when they are read.

    The global random generators are seeded before each item is read, so that random transforms do not depend on the
    process that reads it. In local steps this seed depends on ``seed`` (``run.seed``), the round, the client, and the
    number of samples that the client has drawn before in the round. So an item is transformed differently each time a
    client draws it. In evaluations it depends only on ``seed`` and the item, so an item is always transformed alike.
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
