"""Data sets whose items are read one by one when they are used (``data.access: lazy``)."""

from __future__ import annotations

import copy
import hashlib
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedray.core.seeds import global_generators
from fedray.core.structure import leaves, map_leaves, outline
from fedray.data.sources.features import as_array, as_sample, read_features, stack_samples
from fedray.data.sources.wrapped import classes_of, list_of, mark_of
from fedray.errors import UserError
from fedray.usercode.importing import as_user_error

READ_TWICE = 16
"""The number of items of a Dataset that are read two more times, to find out whether its transforms are random."""

HASHED = 64
"""The number of items whose content is in the digest of a data set that is read item by item."""

TARGETS = ("targets", "labels")
"""The attributes in which a Dataset may list the targets of all items, as those of torchvision do."""


MUCH = 0.25
"""The part of the machine's memory beyond which samples are read one by one under ``data.access: auto``."""


def memory_of_machine() -> int:
    """Returns the bytes of memory of this machine, whether they are free or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_much(size: float) -> bool:
    """Returns whether samples of ``size`` bytes are left where they are, and read one by one, unless the user wants
    them elsewhere."""
    return size > MUCH * memory_of_machine()


class Indexed(Protocol):
    """What has items with numbers, as a torch Dataset has."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


class ItemTargets(NamedTuple):
    """The targets of all items of a data set, and where it lists them; ``listed`` is "" if they were read from the
    items."""

    values: Any
    listed: str


class LazyItems:
    """The items (x, y) of a torch Dataset, or of anything else with ``len`` and indices.

    ``name`` stands for it in messages. ``first`` is the input of item 0 as arrays ``[1, ...]``, or a tuple or dict of
    arrays: all items must have its shapes and types. With :meth:`checked`, items must also have the targets that the
    run takes for theirs.
    """

    def __init__(self, dataset: Indexed, name: str) -> None:
        self.dataset, self.name = dataset, name
        self.targets: ItemTargets | None = None
        with global_generators(0):
            self.first = self._stacked([read_item(dataset, name, 0)[0]])

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def bytes_each(self) -> int:
        return sum(leaf.nbytes for leaf in leaves(self.first))

    @property
    def classes(self) -> list[type]:
        """The class of the data set, and those of the data sets within it."""
        return classes_of(self.dataset)

    def checked(self, targets: ItemTargets) -> LazyItems:
        """Returns these items, whose targets are compared with ``targets`` whenever one is read."""
        found = copy.copy(self)
        found.targets = targets._replace(values=as_array(self.name, targets.listed or "the targets", targets.values))
        return found

    def read(self, i: int) -> Any:
        """Returns the input of item ``i`` as arrays ``[1, ...]``.

        Raises :class:`UserError`, which names the item, if it is unlike item 0, or has another target than the run
        takes for its target.
        """
        sample, y = read_item(self.dataset, self.name, i)
        if self.targets is not None:
            self._check_target(i, y, np.asarray(self.targets.values[i]))
        x = self._stacked([sample])
        if outline(x) != outline(self.first):
            raise UserError(f"item {i} of {self.name} is {outline(x)}, the first one {outline(self.first)}")
        for leaf, first in zip(leaves(x), leaves(map_leaves(lambda _, first: first, x, self.first)), strict=True):
            if leaf.shape != first.shape or leaf.dtype != first.dtype:
                raise UserError(
                    f"item {i} of {self.name} has shape {list(leaf.shape[1:])} ({leaf.dtype}), the first one "
                    f"{list(first.shape[1:])} ({first.dtype}); all must be alike"
                )
        return x

    def _check_target(self, i: int, y: np.ndarray, known: np.ndarray) -> None:
        assert self.targets is not None
        if np.array_equal(*((y.reshape(()), known.reshape(())) if y.size == known.size == 1 else (y, known))):
            return
        has = f"item {i} of {self.name} has the target {y.tolist()!r}"
        if self.targets.listed:
            raise UserError(
                f"{has}, but {self.name}.{self.targets.listed} lists {known.tolist()!r} for it, which partitions and "
                "losses use: list the targets that items have, or nothing, so that every item is read once before the "
                "first round"
            )
        raise UserError(
            f"{has}, but had {known.tolist()!r} when targets were read: transforms may change inputs at random, but no "
            "targets"
        )

    def _stacked(self, samples: list[Any]) -> Any:
        return read_features(self.name, "x", stack_samples("item", self.name, samples), len(samples))

    def chosen(self, indices: np.ndarray) -> Any:
        """Returns the inputs of some items as arrays ``[n, ...]``. Random transforms draw the same each time."""
        rows = []
        for i in indices.tolist():
            with global_generators(i):
                rows.append(self.read(i))
        return map_leaves(lambda *parts: np.concatenate(parts), *rows)

    @property
    def parallel(self) -> bool:
        """Whether several threads may read items at the same time, which few Datasets of users can do."""
        return bool(getattr(self.dataset, "parallel", False))

    def stamp(self) -> str:
        """Returns a digest that differs if any item may have changed, for copies that are kept.

        It is what the data set's method ``stamp`` returns, or else ``digest``. Raises :class:`UserError` if it has
        neither of them.
        """
        found = mark_of(self.dataset, ("stamp", "digest"))
        if found is not None:
            return found
        raise UserError(
            f"data.access=mapped keeps the items of {self.name} for later runs, and can't tell whether they are still "
            "the same then: give the Dataset a method digest(), which returns another text when an item changes, or "
            "use data.access=lazy"
        )

    def digest(self) -> str:
        """Returns a digest of the code of the data set, its length, some of its items, and of what its method
        ``digest``, if it has one, returns.

        To read all items would take as long as an epoch.
        """
        # it imports torch, which takes seconds
        from fedray.usercode.digests import code_digest

        known, code = mark_of(self.dataset, ("digest",)) or "", "".join(map(code_digest, self.classes))
        digest = hashlib.sha256(f"{code} {len(self)} {known}".encode())
        for leaf in leaves(self.chosen(np.array(_spread(len(self), HASHED)))):
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def read_item(dataset: Indexed, name: str, i: int) -> tuple[Any, np.ndarray]:
    """Returns input and target of item ``i`` as arrays. Raises :class:`UserError` if it is no pair (x, y)."""
    with as_user_error(f"item {i} of {name} can't be read"):
        item = dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(f"item {i} of {name} is no pair (x, y), but {type(item).__name__}")
        return as_sample(item[0]), np.asarray(item[1])


