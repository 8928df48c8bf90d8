"""Partitions a data set among clients with shares that are drawn from Dirichlet distributions.

:func:`dirichlet` draws how each class is divided among the clients. :func:`dirichlet_fixed` draws, for each client, the
shares of the classes in its samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedray.config import ALPHA, MIN_SAMPLES
from fedray.data.partitions.skew import Note, equal_share, ignore_note, overlap_share
from fedray.data.partitions.splits import Split, by_owner, class_pools, partition_by_counts
from fedray.errors import UserError

MAX_DRAWS = 1000
"""The number of draws after which :func:`dirichlet` gives up if some client always has fewer than ``min_samples``
samples."""
BALANCE_DRAWS = 100
"""The number of capped draws from which ``rebalanced`` takes the most even one, as in GHBM's repository."""


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    alpha: float = ALPHA,
    capped: bool = False,
    rebalanced: bool = False,
    min_samples: int = MIN_SAMPLES,
    warn: Note = ignore_note,
) -> Split:
    """Partitions the samples of each class among the clients in shares q ~ Dir(alpha 1_N), so the clients' sizes vary.

    There are three variants, for n samples and N clients:

    * Neither ``capped`` nor ``rebalanced``, as in pFedMo and FL-bench.
    * ``capped``, as in MOON and NIID-Bench: the classes are partitioned one after another, and a client that already
      has n/N samples gets none of the later classes.
    * ``rebalanced``, as in GHBM's code: :data:`BALANCE_DRAWS` capped partitions are drawn, and the one whose clients'
      sizes have the smallest standard deviation is taken. Clients with more than floor(n/N) samples then give random
      samples to those with fewer, so that all clients have the same number. Samples that are left over are not used,
      and ``warn`` tells the user how many.

    Without ``rebalanced``, the draw is repeated until every client has at least ``min_samples`` samples. Raises
    :class:`UserError` if there are too few samples for that, or if :data:`MAX_DRAWS` draws are not enough.

    ``labels`` int64 [n] has the class of each sample, a number below ``classes``. Returns the sorted indices of each
    client's samples, a list of int64 arrays.
    """
    supply = np.bincount(labels, minlength=classes)
    if rebalanced:
        draws = (_counts(supply, clients, alpha, True, rng) for _ in range(BALANCE_DRAWS))
        counts = min(draws, key=lambda counts: counts.sum(axis=1).std())
        return _rebalance(partition_by_counts(labels, counts, rng), len(labels), rng, warn)
    if clients * min_samples > len(labels):
        raise UserError(
            f"dirichlet: {len(labels)} samples can't give data.clients={clients} at least {min_samples} each: lower "
            f"data.clients or data.partition.min_samples (0 allows clients without samples)"
        )
    best = -1
    for _ in range(MAX_DRAWS):
        counts = _counts(supply, clients, alpha, capped, rng)
        best = max(best, int(counts.sum(axis=1).min()))
        if best >= min_samples:
            return partition_by_counts(labels, counts, rng)
    few = f"fewer than {min_samples} samples (at best the smallest had {best})"
    lack = "no samples" if min_samples == 1 else few
    raise UserError(
        f"dirichlet: in {MAX_DRAWS} draws some client always had {lack}: raise data.partition.alpha={alpha:g}, lower "
        f"data.clients={clients} or set data.partition.min_samples (0 allows clients without samples)"
    )


def _counts(supply: np.ndarray, clients: int, alpha: float, capped: bool, rng: np.random.Generator) -> np.ndarray:
    """Draws the number of samples of each client and class, int64 [clients, classes].

    The samples of class c are cut at floor(cumsum(q) * supply[c]), where q are the clients' shares of the class.
    """
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    cap = supply.sum() / clients
    for c, size in enumerate(supply):
        q = _shares(np.full(clients, alpha), rng)
        if capped:
            open_ = q * (sizes < cap)
            # every client with a share is full: the papers' code divides 0 by 0 here; this class is cut without a cap
            q = open_ if open_.any() else q
        ends = np.cumsum(q)
        counts[:, c] = np.diff(np.floor(ends / ends[-1] * size), prepend=0)
        sizes += counts[:, c]
    return counts


