"""A user's function that changes the inputs of mini-batches at random, in training only (``data.transform``)."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedray.core.places import same_bits
from fedray.core.seeds import Purpose, global_generators, torch_seed
from fedray.core.structure import leaves, map_leaves, outline
from fedray.errors import UserError
from fedray.usercode.importing import as_user_error

Transform = Callable[[Any], Any]
"""The type of the user's ``data.transform``: ``transform(x)`` returns changed copies of the inputs ``x [b, ...]`` of
one client's mini-batch, with the same shape and type. Inputs are in their stored form, before they are scaled: images
from files are uint8, 0 to 255."""

TRIED_OFTEN, FEW = 30, 4
"""``TRIED_OFTEN`` is the number of seeds with which a transform is run on ``FEW`` samples, to find out whether it can
be repeated. Many are needed because a transform may change samples only rarely."""

TRIED_SEEDS = 4
"""The number of seeds with which a transform is tried, to find out whether it draws random numbers."""

COPIES = 8
"""The number of copies of one sample that are passed to a transform, to find out whether it changes each
differently."""


@dataclass(frozen=True)
class EachSample:
    """A transform of mini-batches that applies the user's ``transform`` to each sample ``[...]`` of a mini-batch
    separately, so that each sample gets its own random numbers. Calling it with inputs ``[b, ...]`` returns changed
    inputs ``[b, ...]``."""

    transform: Transform

    def __call__(self, x: Any) -> Any:
        count = len(leaves(x)[0])
        changed = [self.transform(map_leaves(lambda leaf, i=i: leaf[i], x)) for i in range(count)]
        return map_leaves(lambda *rows: torch.stack(rows), *changed)


def each_sample(transform: Transform) -> Transform:
    """Turns a transform of single samples into a transform of mini-batches that changes each sample differently.

    torchvision's transforms draw random numbers once per call, so they flip or crop all images of a batch in the same
    way.

    Args:
        transform: a function that takes the inputs of one sample ``[...]``, in their stored form, and returns them
            changed.

    Returns:
        a function of the inputs of a mini-batch ``[b, ...]``, which calls ``transform`` for each sample.

    Example:
        flip = fedray.each_sample(v2.RandomHorizontalFlip())
        result = fedray.simulate(transform=flip)
    """
    return EachSample(transform)


@dataclass(frozen=True)
class SeededTransform:
    """Applies the user's transform of training samples (``data.transform``) so that its random numbers can be repeated:
    a client's result depends neither on the other clients that are trained, nor on the process that trains it.

    An instance is called with the mini-batches of C clients that are trained together, and calls ``function``, the
    user's transform, once for each client's mini-batch. Before each of these calls the global random generators of
    Python, NumPy and torch are seeded by (seed, round, client, local step). ``name`` is the transform's name in
    messages. ``module`` is the name of the Python module from which it was imported, or None if the user passed the
    function itself.
    """

    function: Transform
    name: str = "transform"
    module: str | None = None

    def __call__(self, x: Any, counts: Sequence[int], ids: Sequence[int], seed: int, round: int, step: int) -> Any:
        """Applies the user's function to the mini-batches of C clients in local step ``step``: returns changed copies
        of the stored inputs ``x [C, b, ...]``, in the same shape. ``ids`` are the clients' numbers. Only the first
        ``counts[i]`` samples of client ``ids[i]`` are passed to the function; the samples after these are padding and
        are returned unchanged."""
        result = map_leaves(Tensor.clone, x)
        for row, (client, count) in enumerate(zip(ids, counts, strict=True)):
            if count:
                changed = self._apply(_rows(x, row, count), torch_seed(seed, Purpose.TRANSFORM, round, client, step))
                map_leaves(lambda into, new, row=row, count=count: into[row, :count].copy_(new), result, changed)
        return result

    def _apply(self, x: Any, seed: int) -> Any:
        given = outline(x), [(leaf.shape, leaf.dtype) for leaf in leaves(x)]
        with global_generators(seed):
            changed = self.function(x)
        if outline(changed) != given[0] or not all(isinstance(leaf, Tensor) for leaf in leaves(changed)):
            raise UserError(f"{self.name} was given {given[0]}, but returned {_described(changed)}")
        for leaf, (shape, dtype) in zip(leaves(map_leaves(lambda _, new: new, x, changed)), given[1], strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                raise UserError(
                    f"{self.name} was given {list(shape)} ({dtype}), but returned {_described(leaf)}: shape and type "
                    "must stay, as evaluations use the samples without it"
                )
        return changed

    def check(self, x: Any) -> list[str]:
        """Tries the user's function on stored inputs ``x [b, ...]`` before training, and returns warnings for the user
        as lines of text: that the function draws no random numbers, or changes all samples of a mini-batch alike. The
        list is empty if all is well.

        Raises :class:`UserError` if the function fails, returns inputs of another structure, shape or type, or NaN, or
        draws from a random generator that can't be seeded from outside.
        """
        with as_user_error(f"{self.name} failed"):
            fresh = replace(self, function=_copy(self.function))
            few = map_leaves(lambda leaf: leaf[:FEW], x)
            once = [self._apply(map_leaves(Tensor.clone, few), seed) for seed in range(TRIED_OFTEN)]
            if any(map(_has_nan, once)) and not _has_nan(few):
                raise UserError(f"{self.name} returns NaN")
            again = [fresh._apply(map_leaves(Tensor.clone, few), seed) for seed in reversed(range(TRIED_OFTEN))]
            if not all(map(_same, once, reversed(again))):
                raise UserError(
                    f"{self.name} changes the same samples otherwise each time, though the global generators of torch, "
                    "NumPy and Python are seeded: it must draw from them and from no other generator, or no result "
                    "could be repeated"
                )
            first, *others = (self._apply(map_leaves(Tensor.clone, x), seed) for seed in range(TRIED_SEEDS))
            copies = map_leaves(lambda leaf: torch.stack([leaf[0]] * COPIES), x)
            of_copies = [self._apply(map_leaves(Tensor.clone, copies), seed) for seed in range(TRIED_SEEDS)]
        if all(_same(first, other) for other in others):
            return [
                f"warning: {self.name} draws no random numbers here; it changes samples in training, but not in "
                "evaluations"
            ]
        if all(_same(_rows_of(each, 0), _rows_of(each, i)) for each in of_copies for i in range(1, COPIES)):
            return [
                f"warning: {self.name} changes all samples of a mini-batch alike, as transforms of torchvision do: "
                "fedray.each_sample(transform) draws for each of them"
            ]
        return []

    @property
    def code(self) -> list[Any]:
        """The functions and objects of which the user's transform consists, such as the steps of a ``Compose``, and the
        Python module ``module`` if it is imported. Their code is hashed, because two runs with different transforms are
        different runs."""
        return [*_parts(self.function), *([sys.modules[self.module]] if self.module in sys.modules else [])]


def _parts(thing: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the functions and objects of which the transform ``thing`` consists: ``thing`` itself, the callables in
    its attributes, and the callables in lists and dicts there, such as the steps of a Compose; then what these consist
    of. ``depth`` is the number of levels above ``thing``."""
    yield thing
    inside = getattr(thing, "__dict__", None)
    if isinstance(thing, partial):
        inside = {"func": thing.func, "args": thing.args, "keywords": thing.keywords}
    if depth > 8 or not isinstance(inside, dict) or isinstance(thing, type):
        return
    for value in inside.values():
        several = list(value.values()) if isinstance(value, Mapping) else value
        for each in several if isinstance(several, (list, tuple)) else [value]:
            if callable(each) and not isinstance(each, Tensor):
                yield from _parts(each, depth + 1)


def _rows(x: Any, row: int, count: int) -> Any:
    return map_leaves(lambda leaf: leaf[row, :count], x)


def _rows_of(x: Any, i: int) -> Any:
    return map_leaves(lambda leaf: leaf[i], x)


def _same(a: Any, b: Any) -> bool:
    return all(map(same_bits, leaves(a), leaves(b)))


def _has_nan(x: Any) -> bool:
    return any(bool(leaf.isnan().any()) for leaf in leaves(x))


def _copy(function: Transform) -> Transform:
    """Returns a copy of a function that shares no state with it, or the function itself if it can't be copied."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(function)
    return function


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{list(x.shape)} ({x.dtype})"
    return outline(x) if isinstance(x, (tuple, dict)) else type(x).__name__
