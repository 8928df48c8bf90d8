"""A data set spread over clients, as plain arrays that all processes of a node can share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedray.config import DataConfig
from fedray.core.seeds import Purpose, stream
from fedray.data.deal import Split, by_owner, indices_and_offsets
from fedray.data.partition import kind_of, partition
from fedray.data.source import Source
from fedray.errors import UserError


def _no_indices() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Samples, and who holds which. Per client there is nothing but its indices.

    ``x`` [n, ...] uint8 or float32 and ``y`` int64 [n] are all training samples, with a source's own public set at
    their end; a model's input is float32(x) * scale + shift along axis 1 (float32 [channels], or None). Client i holds
    ``indices[offsets[i]:offsets[i + 1]]`` (int64, sorted) of them; ``public`` and ``validation`` are indices into x
    too, of nobody's samples; ``train_subset`` are those on which train_accuracy is evaluated. ``ids`` int64 [N] are the
    clients' numbers in the data, 0..N-1 unless the partition is natural. ``class_names`` and ``client_names`` (one for
    each class and client) are what the data call them, None where those are just 0, 1, ... ``test_indices`` and
    ``test_offsets`` give each client's share of the test set, where it is known. ``notes`` are lines about the
    partition worth logging.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    scale: np.ndarray | None
    shift: np.ndarray | None
    indices: np.ndarray
    offsets: np.ndarray
    public: np.ndarray
    validation: np.ndarray
    ids: np.ndarray
    train_subset: np.ndarray = field(default_factory=_no_indices)
    test_indices: np.ndarray | None = None
    test_offsets: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    client_names: tuple[str, ...] | None = None

    @property
    def clients(self) -> int:
        """The number of registered clients N."""
        return len(self.offsets) - 1

    @cached_property
    def active(self) -> int:
        """The number of clients that hold samples: the others never take part."""
        return int((self.sizes() > 0).sum())

    def names_of(self, clients: Sequence[int]) -> dict[str, list[str]]:
        """The column ``client_name`` of a table with a row for each of ``clients``; none where they have no names."""
        return {} if self.client_names is None else {"client_name": [self.client_names[each] for each in clients]}

    def sizes(self) -> np.ndarray:
        """n_i, int64 [N]."""
        return np.diff(self.offsets)

    def client(self, i: int) -> np.ndarray:
        """The sorted indices into x of client i's samples."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def client_test(self, i: int) -> np.ndarray:
        """The sorted indices into x_test of client i's share; see :mod:`fedray.data.test_shares`."""
        if self.test_indices is None or self.test_offsets is None:
            raise ValueError("these data have no test shares; call fedray.data.test_shares.with_test_shares first")
        return self.test_indices[self.test_offsets[i] : self.test_offsets[i + 1]]

    def examples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """``count`` training samples, evenly spaced, as models get them: ``x [count, ...]`` float32, ``y`` int64."""
        chosen = np.linspace(0, len(self.y) - 1, count).astype(np.int64)
        x = self.x[chosen].astype(np.float32)
        if self.scale is not None and self.shift is not None:
            channels = (-1,) + (1,) * (x.ndim - 2)
            x = x * self.scale.reshape(channels) + self.shift.reshape(channels)
        return x, self.y[chosen]

    @cached_property
    def partition_hash(self) -> str:
        """sha256 over offsets and indices: equal for equal partitions."""
        return array_digest(self.offsets, self.indices)


