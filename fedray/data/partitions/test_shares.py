"""Gives each client a test share, which are the test samples on which models are scored for this client, and draws the
clients for which that is done (``run.eval_clients``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.data.partitions.splits import Split, by_owner, class_pools, indices_and_offsets, largest_remainder
from fedray.errors import UserError


def with_test_shares(data: FederatedData, seed: int, least: int = 0) -> FederatedData:
    """Gives each client a test share: the samples of the test set on which models are scored for this client.

    If the data set says which client each test sample belongs to, ``data`` already has these shares and is returned
    unchanged. Otherwise the test samples of each class are partitioned among the clients, in proportion to their
    training samples of that class (rounded by largest remainder, ties broken at random). Test samples are in no share
    if no client has their class. If samples have no classes, all count as one class. In this way two clients never
    share a test sample, and with many clients the shares are small.

    If a client has training samples, but its share is smaller than ``least``, it gets a new share of exactly that size.
    The new share is drawn without replacement from the test samples of the client's classes, in proportion to its
    training samples, and may overlap with other shares. If a class has too few, more are drawn from the client's other
    classes.

    Args:
        data: the partitioned data set.
        seed: the seed of all draws.
        least: the smallest allowed size of a share (``data.least_test_samples``); 0 for no limit.

    Returns:
        ``data``, with the shares as ``test_indices`` and ``test_offsets``.

    Raises:
        UserError: a client with training samples can't have ``least`` test samples.
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
    """Draws the clients on whose test shares models are scored, client by client (``run.eval_clients``).

    Only clients with training samples in ``data`` are drawn. ``wanted`` is how many, or ``all``. The draw depends on
    ``seed``, but not on the algorithm or the round. Returns the clients' sorted numbers, int64. Raises
    :class:`UserError` if ``wanted`` is larger than the number of clients with training samples.
    """
    present = np.flatnonzero(data.sizes())
    if wanted == "all":
        return present
    if wanted > len(present):
        raise UserError(f"run.eval_clients={wanted} is more than the {len(present)} clients that have samples; use all")
    return np.sort(stream(seed, Purpose.EVALUATION).choice(present, wanted, replace=False))
