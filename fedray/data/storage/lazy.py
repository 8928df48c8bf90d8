"""Data sets whose items are read one by one, when they are used (``data.access: lazy``)."""

from __future__ import annotations

import copy
import hashlib
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedray.core.seeds import global_generators
from fedray.core.structure import leaves, map_leaves, outline
from fedray.data.sources.features import ReadLater, as_array, as_sample, read_features, stack_samples
from fedray.data.sources.wrapped import classes_of, list_of, mark_of
from fedray.errors import UserError
from fedray.usercode.importing import as_user_error

READ_TWICE = 16
"""The number of items of a Dataset that are read several times, to find out whether its transforms are random."""

HASHED = 64
"""The number of items whose content is hashed for the digest of a data set that is read item by item."""

TARGETS = ("targets", "labels")
"""The attributes in which a Dataset may list the targets of all items, as torchvision's data sets do."""


MUCH = 0.25
"""The fraction of the machine's memory above which ``data.access: auto`` reads samples one by one."""


def memory_of_machine() -> int:
    """Returns the machine's total memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_much(size: float) -> bool:
    """Returns whether ``size`` bytes of samples are so much that ``data.access: auto`` reads the samples one by one."""
    return size > MUCH * memory_of_machine()


class Indexed(Protocol):
    """An object with ``len`` and numbered items, such as a torch Dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


class ItemTargets(NamedTuple):
    """The targets of all items of a Dataset, ``values``, and where they come from.

    ``listed`` is the Dataset's attribute that lists them, such as ``targets``, or "" if they were read from the items.
    """

    values: Any
    listed: str


class LazyItems(ReadLater):
    """The inputs x of a torch Dataset of pairs (x, y), each of which is read only when it is used. The Dataset may be
    any object with ``len`` and numbered items.

    ``name`` is the Dataset's name in error messages. The attribute ``first`` is the input of item 0, an array
    ``[1, ...]`` or a tuple or dict of such arrays. All other inputs must have the same shapes and types.
    :meth:`checked` returns an object that also compares the y of each item that it reads with the target that is known
    for it.
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
        """The Python types of the Dataset and of the Datasets within it. A user may have written these classes, so
        their code is sent to other processes and hashed."""
        return classes_of(self.dataset)

    def checked(self, targets: ItemTargets) -> LazyItems:
        """Returns a copy of this object whose :meth:`read` also checks the target of each item that it reads.

        The item's target must equal its entry in ``targets``, which are the targets that partitions and losses use.
        """
        found = copy.copy(self)
        found.targets = targets._replace(values=as_array(self.name, targets.listed or "the targets", targets.values))
        return found

    def read(self, i: int) -> Any:
        """Reads item ``i`` of the Dataset, and returns its input as an array ``[1, ...]``, or a tuple or dict of
        such arrays.

        Raises :class:`UserError`, which names the item, if the shape or type of the input differs from item 0's, or if
        the target differs from the one that :meth:`checked` was given.
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
        """Returns the inputs of the items ``indices`` as an array ``[n, ...]``, or a tuple or dict of such arrays.

        Random transforms draw the same numbers for an item in each call.
        """
        rows = []
        for i in indices.tolist():
            with global_generators(i):
                rows.append(self.read(i))
        return map_leaves(lambda *parts: np.concatenate(parts), *rows)

    @property
    def parallel(self) -> bool:
        """Whether several threads may read items at the same time. Few user-defined Datasets allow it."""
        return bool(getattr(self.dataset, "parallel", False))

    def stamp(self) -> str:
        """Returns a text that changes if any item may have changed. If it is unchanged, an earlier copy of the items in
        memory-mapped files is used again.

        The text is the result of the Dataset's method ``stamp``, or else of its method ``digest``. Raises
        :class:`UserError` if the Dataset has neither.
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
        """Returns a digest, as hexadecimal digits, that shows whether a run was made from other data.

        It covers the Dataset's code, its length, the inputs of some items, and the result of the Dataset's method
        ``digest``, if there is one. Not all items are hashed, because reading them would take as long as an epoch.
        """
        # imported here because it imports torch, which takes seconds
        from fedray.usercode.digests import code_digest

        known, code = mark_of(self.dataset, ("digest",)) or "", "".join(map(code_digest, self.classes))
        digest = hashlib.sha256(f"{code} {len(self)} {known}".encode())
        for leaf in leaves(self.chosen(np.array(_spread(len(self), HASHED)))):
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def read_item(dataset: Indexed, name: str, i: int) -> tuple[Any, np.ndarray]:
    """Returns the input and the target of item ``i`` of a Dataset as arrays.

    The input may also be a tuple or dict of arrays. ``name`` is what messages call the Dataset. Raises
    :class:`UserError` if the item can't be read or is not a pair.
    """
    with as_user_error(f"item {i} of {name} can't be read"):
        item = dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(f"item {i} of {name} is no pair (x, y), but {type(item).__name__}")
        return as_sample(item[0]), np.asarray(item[1])


def targets_of(dataset: Indexed, name: str) -> ItemTargets:
    """Returns the targets of all items of a Dataset, if possible from a list in its attribute ``targets`` or
    ``labels``, so that not every item must be read.

    The list is compared with a few items, and is not used if one of these has a different target, for example because
    targets are transformed. The other items are compared when they are read (:meth:`LazyItems.checked`). Without a list
    that can be used, all items are read for their targets. ``name`` is what messages call the Dataset.
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
    """Stacks the targets of all items of a Dataset, ``targets``, into one array.

    The array has the shape ``[n]`` if every target has one value, which may be a name, and otherwise ``[n, ...]``.
    ``name`` is what messages call the Dataset. Raises :class:`UserError` if a target has several values and the targets
    differ in shape or type. Targets of one value may differ in both.
    """
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
    """Returns the index of an item of a Dataset whose input changes when it is read again, as with random transforms.

    Returns None if there is no such item among those that are tried: some items are read three times with different
    random seeds, and once more with the last seed. Raises :class:`UserError` if a target is random, because targets are
    read only once, or if an item changes although the global random generators have the same seed. ``name`` is what its
    messages call the data set.
    """
    for i in _spread(len(dataset), READ_TWICE):
        read = []
        # each item has other seeds, because a transform may change an item only rarely
        for seed in (*range(3 * i, 3 * i + 3), 3 * i + 2):
            with global_generators(seed):
                x, y = read_item(dataset, name, i)
            read.append((leaves(x), y))
        (first, target), *others = read
        if not all(same_values(target, y) for _, y in others):
            raise UserError(
                f"the target of item {i} of {name} differs when it is read again: transforms may change inputs at "
                "random, but no targets, which are read once"
            )
        if not all(same_values(a, b) for a, b in zip(read[-1][0], read[-2][0], strict=True)):
            raise UserError(
                f"item {i} of {name} differs when it is read again with the same random numbers: its transforms must "
                "draw from the global generators of torch, NumPy or Python, which fedray seeds, and not from "
                "another generator, or no result could be repeated"
            )
        if not all(same_values(a, b) for x, _ in others for a, b in zip(first, x, strict=True)):
            return i
    return None


def _spread(count: int, most: int) -> list[int]:
    """Returns at most ``most`` indices below ``count``, evenly spaced."""
    return [int(place) for place in np.unique(np.linspace(0, count - 1, most).astype(np.int64))]


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
