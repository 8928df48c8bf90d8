"""A data set that is partitioned among clients, as plain arrays that all processes of a machine can share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedray.config import DataConfig
from fedray.core.seeds import Purpose, stream
from fedray.core.structure import map_leaves
from fedray.data.partitions.partition import kind_of, partition
from fedray.data.partitions.splits import by_owner, indices_and_offsets
from fedray.data.sources.source import Source
from fedray.data.storage.lazy import LazyItems
from fedray.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from fedray.core.samples import Samples


def _no_indices() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


class Labels(NamedTuple):
    """The classes of a data set, by which its samples are partitioned among clients.

    ``train`` and ``test`` (int64) hold the class of each training and test sample, and ``classes`` is the number of
    classes. If the task has no classes, all samples are of class 0.
    """

    train: np.ndarray
    test: np.ndarray
    classes: int

    @classmethod
    def of(cls, task: str, y: np.ndarray, y_test: np.ndarray, classes: int) -> Labels:
        if task == "classification":
            return cls(y, y_test, classes)
        return cls(np.zeros(len(y), np.int64), np.zeros(len(y_test), np.int64), 1)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The samples of a run, and which client holds each of them. For a client only the indices of its samples are
    stored.

    * ``x``, ``y``, ``x_test``, ``y_test``: the inputs and targets of all training and test samples. Inputs are an array
      [n, ...], a tuple or dict of such arrays, or a :class:`LazyItems`. If a public set that came with the data is
      used, its samples are at the end of ``x`` and ``y``.
    * ``classes``, ``task``: the number of classes, and the kind of task, such as ``classification``.
    * ``scale``, ``shift``: a model's input is float32(x) * scale + shift
      (:class:`~fedray.data.sources.source.Source`).
    * ``indices`` and ``offsets``: client i holds the training samples ``indices[offsets[i]:offsets[i + 1]]`` (int64,
      sorted), which are indices into ``x``.
    * ``public``: indices into ``x`` of the public set, on which the server may train. Clients hold none of these
      samples unless ``data.public_overlap`` is set.
    * ``validation``: indices into ``x`` of the validation set, of which clients hold no sample.
    * ``train_subset``: indices into ``x`` of the samples on which train_accuracy is evaluated.
    * ``test_indices``, ``test_offsets``: each client's share of the test set, as indices into ``x_test``, in the form
      of ``indices`` and ``offsets``. Both are None if the clients have no test shares.
    * ``ids`` int64 [N]: the number that each client has in the data set. These are 0..N-1 unless the clients come with
      the data (the partition ``natural``).
    * ``class_names``, ``client_names``: the names of classes and clients in the data, None if they have only numbers.
    * ``notes``: lines about the data and the partition that the user should know.
    """

    x: Any
    y: np.ndarray
    x_test: Any
    y_test: np.ndarray
    classes: int
    scale: Any
    shift: Any
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
    task: str = "classification"

    @property
    def input_shape(self) -> Any:
        """The shape of one sample's inputs, such as ``(1, 28, 28)``, or a tuple or dict of shapes if a sample has
        several inputs."""
        return map_leaves(lambda x: tuple(x.shape[1:]), self.x.first if isinstance(self.x, LazyItems) else self.x)

    @property
    def user_classes(self) -> list[type]:
        """The Python types of the Datasets whose items are read one by one. These may be user-defined, so their code is
        sent to Ray's processes. The list is empty if no items are read in this way."""
        return [cls for x in (self.x, self.x_test) if isinstance(x, LazyItems) for cls in x.classes]

    @property
    def warnings(self) -> list[str]:
        """The lines among ``notes`` that begin with ``warning: ``. They report what may make results different from
        what the user expects."""
        return [note for note in self.notes if note.startswith("warning: ")]

    @cached_property
    def labels(self) -> Labels:
        """The class of each training and test sample, by which samples are partitioned. All are 0 if the task has
        no classes."""
        return Labels.of(self.task, self.y, self.y_test, self.classes)

    @property
    def clients(self) -> int:
        """The number of registered clients N, which are all clients, whether or not they hold samples or ever
        take part."""
        return len(self.offsets) - 1

    @cached_property
    def active(self) -> int:
        """The number of registered clients that hold samples. Clients without samples never take part in a round."""
        return int((self.sizes() > 0).sum())

    def names_of(self, clients: Sequence[int]) -> dict[str, list[str]]:
        """Returns the names of ``clients`` as a column of a table: ``{"client_name": ["ann", "bob"]}``, in the order
        of ``clients``.

        ``clients`` are numbers of clients. The dict is empty if the data give clients no names.
        """
        return {} if self.client_names is None else {"client_name": [self.client_names[each] for each in clients]}

    def sizes(self) -> np.ndarray:
        """Returns the number of training samples n_i of each registered client, int64 [N]."""
        return np.diff(self.offsets)

    def client(self, i: int) -> np.ndarray:
        """Returns the sorted indices into ``x`` and ``y`` of the training samples of client ``i``, int64 [n_i]."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def client_test(self, i: int) -> np.ndarray:
        """Returns the sorted indices into ``x_test`` and ``y_test`` of the test samples on which models are scored for
        client ``i`` (its test share), int64.

        Raises ValueError if no test shares have been made yet (:func:`with_test_shares`).
        """
        if self.test_indices is None or self.test_offsets is None:
            raise ValueError(
                "these data have no test shares; call fedray.data.partitions.test_shares.with_test_shares first"
            )
        return self.test_indices[self.test_offsets[i] : self.test_offsets[i + 1]]

    def examples(self, count: int) -> tuple[Any, Tensor]:
        """Returns ``count`` evenly spaced training samples, with which a model can be tried before the run.

        The first element has the inputs, scaled as a model gets them: a tensor ``[count, ...]``, or a tuple or dict of
        such tensors. The second one is the tensor of targets, ``[count, ...]``.
        """
        return self.stored_examples(count).gather(np.arange(count))

    def stored_examples(self, count: int) -> Samples:
        """Returns ``count`` evenly spaced training samples in their stored form, in which inputs are not scaled yet."""
        import torch

        from fedray.core.samples import Samples

        def tensor(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array)

        chosen = np.linspace(0, len(self.y) - 1, count).astype(np.int64)
        x = self.x.chosen(chosen) if isinstance(self.x, LazyItems) else map_leaves(lambda x: x[chosen], self.x)
        stored, scale, shift = (map_leaves(tensor, each) for each in (x, self.scale, self.shift))
        return Samples(stored, torch.from_numpy(self.y[chosen]), scale, shift)

    @cached_property
    def partition_hash(self) -> str:
        """The sha256 of the partition, as hexadecimal digits: a digest of which client holds which training samples."""
        return array_digest(self.offsets, self.indices)


def array_digest(*arrays: np.ndarray | None) -> str:
    """Returns one sha256 of the dtypes, shapes and values of ``arrays``, as hexadecimal digits.

    The digest does not depend on the byte order of the machine. None may stand for an array that does not exist.
    """
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
    """Partitions the samples of a data set among clients.

    Two sets are first drawn at random from the training set and withheld from the clients: the public set, on which the
    server may train a model, and the validation set. If ``source`` comes with a public set, that set is used instead of
    a drawn one: all of it if ``data.public_samples`` is ``auto``, or else that many random samples of it. With
    ``data.public_overlap`` a drawn public set is not withheld, so that clients get its samples, too.

    Args:
        source: the data set.
        data: the section ``data`` of a configuration, which describes the partition.
        seed: the seed of all random draws.
        public_samples: how many samples to draw for the public set; 0 for none, even if the source comes with one.

    Raises:
        UserError: the data can't be partitioned in the way that ``data`` asks for.

    Example:
        >>> from fedray.data.sources.source import load_source
        >>> federate(load_source("sample"), DataConfig(clients=10), seed=0, public_samples=100).clients
        10
    """
    x, y, total = source.x_train, source.y_train, len(source.y_train)
    has_public = source.x_public is not None and public_samples > 0
    taken = (0 if has_public else public_samples) + data.validation_samples
    withheld = data.validation_samples if data.public_overlap else taken
    if withheld >= total or taken > total:
        raise UserError(
            f"data.public_samples={taken - data.validation_samples} and data.validation_samples="
            f"{data.validation_samples} leave none of the {total} training samples of {source.name} to the clients"
            if withheld >= total
            else f"data.public_samples and data.validation_samples are {taken}, and {source.name} has {total} samples"
        )
    # the two sets come from the two ends of one random order, so each stays the same when the other's size changes
    order = stream(seed, Purpose.PUBLIC).permutation(total)
    validation = np.sort(order[total - data.validation_samples :])
    if has_public:
        if data.public_overlap:
            raise UserError(f"data.public_overlap=true: the public set that comes with {source.name} is no client's")
        assert source.x_public is not None
        assert source.y_public is not None
        public = total + _public_of_source(source, data, seed)
        x = map_leaves(lambda *parts: np.concatenate(parts), x, source.x_public)
        y = np.concatenate([y, source.y_public])
    else:
        public = np.sort(order[:public_samples])
    held_out = validation if data.public_overlap else np.concatenate([public, validation])
    rest = np.setdiff1d(np.arange(total), held_out, assume_unique=True)
    owners = None if source.client_train is None else source.client_train[rest]
    has_classes = source.kind == "classification"
    labels = Labels.of(source.kind, y, source.y_test, source.classes)
    rng = stream(seed, Purpose.PARTITION)
    split, notes = partition(labels.train[rest], labels.classes, data, rng, owners, has_classes)
    places, offsets = indices_and_offsets(split)
    federated = FederatedData(
        x=x, y=y, x_test=source.x_test, y_test=source.y_test, classes=source.classes, scale=source.scale,
        shift=source.shift, indices=rest[places], offsets=offsets, public=public, validation=validation,
        ids=np.arange(len(split)), notes=(*source.notes, *notes), class_names=source.class_names, task=source.kind,
    )  # fmt: skip
    if owners is not None and kind_of(data, True, has_classes) == "natural":
        return _with_natural_clients(federated, source, owners, places)
    return federated


def _with_natural_clients(
    federated: FederatedData, source: Source, owners: np.ndarray, places: np.ndarray
) -> FederatedData:
    """Returns ``federated`` with the numbers, names and test samples of the clients that come with the data.

    ``owners`` has the client of each sample that was partitioned. ``places`` are indices into ``owners`` of the samples
    that clients hold.
    """
    assert source.client_train is not None
    ids, names, notes = np.unique(owners[places]), source.client_names, federated.notes
    if names is not None or not np.array_equal(ids, np.arange(len(ids))):
        names = tuple(str(i) if names is None else names[i] for i in ids)
    before, left = len(np.unique(source.client_train)), len(np.unique(owners))
    if left < before:
        lost = f"warning: {before - left} of the data's {before} clients have no samples left: they went to the public "
        notes += (f"{lost}set (data.public_samples) or the validation set (data.validation_samples)",)
    found = replace(federated, ids=ids, client_names=names, notes=notes)
    if source.client_test is None:
        return found
    place = np.minimum(np.searchsorted(ids, source.client_test), len(ids) - 1)
    test = by_owner(np.where(ids[place] == source.client_test, place, -1), len(ids))
    if rest := len(source.y_test) - sum(map(len, test)):
        notes += (f"warning: {rest} of {len(source.y_test)} test samples are those of no client that trains",)
    test_indices, test_offsets = indices_and_offsets(test)
    return replace(found, notes=notes, test_indices=test_indices, test_offsets=test_offsets)


def _public_of_source(source: Source, data: DataConfig, seed: int) -> np.ndarray:
    there = len(source.y_public) if source.y_public is not None else 0
    if data.public_samples == "auto":
        return np.arange(there)
    if data.public_samples > there:
        raise UserError(f"data.public_samples={data.public_samples}, but {source.name} has a public set of {there}")
    return np.sort(stream(seed, Purpose.PUBLIC, 1).permutation(there)[: data.public_samples])


def with_public_at_clients(data: FederatedData, seed: int) -> FederatedData:
    """Moves the samples of the public set to the clients. Returns ``data`` with these samples among the clients'
    training samples, and with an empty public set.

    This is for fair comparisons (``data.public_to=clients``): some algorithms train a model on the public set at the
    server, and the others can then train on the same samples at the clients. The samples are shuffled by ``seed`` and
    divided evenly among the clients that hold samples. Two clients' shares differ by one sample at most.
    """
    holders = np.flatnonzero(data.sizes())
    order = stream(seed, Purpose.PUBLIC, 3).permutation(data.public)
    parts = dict(zip(holders, np.array_split(order, len(holders)), strict=True))
    indices, offsets = indices_and_offsets(
        [np.sort(np.concatenate([data.client(i), parts.get(i, _no_indices())])) for i in range(data.clients)]
    )
    note = f"the {len(data.public)} public samples are partitioned among the {len(holders)} clients that have samples"
    return replace(data, indices=indices, offsets=offsets, public=_no_indices(), notes=(*data.notes, note))


def with_train_subset(data: FederatedData, samples: int, seed: int) -> FederatedData:
    """Draws the training samples on which train_accuracy is evaluated, and returns ``data`` with their sorted indices
    as ``train_subset``.

    ``samples`` is how many are drawn, uniformly among those that clients hold, and ``seed`` is the seed of the draw.
    Raises :class:`UserError` if the clients hold fewer samples.
    """
    held = np.unique(data.indices)
    if samples > len(held):
        raise UserError(f"run.eval_train_samples={samples}, but the clients have {len(held)} training samples")
    return replace(data, train_subset=np.sort(stream(seed, Purpose.PUBLIC, 2).permutation(held)[:samples]))