def array_digest(*arrays: np.ndarray | None) -> str:
    """sha256 over the dtypes, shapes and values of ``arrays``, the same on every machine."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"none")
            continue
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{little.dtype.str}{little.shape}".encode())
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def federate(source: Source, data: DataConfig, seed: int, public_samples: int) -> FederatedData:
    """``source`` divided as ``data`` says, all draws from ``seed``; UserError if it can't be.

    ``public_samples`` is data.public_samples resolved: 0 where the algorithm needs none. The public set and the
    validation set are i.i.d. draws that are taken out of the training set before it is partitioned. A source's own
    public set is used instead where there is one: all of it for `auto`, else a draw of the size asked for.
    """
    x, y, total = source.x_train, source.y_train, len(source.y_train)
    own = source.x_public is not None and public_samples > 0
    taken = (0 if own else public_samples) + data.validation_samples
    if taken >= total:
        raise UserError(
            f"data.public_samples={taken - data.validation_samples} and data.validation_samples="
            f"{data.validation_samples} leave none of the {total} training samples of {source.name} to the clients"
        )
    # from either end of one order, so that each set stays the same when the other's size changes
    order = stream(seed, Purpose.PUBLIC).permutation(total)
    validation = np.sort(order[total - data.validation_samples :])
    if own:
        assert source.x_public is not None
        assert source.y_public is not None
        public = total + _own_public(source, data, seed)
        x, y = np.concatenate([x, source.x_public]), np.concatenate([y, source.y_public])
    else:
        public = np.sort(order[:public_samples])
    rest = np.setdiff1d(np.arange(total), np.concatenate([public, validation]), assume_unique=True)
    owners = None if source.client_train is None else source.client_train[rest]
    split, notes = partition(y[rest], source.classes, data, stream(seed, Purpose.PARTITION), owners)
    places, offsets = indices_and_offsets(split)
    indices = rest[places]
    ids, client_names = np.arange(len(split)), None
    test: Split | None = None
    if owners is not None and kind_of(data, True) == "natural":
        ids = np.unique(owners[places])
        client_names = _names_of(ids, source.client_names)
        assert source.client_train is not None
        notes += _note_on_lost_clients(len(np.unique(source.client_train)), len(np.unique(owners)))
        if source.client_test is not None:
            test = _split_by_client(source.client_test, ids)
            notes += _note_on_tests_of_nobody(test, len(source.y_test))
    test_indices, test_offsets = (None, None) if test is None else indices_and_offsets(test)
    return FederatedData(
        x=x,
        y=y,
        x_test=source.x_test,
        y_test=source.y_test,
        classes=source.classes,
        scale=source.scale,
        shift=source.shift,
        indices=indices,
        offsets=offsets,
        public=public,
        validation=validation,
        ids=ids,
        test_indices=test_indices,
        test_offsets=test_offsets,
        notes=notes,
        class_names=source.class_names,
        client_names=client_names,
    )


def _names_of(ids: np.ndarray, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """What the data call the clients ``ids``: by name, else by number; None if their numbers are just 0, 1, ..."""
    if np.array_equal(ids, np.arange(len(ids))) and names is None:
        return None
    return tuple(str(i) if names is None else names[i] for i in ids)


def _note_on_tests_of_nobody(test: Split, samples: int) -> tuple[str, ...]:
    rest = samples - sum(map(len, test))
    return (f"{rest} of {samples} test samples are those of no client that trains",) if rest else ()


def _note_on_lost_clients(before: int, left: int) -> tuple[str, ...]:
    if before == left:
        return ()
    lost = f"{before - left} of the data's {before} clients have no samples left: they"
    return (f"{lost} went to the public set (data.public_samples) or the validation set (data.validation_samples)",)


def _own_public(source: Source, data: DataConfig, seed: int) -> np.ndarray:
    there = len(source.y_public) if source.y_public is not None else 0
    if data.public_samples == "auto":
        return np.arange(there)
    if data.public_samples > there:
        raise UserError(f"data.public_samples={data.public_samples}, but {source.name} has a public set of {there}")
    return np.sort(stream(seed, Purpose.PUBLIC, 1).permutation(there)[: data.public_samples])


def _split_by_client(owners: np.ndarray, ids: np.ndarray) -> Split:
    """The samples of each of ``ids`` (sorted); those of others are nobody's."""
    place = np.minimum(np.searchsorted(ids, owners), len(ids) - 1)
    return by_owner(np.where(ids[place] == owners, place, -1), len(ids))


def with_public_dealt(data: FederatedData, seed: int) -> FederatedData:
    """``data`` whose public samples belong to the clients: the same labelled samples in all, and none for the server.

    They are dealt in random order, in parts whose sizes differ by one at most, to the clients that hold samples. What
    these hold without them stays as it is.
    """
    holders = np.flatnonzero(data.sizes())
    order = stream(seed, Purpose.PUBLIC, 3).permutation(data.public)
    parts = dict(zip(holders, np.array_split(order, len(holders)), strict=True))
    indices, offsets = indices_and_offsets(
        [np.sort(np.concatenate([data.client(i), parts.get(i, _no_indices())])) for i in range(data.clients)]
    )
    note = f"the public set of {len(data.public)} samples is dealt out to the {len(holders)} clients that have samples"
    return replace(data, indices=indices, offsets=offsets, public=_no_indices(), notes=(*data.notes, note))


def with_train_subset(data: FederatedData, samples: int, seed: int) -> FederatedData:
    """``data`` with ``samples`` of the clients' own, drawn uniformly, as its ``train_subset``."""
    held = np.unique(data.indices)
    if samples > len(held):
        raise UserError(f"run.eval_train_samples={samples}, but the clients have {len(held)} training samples")
    return replace(data, train_subset=np.sort(stream(seed, Purpose.PUBLIC, 2).permutation(held)[:samples]))
