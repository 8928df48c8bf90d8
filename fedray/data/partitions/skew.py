"""The partitioners other than the Dirichlet ones (dirichlet.py): functions that decide which client gets which samples.

Each is a pure function of the labels, int64 [n], the number of clients, a generator and its options, which are named
like their config keys. It returns a sorted int64 array of indices for each client. Clients share no samples unless
``overlap`` is set. ``note`` and ``warn`` are called with lines for the user: ``warn`` if something is not used, or not
done as requested. All raise :class:`UserError` if the data are not sufficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedray.config import CLUSTERS, MIN_SAMPLES
from fedray.data.partitions.splits import (
    Split,
    by_owner,
    class_pools,
    draw_each,
    largest_remainder,
    partition_by_counts,
)
from fedray.errors import UserError

Note = Callable[[str], None]


def ignore_note(_: str) -> None:
    """Ignores a line for the user. It is the default of ``note`` and ``warn``, the functions that partitioners call
    with such lines."""


def equal_share(total: int, clients: int, samples_per_client: int | None) -> int:
    """Returns how many samples each client gets if all get equally many and no two clients share a sample.

    This is ``samples_per_client``, or floor(``total`` / ``clients``) if it is None. ``total`` is the number of samples.
    Raises :class:`UserError` if there are not enough samples.
    """
    if samples_per_client is None:
        return total // clients
    if clients * samples_per_client > total:
        raise UserError(
            f"data.clients={clients} x data.samples_per_client={samples_per_client} is more than the {total} samples "
            f"there are: at most {total // clients} each"
        )
    return samples_per_client


def overlap_share(total: int, samples_per_client: int | None) -> int:
    """Checks ``samples_per_client`` for a partition in which clients may share samples, and returns it.

    ``total`` is the number of samples from which each client draws. Raises :class:`UserError` if ``samples_per_client``
    is None, or larger than ``total``.
    """
    if samples_per_client is None:
        raise UserError("data.partition.overlap needs data.samples_per_client: how many samples each client draws")
    if samples_per_client > total:
        raise UserError(f"data.samples_per_client={samples_per_client} is more than the {total} samples to draw from")
    return samples_per_client


def iid(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    samples_per_client: int | None = None,
    overlap: bool = False,
) -> Split:
    """Shuffles the samples and cuts them into one part for each client. The parts' sizes differ by one at most.

    With ``samples_per_client`` all parts have that size. With ``overlap`` each client instead draws this many samples
    from the whole set, without replacement, and clients may share samples. ``labels`` only says how many samples there
    are. Returns the sorted indices of each client's samples, a list of int64 arrays. Raises :class:`UserError` if there
    are too few samples, or if ``overlap`` is set without ``samples_per_client``.
    """
    total = len(labels)
    if overlap:
        return draw_each(np.arange(total), clients, overlap_share(total, samples_per_client), rng)
    used = total
    if samples_per_client is not None:
        used = clients * equal_share(total, clients, samples_per_client)
    parts = np.array_split(rng.permutation(total)[:used], clients)
    return [np.sort(part) for part in parts]


def label_skew(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    classes_per_client: int | None = None,
    samples_per_client: int | None = None,
    assign: str = "random",
    on_empty: str = "shrink",
    warn: Note = ignore_note,
) -> Split:
    """Gives each client samples of only x = ``classes_per_client`` classes, and equally many of each. pFedMo calls this
    x-class non-i.i.d. data. If x is ``classes``, the number of all classes, the split is i.i.d. in equal parts.

    ``labels`` [n] holds the class of each sample. Each client gets ``samples_per_client`` of them; None stands for
    n / ``clients``, rounded down. ``assign`` says how a client's classes are chosen: ``random`` draws them uniformly,
    as in pFedMo's paper; ``balanced`` gives client i the class i mod ``classes`` and draws the others, as NIID-Bench
    does. ``on_empty`` says what happens if a class has too few samples: with ``shrink`` all clients get fewer samples,
    with ``fill`` a client takes more of its other classes, and with ``error`` :class:`UserError` is raised. It is also
    raised if x is None or impossible, or if there are not enough samples. ``warn`` is called with a line for the user
    if classes or samples are not used. Returns the sorted indices of each client's samples.
    """
    x = classes_per_client
    if x is None:
        raise UserError("data.partition.kind=label_skew needs data.partition.classes_per_client")
    if x > classes:
        raise UserError(f"data.partition.classes_per_client={x} is more than the {classes} classes there are")
    n = equal_share(len(labels), clients, samples_per_client)
    if x == classes:
        return iid(labels, clients, rng, samples_per_client=n)
    if 0 < n < x:
        raise UserError(f"{n} samples per client can't hold data.partition.classes_per_client={x} classes")
    keys = rng.random((clients, classes))
    if assign == "balanced":
        keys[np.arange(clients), np.arange(clients) % classes] = -1
    held = np.argsort(keys, axis=1)[:, :x]
    supply = np.bincount(labels, minlength=classes)
    holders = np.bincount(held.ravel(), minlength=classes)
    if (holders == 0).any():
        unused = ", ".join(map(str, np.flatnonzero(holders == 0)))
        warn(f"label_skew: clients hold {np.count_nonzero(holders)} of {classes} classes; nobody holds {unused}")
    counts = _even_counts(held, n, classes)
    short = np.flatnonzero(counts.sum(axis=0) > supply)
    if len(short):
        c = int(short[np.argmin(supply[short] / holders[short])])
        if on_empty == "fill":
            _fill_up(counts, held, supply, n)
            return partition_by_counts(labels, counts, rng)
        shrunk = int(supply[c] // holders[c]) * x
        reason = f"class {c} has {supply[c]} samples for the {holders[c]} clients that hold it"
        if on_empty == "error" or not shrunk:
            raise UserError(
                f"label_skew: {reason}, too few for {n} samples per client: at most {shrunk} "
                f"(data.samples_per_client), or change data.partition.on_empty, assign or classes_per_client"
            )
        warn(f"label_skew: {reason}; every client has {shrunk} samples instead of {n}")
        counts = _even_counts(held, shrunk, classes)
    return partition_by_counts(labels, counts, rng)


def _even_counts(held: np.ndarray, n: int, classes: int) -> np.ndarray:
    """Returns counts [clients, classes] that divide ``n`` samples of each client evenly among its classes.

    ``held`` [clients, x] has the classes of each client.
    """
    x = held.shape[1]
    counts = np.zeros((len(held), classes), dtype=np.int64)
    np.put_along_axis(counts, held, (n // x + (np.arange(x) < n % x))[None, :], axis=1)
    return counts


def _fill_up(counts: np.ndarray, held: np.ndarray, supply: np.ndarray, n: int) -> None:
    """Lowers the counts of each class to its supply, and replaces the lost samples by others of the client's classes.

    ``counts`` [clients, classes] is changed in place. Raises :class:`UserError` if a client's classes have too
    few samples.
    """
    for c in np.flatnonzero(counts.sum(axis=0) > supply):
        counts[:, c] = largest_remainder(counts[:, c] * (supply[c] / counts[:, c].sum()), supply[c])
    spare = supply - counts.sum(axis=0)
    for i in np.flatnonzero(counts.sum(axis=1) < n):
        lacking = n - counts[i].sum()
        for c in held[i][np.argsort(-spare[held[i]], kind="stable")]:
            extra = min(lacking, spare[c])
            counts[i, c] += extra
            spare[c] -= extra
            lacking -= extra
        if lacking:
            raise UserError(
                f"label_skew: the classes of client {i} run out {lacking} samples short of {n}: "
                f"lower data.samples_per_client, or use data.partition.on_empty=shrink"
            )


def quantity_skew(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    sizes: Sequence[int] | None = None,
    warn: Note = ignore_note,
) -> Split:
    """Gives client i ``sizes[i]`` samples, in the class proportions of the whole set (pFedMo, figure 5).

    If the sizes add up to more samples than there are, all are scaled down in proportion, and ``warn`` is called with a
    line for the user. ``labels`` int64 [n] has the class of each sample, a number below ``classes``. Returns the sorted
    indices of each client's samples, a list of int64 arrays. Raises :class:`UserError` if ``sizes`` is None or does not
    have a number for each client.
    """
    if sizes is None:
        raise UserError("data.partition.kind=quantity_skew needs data.partition.sizes: the samples of each client")
    if len(sizes) != clients:
        raise UserError(f"data.partition.sizes has {len(sizes)} numbers, but data.clients={clients}; give one each")
    total = len(labels)
    wanted = np.asarray(sizes, dtype=np.int64)
    if wanted.sum() > total:
        scaled = largest_remainder(wanted * (total / wanted.sum()), total)
        shown = ", ".join([*map(str, scaled[:8]), *(["..."] if len(scaled) > 8 else [])])
        warn(f"quantity_skew: sizes sum to {wanted.sum()} of {total} samples, scaled to [{shown}]")
        wanted = scaled
    supply = np.bincount(labels, minlength=classes)
    quotas = wanted[:, None] * (supply / total)
    counts = largest_remainder(quotas, wanted)
    over = np.maximum(counts.sum(axis=0) - supply, 0)
    for c in np.repeat(np.arange(classes), over):
        # rounding has assigned one sample of c too many: the client that is most above its quota takes another class
        i = np.argmax(counts[:, c] - quotas[:, c])
        spare = counts.sum(axis=0) < supply
        counts[i, c] -= 1
        counts[i, np.argmax(np.where(spare, quotas[i] - counts[i], -np.inf))] += 1
    return partition_by_counts(labels, counts, rng)


def shards(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    shards_per_client: int = 1,
    samples_per_client: int | None = None,
    warn: Note = ignore_note,
) -> Split:
    """Sorts the samples by label, cuts them into equal shards, and gives each client some of these at random.

    This is the method of McMahan et al. (2017). Each client gets ``shards_per_client`` shards, which have together
    about ``samples_per_client`` samples; None stands for n / ``clients``, rounded down. With one shard per client it is
    GHBM's partition for alpha = 0. Samples within a class are shuffled first. Samples that are left over are not used;
    ``warn`` is called with a line about them. ``labels`` int64 [n] has the class of each sample, a number below
    ``classes``. Returns the sorted indices of each client's samples, a list of int64 arrays. Raises :class:`UserError`
    if there are too few samples.
    """
    n = equal_share(len(labels), clients, samples_per_client)
    size = n // shards_per_client
    if not size:
        raise UserError(
            f"shards: {n} samples per client can't be cut into data.partition.shards_per_client={shards_per_client}"
        )
    order = np.concatenate([rng.permutation(pool) for pool in class_pools(labels, classes)])
    pieces = order[: len(order) // size * size].reshape(-1, size)
    chosen = pieces[rng.permutation(len(pieces))[: clients * shards_per_client]].reshape(clients, -1)
    unused = len(labels) - chosen.size
    if unused:
        warn(f"shards: {unused} of {len(labels)} samples are not used")
    return list(np.sort(chosen, axis=1))


def orthogonal(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    clusters: int = CLUSTERS,
    samples_per_client: int | None = None,
    overlap: bool = False,
    same_draw: bool = False,
    warn: Note = ignore_note,
) -> Split:
    """Divides the clients into clusters that have no class in common: client i is in cluster i mod ``clusters``.

    This partition is from FedTrip and Plato. The classes of a cluster are a contiguous block. Each client draws its
    samples uniformly from those of its cluster's classes, and all clients draw the same number. With ``overlap`` (as in
    Plato) two clients may hold the same sample; without it, they may not. With ``same_draw`` (as in Plato's code) all
    clients of a cluster draw the same samples. If ``samples_per_client`` is None, it is the largest number for which
    every cluster has enough samples; with ``overlap`` it must be set. ``labels`` int64 [n] has the class of each
    sample, a number below ``classes``. ``warn`` is called with a line for the user if classes are not used. Returns the
    sorted indices of each client's samples, a list of int64 arrays. Raises :class:`UserError` if there are too few
    classes or samples.
    """
    if clusters > classes:
        raise UserError(f"data.partition.clusters={clusters} is more than the {classes} classes to divide among them")
    blocks = np.array_split(np.arange(classes), clusters)
    pools = [np.flatnonzero(np.isin(labels, block)) for block in blocks]
    members = np.bincount(np.arange(clients) % clusters, minlength=clusters)
    if clients < clusters:
        warn(f"orthogonal: {clusters} clusters but {clients} clients; classes from {blocks[clients][0]} on are unused")
    split: Split = [np.empty(0, dtype=np.int64)] * clients
    if overlap:
        n = overlap_share(min(map(len, pools[:clients])), samples_per_client)
    else:
        most = min(len(pool) // count for pool, count in zip(pools, members, strict=True) if count)
        n = most if samples_per_client is None else samples_per_client
        if n > most:
            k = next(k for k in range(clusters) if members[k] * n > len(pools[k]))
            raise UserError(
                f"orthogonal: the {members[k]} clients of cluster {k} want {n} samples each, but its classes "
                f"{blocks[k][0]}..{blocks[k][-1]} have {len(pools[k])}: at most {most} (data.samples_per_client), "
                f"or data.partition.overlap=true"
            )
    for k, (pool, count) in enumerate(zip(pools, members, strict=True)):
        if overlap:
            draws = draw_each(pool, min(1, count) if same_draw else count, n, rng)
            split[k::clusters] = draws * count if same_draw else draws
        else:
            split[k::clusters] = list(np.sort(rng.permutation(pool)[: count * n].reshape(count, n), axis=1))
    return split


def natural(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    owners: np.ndarray | None,
    min_samples: int = MIN_SAMPLES,
    max_clients: int | None = None,
    max_samples: int | None = None,
    note: Note = ignore_note,
    warn: Note = ignore_note,
) -> Split:
    """Gives each client the samples that it has in the data, for data sets that come with clients.

    ``owners`` int64 [n] has the client of each sample. Clients with fewer than ``min_samples`` samples are left out.
    ``max_clients`` limits the number of clients and ``max_samples`` the number of samples of each client; None is no
    limit. Where there are more clients or samples, as many as the limit allows are drawn at random. ``note`` and
    ``warn`` are called with lines for the user about what is left out. ``labels`` and ``clients`` are not used. Returns
    the sorted indices of each client's samples, a list of int64 arrays in the order of the clients' numbers. Raises
    :class:`UserError` if ``owners`` is None, or if no client has enough samples.
    """
    if owners is None:
        raise UserError("data.partition.kind=natural needs a source that says whose each sample is (client_train)")
    _, owner, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    kept = sizes >= min_samples
    if not kept.any():
        raise UserError(
            f"natural: no client has data.partition.min_samples={min_samples} samples; at most {sizes.max()}"
        )
    if not kept.all():
        warn(
            f"natural: {np.count_nonzero(~kept)} of {len(kept)} clients have fewer than {min_samples} samples: left out"
        )
    drawn = np.flatnonzero(kept)
    if max_clients is not None and len(drawn) > max_clients:
        note(f"natural: {max_clients} of {len(drawn)} clients are drawn (data.partition.max_clients)")
        drawn = np.sort(rng.permutation(drawn)[:max_clients])
    rank = np.full(len(sizes), -1)
    rank[drawn] = np.arange(len(drawn))
    split = by_owner(rank[owner.ravel()], len(drawn))
    if max_samples is None or sizes[drawn].max() <= max_samples:
        return split
    note(
        f"natural: {np.count_nonzero(sizes[drawn] > max_samples)} clients keep {max_samples} of their samples "
        "(data.partition.max_samples)"
    )
    return [np.sort(rng.permutation(held)[:max_samples]) for held in split]