def _shares(alpha: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws q ~ Dir(alpha).

    If alpha is so small that all the gamma draws behind q underflow, q is the limit for small alpha: one random entry
    is 1 and all others are 0.
    """
    q = rng.dirichlet(alpha)
    if not np.isfinite(q).all() or not q.any():
        q = np.zeros(len(alpha))
        q[rng.choice(len(alpha), p=alpha / alpha.sum())] = 1
    return q


def _rebalance(split: Split, total: int, rng: np.random.Generator, warn: Note) -> Split:
    clients = len(split)
    n = total // clients
    owner = np.full(total, -1)
    for i, indices in enumerate(split):
        owner[rng.permutation(indices)[:n]] = i
    lacking = n - np.bincount(owner[owner >= 0], minlength=clients)
    pool = rng.permutation(np.flatnonzero(owner < 0))
    owner[pool[: lacking.sum()]] = np.repeat(np.arange(clients), lacking)
    if total > clients * n:
        warn(f"dirichlet, rebalanced: {total - clients * n} of {total} samples are not used")
    return by_owner(owner, clients)


def dirichlet_fixed(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    alpha: float = ALPHA,
    prior: Sequence[float] | None = None,
    samples_per_client: int | None = None,
    overlap: bool = False,
    same_draw: bool = False,
) -> Split:
    """Gives all clients equally many samples, with class shares q_i ~ Dir(alpha * prior) drawn for each client i.

    This is the method of Hsu et al. (2019, arXiv:1909.06335). ``prior``, a number for each class, is scaled to mean 1,
    so that a uniform prior (None) gives Dir(alpha 1_C) for C classes, as in FedDyn's and Plato's code. The clients take
    turns in random order, and take one sample in each turn, of a class drawn by q_i. If no sample of this class is
    left, another class is drawn by q_i, or uniformly if q_i is 0 for all classes that are left (FedDyn's repository
    never ends then).

    With ``overlap``, as in Plato and hence in FedTrip, clients may share samples: every client draws from the whole set
    without replacement, a sample of class c with weight q_i[c]. With ``same_draw``, as in Plato's code, all clients
    draw with the same random numbers, so that clients with similar q_i have mostly the same samples.

    ``labels`` int64 [n] has the class of each sample, a number below ``classes``. ``samples_per_client`` is each
    client's number of samples. None stands for n / ``clients``, rounded down, and is refused with ``overlap``. Returns
    the sorted indices of each client's samples, a list of int64 arrays. Raises :class:`UserError` if there are not
    enough samples, or if ``prior`` does not fit the classes.
    """
    q = _profiles(clients, classes, alpha, prior, rng)
    if overlap:
        n = overlap_share(len(labels), samples_per_client)
        if same_draw:
            # the n shortest exponential waiting times, as in _draw_weighted
            times = rng.standard_exponential(len(labels))
            return [np.sort(np.argpartition(times / shares[labels], n - 1)[:n]) for shares in q]
        pools = class_pools(labels, classes)
        return [_draw_weighted(pools, shares, n, rng) for shares in q]
    n = equal_share(len(labels), clients, samples_per_client)
    # samples are assigned one after another: `client[s]` gets the s-th, which is of class `chosen[s]`
    client = rng.permuted(np.tile(np.arange(clients), (n, 1)), axis=1).ravel()
    chosen = _choose(q, client, np.bincount(labels, minlength=classes), rng)
    counts = np.bincount(client * classes + chosen, minlength=clients * classes).reshape(clients, classes)
    return partition_by_counts(labels, counts, rng)


def _profiles(
    clients: int, classes: int, alpha: float, prior: Sequence[float] | None, rng: np.random.Generator
) -> np.ndarray:
    """Draws the class shares q [clients, classes] of all clients, one row for each client.

    Entries of 0, from the prior or from underflow, become 1e-200. So no sum of weights is 0, and these classes are
    drawn uniformly when a client's other classes have run out. Raises :class:`UserError` if ``prior`` does not fit
    the classes.
    """
    weights = np.ones(classes) if prior is None else np.asarray(prior, dtype=np.float64)
    if len(weights) != classes:
        raise UserError(f"data.partition.prior has {len(weights)} numbers for {classes} classes; give one each")
    if not weights.any():
        raise UserError("data.partition.prior is 0 for every class; at least one must be above 0")
    q = np.zeros((clients, classes))
    concentration = alpha * weights[weights > 0] / weights.mean()
    q[:, weights > 0] = rng.dirichlet(concentration, size=clients)
    for i in np.flatnonzero(~np.isfinite(q).all(axis=1) | ~q.any(axis=1)):
        q[i] = 0
        q[i, weights > 0] = _shares(concentration, rng)
    return np.maximum(q, 1e-200)


def _choose(q: np.ndarray, client: np.ndarray, supply: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the class of each sample in the order in which samples are assigned to clients.

    Entry s is drawn by the shares q of ``client[s]`` among the classes that are left. The result has the distribution
    of drawing one sample after another, but all are drawn at once. Then the class that runs out first is removed, the
    samples that it lacks are drawn again from the other classes, and so on.
    """
    left = supply > 0
    chosen = _draw(q, left, client, rng)
    while len(over := np.flatnonzero(np.bincount(chosen, minlength=len(supply)) > supply)):
        # the samples by class, and within a class in the order in which they are assigned
        order = np.argsort(chosen, kind="stable")
        starts = np.searchsorted(chosen, over, sorter=order)
        first = np.argmin(order[starts + supply[over]])
        c = over[first]
        late = order[starts[first] + supply[c] : np.searchsorted(chosen, c, "right", sorter=order)]
        left[c] = False
        chosen[late] = _draw(q, left, client[late], rng)
    return chosen


def _draw(q: np.ndarray, left: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws a class for each of ``rows``, which are numbers of clients, by the weights q[row] of the classes that
    are ``left``.

    A uniform number is looked up in the cumulative sums of the weights.
    """
    # numpy sorts numbers of 16 bits by a radix sort, which is faster
    drawn = np.empty(len(rows), dtype=np.uint16 if len(left) < 2**16 else np.int64)
    block = max(1, 2**20 // len(left))  # bounds the memory of the functions
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        ends = np.cumsum(q[part] * left, axis=1)
        point = rng.random(len(part)) * ends[:, -1]
        drawn[start : start + block] = (point[:, None] >= ends).sum(axis=1)
    return drawn


def _draw_weighted(pools: Split, q: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draws ``n`` samples without replacement, where each sample of class c has the weight q[c], and returns their
    sorted indices.

    If each sample gets an exponential waiting time with its weight as the rate, then the n samples with the shortest
    times are such a draw (Efraimidis and Spirakis 2006). All samples of a class have the same rate q, so the gaps
    between their sorted times are exponential with rates q k, q (k-1), ... for k samples. That gives the n shortest
    times of each class without a draw for every sample.
    """
    supply = np.array([len(pool) for pool in pools])
    waiting = supply[:, None] - np.arange(min(n, supply.max()))
    rate = q[:, None] * np.maximum(waiting, 0)
    with np.errstate(divide="ignore"):
        arrival = np.cumsum(rng.standard_exponential(rate.shape) / rate, axis=1)
    earliest = np.argpartition(arrival, n - 1, axis=None)[:n] // arrival.shape[1]
    counts = np.bincount(earliest, minlength=len(pools))
    drawn = [
        pool[rng.choice(len(pool), count, replace=False, shuffle=False)]
        for pool, count in zip(pools, counts, strict=True)
        if count
    ]
    return np.sort(np.concatenate(drawn))
