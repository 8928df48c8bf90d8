"""The kinds of partitions (``data.partition.kind``), and the function that partitions samples among clients as a
configuration asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedray.config import MIN_SAMPLES, DataConfig, PartitionConfig
from fedray.data.partitions.dirichlet import dirichlet, dirichlet_fixed
from fedray.data.partitions.skew import iid, label_skew, natural, orthogonal, quantity_skew, shards
from fedray.data.partitions.splits import Split, number_of_samples
from fedray.errors import UserError, near_miss
from fedray.warning import as_warning


class Partitioner(NamedTuple):
    """A way to partition samples among clients, which users choose by ``data.partition.kind``.

    Args:
        split: the function that makes the partition. It is called as ``split(labels, clients, rng, **arguments)``,
            where ``labels`` int64 [n] has the class of each sample, ``clients`` is the number of clients, and ``rng``
            is a NumPy generator. It returns a list with a sorted int64 array of sample indices for each client. A
            function gets only those of the following ``arguments`` that it has as keyword-only parameters:
            ``samples_per_client`` and the options in the section ``data.partition``, if the user has set them;
            ``classes``, the number of classes; ``owners`` int64 [n], the client of each sample if the data come with
            clients, or else None; ``note`` and ``warn``, functions that show a line to the user.
        about: what the function does, in a line.
        by_class: whether the function uses the samples' classes, which not every task has.

    Example:
        >>> PARTITIONERS["iid"].split(np.zeros(4), 2, np.random.Generator(np.random.Philox(0)))
        [array([0, 3]), array([1, 2])]
    """

    split: Callable[..., Split]
    about: str
    by_class: bool = True

    @property
    def arguments(self) -> set[str]:
        parameters = inspect.signature(self.split).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    @property
    def options(self) -> list[str]:
        """The configuration keys of the options that this kind of partition takes, without ``data.``, such
        as ``partition.alpha``."""
        return [_key(name) for name in _OPTIONS if name in self.arguments or name == "min_samples"]


PARTITIONERS = {
    "iid": Partitioner(iid, "shuffled and cut into equal parts", by_class=False),
    "label_skew": Partitioner(label_skew, "classes_per_client classes each, equally many samples (pFedMo)"),
    "quantity_skew": Partitioner(
        quantity_skew, "sizes[i] samples each, in the class proportions of the set (pFedMo)", False
    ),
    "dirichlet": Partitioner(dirichlet, "each class cut among the clients by Dir(alpha); sizes vary (pFedMo, MOON)"),
    "dirichlet_fixed": Partitioner(
        dirichlet_fixed,
        "each client's classes drawn from Dir(alpha prior), equal sizes (Hsu et al. 2019, FedDyn)",
    ),
    "shards": Partitioner(shards, "sorted by label, cut into shards, shards_per_client each (McMahan et al. 2017)"),
    "orthogonal": Partitioner(orthogonal, "clusters of clients that share no class (FedTrip)"),
    "natural": Partitioner(natural, "the clients that come with the data; data.clients is ignored", False),
}
AUTO = "auto"
"""The kind that becomes ``natural``, ``dirichlet`` or ``iid``, depending on the data (:func:`kind_of`)."""

_OPTIONS = ["samples_per_client", *(name for name in PartitionConfig.model_fields if name != "kind")]


def _key(name: str) -> str:
    return name if name == "samples_per_client" else f"partition.{name}"


def partition(
    labels: np.ndarray,
    classes: int,
    data: DataConfig,
    rng: np.random.Generator,
    owners: np.ndarray | None = None,
    has_classes: bool = True,
) -> tuple[Split, tuple[str, ...]]:
    """Partitions samples among clients in the way that a configuration asks for.

    Returns two things: a list with a sorted int64 array of sample indices for each client, and a tuple of lines about
    the partition to show to the user.

    Args:
        labels: the class of each sample, int64 [n].
        classes: the number of classes.
        data: the section ``data`` of a configuration.
        rng: the generator of all draws.
        owners: the clients that come with the data, int64 [n], one for each sample; None if there are none.
        has_classes: whether samples have classes; if not, all labels are the same.

    Raises:
        UserError: the kind is unknown, does not take an option that is set, or needs classes where there are none; or a
            client has fewer than ``min_samples`` samples.
    """
    kind = kind_of(data, owners is not None, has_classes)
    chosen = PARTITIONERS[kind]
    if chosen.by_class and not has_classes:
        takers = ", ".join(name for name, entry in PARTITIONERS.items() if not entry.by_class)
        raise UserError(f"data.partition.kind={kind} goes by classes, and the targets are none: use {takers}")
    notes: list[str] = []
    if owners is not None and kind != "natural":
        notes.append(
            f"warning: the data say whose each sample is, but data.partition.kind={kind} does not use that; natural "
            "does"
        )
    offered = {**_options_set(data, kind), "classes": classes, "owners": owners, "note": notes.append}
    offered["warn"] = lambda line: notes.append(as_warning(line))
    arguments = {name: value for name, value in offered.items() if name in chosen.arguments}
    split = chosen.split(labels, data.clients, rng, **arguments)
    least = data.partition.min_samples
    _check_sizes(split, MIN_SAMPLES if least is None else least, kind)
    if kind == "natural" and data.clients not in (len(split), DataConfig.model_fields["clients"].default):
        line = f"data.clients={data.clients} is not used: {len(split)} clients come with the data"
        notes.append(as_warning(line))
    return split, tuple(notes)


def kind_of(data: DataConfig, has_owners: bool, has_classes: bool) -> str:
    """Returns the kind of partition that ``data``, a section of the configuration, asks for, such as ``dirichlet``.

    The kind ``auto`` becomes ``natural`` if clients come with the data (``has_owners``), else ``dirichlet`` if samples
    have classes (``has_classes``), else ``iid``. Raises :class:`UserError` for an unknown kind.
    """
    kind = data.partition.kind
    if kind == AUTO:
        return "natural" if has_owners else "dirichlet" if has_classes else "iid"
    if kind not in PARTITIONERS:
        known = [AUTO, *PARTITIONERS]
        raise UserError(f"data.partition.kind: there is no partition {kind!r}{near_miss(kind, known)}")
    return kind


def _options_set(data: DataConfig, kind: str) -> dict[str, Any]:
    """Returns the options of the partition that differ from their defaults, as values by name.

    Options at their defaults are left out because a resolved configuration, which contains all of them, must be
    accepted. Raises :class:`UserError` for an option that ``kind`` does not take.
    """
    found = {}
    for name in _OPTIONS:
        section = data if name == "samples_per_client" else data.partition
        value = getattr(section, name)
        if value == type(section).model_fields[name].default:
            continue
        found[name] = value
        if _key(name) not in PARTITIONERS[kind].options:
            takers = ", ".join(other for other, entry in PARTITIONERS.items() if name in entry.arguments)
            chosen = " (auto: clients come with the data)" if data.partition.kind == AUTO else ""
            raise UserError(
                f"data.{_key(name)} does not apply to data.partition.kind={kind}{chosen}; it does to {takers}"
            )
    return found


def resolved_defaults(kind: str) -> dict[str, Any]:
    """Returns the defaults of the options of a partition: the values that null stands for in a configuration.

    ``kind`` is the kind of partition. The result is a dict by option name, which has ``alpha`` and ``min_samples`` for
    ``dirichlet``, for example. Options for which null means no value are left out.
    """
    parameters = inspect.signature(PARTITIONERS[kind].split).parameters
    unset = [name for name, field in PartitionConfig.model_fields.items() if field.default is None]
    stands_for = {name: parameters[name].default for name in unset if name in parameters}
    found = {name: value for name, value in stands_for.items() if value not in (None, inspect.Parameter.empty)}
    return {**found, "min_samples": MIN_SAMPLES}


def _check_sizes(split: Split, least: int, kind: str) -> None:
    sizes = np.array([len(indices) for indices in split])
    if len(sizes) and sizes.min() < least:
        client, few = int(np.argmax(sizes < least)), int((sizes < least).sum())
        lack = f", but data.partition.min_samples={least}" if least > 1 else ""
        rest = f", like {few - 1:,} other{'s' * (few > 2)}" if few > 1 else ""
        remedy = "raise its data.partition.sizes" if kind == "quantity_skew" else f"lower data.clients={len(sizes)}"
        raise UserError(
            f"{kind}: client {client} would have {number_of_samples(sizes[client])}{rest}{lack}: {remedy}, or set "
            f"data.partition.min_samples=0, with which clients may have none"
        )