def targets_of(dataset: Indexed, name: str) -> ItemTargets:
    """Returns the targets of all items: what the data set lists, or else what its items have, which are all read.

    A list is not taken if some item that is looked at has another target, as with a transform of targets; the others
    are compared when they are read (:meth:`LazyItems.checked`).
    """
    for attribute in TARGETS:
        listed: Any = list_of(dataset, attribute, name)
        if hasattr(listed, "__len__") and len(listed) == len(dataset) and _is_of_items(listed, dataset, name):
            return ItemTargets(listed, attribute)
    with global_generators(0):
        return ItemTargets(stack_targets(name, [read_item(dataset, name, i)[1] for i in range(len(dataset))]), "")


def _is_of_items(listed: Any, dataset: Indexed, name: str) -> bool:
    with global_generators(0):
        return all(
            np.array_equal(np.asarray(listed[i]), read_item(dataset, name, i)[1])
            for i in _spread(len(dataset), READ_TWICE)
        )


def stack_targets(name: str, targets: list[np.ndarray]) -> np.ndarray:
    """Returns the targets of all items. Single values, which may be names, and arrays of one value are [n]."""
    found: np.ndarray
    if any(target.size != 1 for target in targets):
        found = stack_samples("item", f"the targets of {name}", targets)
    elif {target.dtype.kind for target in targets} in ({"f"}, {"i"}, {"u"}):
        found = np.stack([target.reshape(()) for target in targets])
    else:
        found = np.empty(len(targets), dtype=object)
        found[:] = [target.reshape(()).item() for target in targets]
    return found


def random_item(dataset: Indexed, name: str) -> int | None:
    """Returns an item of a Dataset whose input is another one when it is read again, as with random transforms; None if
    there is none.

    To find out, some items are read three times with other random numbers, and once more with the same ones. Raises
    :class:`UserError` if a target is random, because targets are read only once, and if an item differs although the
    global random generators are seeded.
    """
    for i in _spread(len(dataset), READ_TWICE):
        read = []
        # other numbers for each item, because a transform may change few of them
        for seed in (*range(3 * i, 3 * i + 3), 3 * i + 2):
            with global_generators(seed):
                x, y = read_item(dataset, name, i)
            read.append((leaves(x), y))
        (first, target), *others = read
        if not all(_same(target, y) for _, y in others):
            raise UserError(
                f"the target of item {i} of {name} differs when it is read again: transforms may change inputs at "
                "random, but no targets, which are read once"
            )
        if not all(_same(a, b) for a, b in zip(read[-1][0], read[-2][0], strict=True)):
            raise UserError(
                f"item {i} of {name} differs when it is read again with the same random numbers: its transforms must "
                "draw from the global generators of torch, NumPy or Python, which fedray seeds, and not from "
                "another generator, or no result could be repeated"
            )
        if not all(_same(a, b) for x, _ in others for a, b in zip(first, x, strict=True)):
            return i
    return None


def _spread(count: int, most: int) -> list[int]:
    """Returns at most ``most`` numbers below ``count``, evenly spaced."""
    return [int(place) for place in np.unique(np.linspace(0, count - 1, most).astype(np.int64))]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
