"""The base class of rules that put the uploads of a cohort together."""

from __future__ import annotations

import torch
from torch import Tensor


class Rule:
    """The base class of rules that take the place of the mean of clients' uploads (``train.aggregation``). The options
    of a rule, which are the arguments of its class, are the keys of ``train.aggregation`` besides ``kind``, or
    ``train.aggregation.options`` of a user-defined one.

    What a rule returns may depend on its arguments alone: it must not store anything from round to round
    (:attr:`keeps`). It may draw from torch's, Python's and NumPy's global generators, which are seeded by ``run.seed``
    and the round. :class:`fedray.testing.RuleContract` tests a rule.

    Attributes:
        keeps: Whether the rule needs what it returned in the round before.
        weighs: Whether clients count by their weights (``train.weighting``).

    Example:
        class Shortest(Rule):
            def __call__(self, rows, weights, before):
                return rows[rows.norm(dim=1).argmin()]
    """

    keeps = False
    weighs = False

    def least(self) -> int:
        """Returns the size of the smallest cohort for which the rule is defined."""
        return 1

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        """Returns what the server uses in place of the mean, float32 ``[d]``.

        Args:
            rows: The uploads u_i of the m clients of the cohort, float32 ``[m, d]``: updates y_i - x of a model, or
                vectors. They may be overwritten. Zeros fill them up to a multiple of 64 bytes.
            weights: The aggregation weights p_i, float32 ``[m]``, which sum to 1.
            before: What the rule returned in the round before, ``[d]``, for a rule that ``keeps`` it; None in the first
                round.
        """
        raise NotImplementedError


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Returns the sum of ``rows [m, d]``, each times its number in ``weights [m]``, added up in double precision, row
    by row, float32 ``[d]``."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for weight, row in zip(weights.double(), rows, strict=True):
        total += weight * row.double()
    return total.float()


def bounded(rows: Tensor) -> Tensor:
    """Returns which of ``rows [m, d]`` have only finite numbers, bool ``[m]``, and sets the others to 0 in place, so
    that a client that sends anything else has no say."""
    usable = torch.stack([row.isfinite().all() for row in rows])
    rows[~usable] = 0
    return usable


def lengths(rows: Tensor) -> Tensor:
    """Returns the lengths of ``rows [m, d]``, added up in double precision, float32 ``[m]``."""
    return torch.stack([row.double().norm() for row in rows]).float()
