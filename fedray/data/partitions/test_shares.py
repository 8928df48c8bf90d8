"""Gives each client a share of the test set, and draws the clients that ``run.eval_clients`` asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.data.partitions.splits import Split, by_owner, class_pools, indices_and_offsets, largest_remainder
from fedray.errors import UserError


def with_test_shares(data: FederatedData, seed: int, least: int = 0) -> FederatedData:
    """Returns ``data`` with a test share for each client, which are the test samples on which that client is scored.

    If the source says to which client each test sample belongs, a client's share has the samples that belong to it.
    Otherwise the test samples of a class are partitioned among the clients in proportion to their training samples of
    that class (by largest remainder, ties at random); they are in no share if no client has the class. If samples have
    no classes, all count as one class. So no two clients share a test sample, and with many clients the shares
    are small.

    If a client has training samples, but a share smaller than ``least``, it then gets a new share of exactly that size.
    This share is drawn without replacement from the test samples of the client's classes, in proportion to its training
    samples. It may have samples that are in other clients' shares, too. If a class has too few, more are drawn from the
    client's other classes. Shares that the source determines are not replaced.

    Raises :class:`UserError` if a client with training samples can't have ``least`` test samples.
    """
    if data.test_indices is not None:
        sizes = {client: len(data.client_test(client)) for client in np.flatnonzero(data.sizes()).tolist()}
        client = min(sizes, key=lambda client: sizes[client])
        if sizes[client] < least:
            raise UserError(
                f"data.least_test_samples={least}, but the data say which test samples are whose, and client {client} "
                f"has {sizes[client]}"
            )
        return data
    split = _partition_by_class(data, seed)
    pools = class_pools(data.labels.test, data.labels.classes)
    for client in np.flatnonzero(data.sizes()).tolist():
        if len(split[client]) < least:
            split[client] = _draw_share(data, client, pools, seed, least)
    indices, offsets = indices_and_offsets(split)
    return replace(data, test_indices=indices, test_offsets=offsets)


def _partition_by_class(data: FederatedData, seed: int) -> Split:
    """Partitions the test samples of each class among the clients.

    Each client's part is in proportion to the number of training samples that it holds of the class.
    """
    rng = stream(seed, Purpose.PARTITION, 1)
    clients = data.clients
    holder = np.repeat(np.arange(clients), data.sizes())
    labels = data.labels
    held = class_pools(labels.train[data.indices], labels.classes)
    owner = np.full(len(labels.test), -1)
    for samples, tests in zip(held, class_pools(labels.test, labels.classes), strict=True):
        counts = np.bincount(holder[samples], minlength=clients)
        if len(samples) and len(tests):
            order = rng.permutation(clients)
            share = largest_remainder(counts[order] * (len(tests) / len(samples)), len(tests))
            owner[rng.permutation(tests)] = np.repeat(order, share)
    return by_owner(owner, clients)


def _draw_share(data: FederatedData, client: int, pools: Split, seed: int, size: int) -> np.ndarray:
    """Draws a share of ``size`` test samples for a client, and returns their sorted indices.

    ``pools`` are the indices of the test samples of each class.
    """
    rng = stream(seed, Purpose.EVALUATION, 1, client)
    labels = data.labels
    counts = np.bincount(labels.train[data.client(client)], minlength=labels.classes)
    classes = rng.permutation(np.flatnonzero(counts))
    supply = np.array([len(pools[c]) for c in classes])
    if supply.sum() < size:
        raise UserError(
            f"data.least_test_samples={size}, but the test set has only {supply.sum()} samples of the classes that "
            f"client {client} holds"
        )
    taken = np.zeros(len(classes), np.int64)
    while left := size - taken.sum():
        weights = np.where(taken < supply, counts[classes], 0)
        taken = np.minimum(supply, taken + largest_remainder(weights * (left / weights.sum()), left))
    chosen = [rng.choice(pools[c], count, replace=False) for c, count in zip(classes, taken, strict=True)]
    return np.sort(np.concatenate(chosen))


def draw_eval_clients(data: FederatedData, seed: int, wanted: int | Literal["all"]) -> np.ndarray:
    """Draws the clients that are scored one by one (``run.eval_clients``), and returns their sorted numbers, int64.

    The draw is among the clients that hold samples, and ``wanted`` is the number of clients to draw, or ``all``. It
    depends on ``seed`` alone. Raises :class:`UserError` if fewer clients hold samples.
    """
    present = np.flatnonzero(data.sizes())
    if wanted == "all":
        return present
    if wanted > len(present):
        raise UserError(f"run.eval_clients={wanted} is more than the {len(present)} clients that have samples; use all")
    return np.sort(stream(seed, Purpose.EVALUATION).choice(present, wanted, replace=False))
