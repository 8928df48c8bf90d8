"""Heads with a part that predicts what other models make of a sample."""

from __future__ import annotations

from torch import nn


class Predicting(nn.Module):
    """A head with a ``predictor`` of what enters its ``classifier``. The predictor is run only if a loss may ask for
    it."""

    predictor: nn.Module
    classifier: nn.Linear


def predicting_head(module: nn.Module) -> Predicting | None:
    """Returns the head with a predictor within ``module``, or None."""
    return next((m for m in module.modules() if isinstance(m, Predicting)), None)
