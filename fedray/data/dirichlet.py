"""The Dirichlet partitioners: shares of the clients in each class (8.3), and of the classes in each client (8.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedray.config import ALPHA, MIN_SAMPLES
from fedray.data.deal import Split, by_owner, class_pools, deal
from fedray.data.skew import Note, equal_share, ignore_note, overlap_share
from fedray.errors import UserError

MAX_DRAWS = 1000
"""How often :func:`dirichlet` draws before it gives up on ``min_samples``."""
BALANCE_DRAWS = 100
"""GHBM's repository: of so many capped draws the one with the least deviation of sizes is rebalanced."""


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
    note: Note = ignore_note,
) -> Split:
    """8.3: the samples of each class are cut among the clients in shares q ~ Dir(alpha 1_N); sizes vary too.

    Plain is pFedMo's and FL-bench's. ``capped`` (MOON, NIID-Bench): clients that have n/N samples get no more, class
    after class. Both are drawn again until every client has ``min_samples``, :data:`MAX_DRAWS` times at most.
    ``rebalanced`` (GHBM's code): the most even of :data:`BALANCE_DRAWS` capped draws; clients above floor(n/N) then
    return random samples, which those below take, so that all are equal.
    """
    supply = np.bincount(labels, minlength=classes)
    if rebalanced:
        draws = (_counts(supply, clients, alpha, True, rng) for _ in range(BALANCE_DRAWS))
        counts = min(draws, key=lambda counts: counts.sum(axis=1).std())
        return _rebalance(deal(labels, counts, rng), len(labels), rng, note)
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
            return deal(labels, counts, rng)
    raise UserError(
        f"dirichlet: in {MAX_DRAWS} draws some client always had fewer than {min_samples} samples (at best "
        f"the smallest had {best}): raise data.partition.alpha={alpha:g}, lower data.clients={clients} or set "
        f"data.partition.min_samples (0 allows clients without samples)"
    )


def _counts(supply: np.ndarray, clients: int, alpha: float, capped: bool, rng: np.random.Generator) -> np.ndarray:
    """One draw of counts [clients, classes]: class c cut at floor(cumsum(q) * supply[c])."""
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    cap = supply.sum() / clients
    for c, size in enumerate(supply):
        q = _shares(np.full(clients, alpha), rng)
        if capped:
            open_ = q * (sizes < cap)
            # every client with a share is full: 0/0 in the reference, plain here
            q = open_ if open_.any() else q
        ends = np.cumsum(q)
        counts[:, c] = np.diff(np.floor(ends / ends[-1] * size), prepend=0)
        sizes += counts[:, c]
    return counts


def _shares(alpha: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """q ~ Dir(alpha); one-hot at random, the limit of small alpha, where all its gamma draws underflow."""
    q = rng.dirichlet(alpha)
    if not np.isfinite(q).all() or not q.any():
        q = np.zeros(len(alpha))
        q[rng.choice(len(alpha), p=alpha / alpha.sum())] = 1
    return q


def _rebalance(split: Split, total: int, rng: np.random.Generator, note: Note) -> Split:
    clients = len(split)
    n = total // clients
    owner = np.full(total, -1)
    for i, indices in enumerate(split):
        owner[rng.permutation(indices)[:n]] = i
    lacking = n - np.bincount(owner[owner >= 0], minlength=clients)
    pool = rng.permutation(np.flatnonzero(owner < 0))
    owner[pool[: lacking.sum()]] = np.repeat(np.arange(clients), lacking)
    if total > clients * n:
        note(f"dirichlet, rebalanced: {total - clients * n} of {total} samples are not used")
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
) -> Split:
    """8.4 (Hsu et al. 2019): client i draws q_i ~ Dir(alpha * prior) and takes its n samples by class from q_i.

    ``prior`` is scaled to mean 1, so that a uniform one gives Dir(alpha 1_C), as in FedDyn's and Plato's code. Samples
    are dealt in rounds, the clients in random order; a client whose class has run out redraws among the others by
    q_i, or uniformly if q_i has none of them (FedDyn's repository redraws for ever there). With ``overlap`` (Plato,
    hence FedTrip) every client draws from the whole set without replacement, a sample of class c with weight q_i[c].
    """
    q = _profiles(clients, classes, alpha, prior, rng)
    if overlap:
        n = overlap_share(len(labels), samples_per_client)
        pools = class_pools(labels, classes)
        return [_draw_weighted(pools, shares, n, rng) for shares in q]
    n = equal_share(len(labels), clients, samples_per_client)
    # slot s is the s-th sample to be dealt
    client = rng.permuted(np.tile(np.arange(clients), (n, 1)), axis=1).ravel()
    chosen = _choose(q, client, np.bincount(labels, minlength=classes), rng)
    counts = np.bincount(client * classes + chosen, minlength=clients * classes).reshape(clients, classes)
    return deal(labels, counts, rng)


def _profiles(
    clients: int, classes: int, alpha: float, prior: Sequence[float] | None, rng: np.random.Generator
) -> np.ndarray:
    """q [clients, classes], every row one draw; classes of prior 0 (or underflow) keep 1e-200.

    So they serve, uniformly, when a client's other classes have run out, and no sum of weights is 0.
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
    """The class of each slot, drawn from q[client of the slot] among the classes that then have samples left.

    The same as drawing slot after slot, but all at once: a class is struck out where it runs out, earliest first, and
    only the slots that it would have served from there on are drawn again.
    """
    left = supply > 0
    chosen = _draw(q, left, client, rng)
    while len(over := np.flatnonzero(np.bincount(chosen, minlength=len(supply)) > supply)):
        # the slots by class, and in each class in the order in which they are dealt
        order = np.argsort(chosen, kind="stable")
        starts = np.searchsorted(chosen, over, sorter=order)
        first = np.argmin(order[starts + supply[over]])
        c = over[first]
        late = order[starts[first] + supply[c] : np.searchsorted(chosen, c, "right", sorter=order)]
        left[c] = False
        chosen[late] = _draw(q, left, client[late], rng)
    return chosen


def _draw(q: np.ndarray, left: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One class for each of ``rows``: by q[row] among those ``left``, inverting the distribution function."""
    # 16 bits make the sort above a radix sort
    drawn = np.empty(len(rows), dtype=np.uint16 if len(left) < 2**16 else np.int64)
    block = max(1, 2**20 // len(left))  # bounds the memory of the functions
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        ends = np.cumsum(q[part] * left, axis=1)
        point = rng.random(len(part)) * ends[:, -1]
        drawn[start : start + block] = (point[:, None] >= ends).sum(axis=1)
    return drawn


def _draw_weighted(pools: Split, q: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` indices without replacement, one of class c with weight q[c] each.

    Successive weighted draws are the n earliest arrivals of exponential clocks with the weights as rates (Efraimidis
    and Spirakis 2006). Of k clocks of equal rate the gaps between arrivals are exponential with rate q k, q (k-1), ...
    so that only the first n of each class are needed, and no clock per sample.
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
