"""Hyper-parameter search: :func:`tune` tries values of hyper-parameters. Ray Tune runs the trials, and Optuna records
them.

:func:`tune` is imported when it is first used, so that the command line answers before Optuna and Ray have loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedray.tuning.driver import SweepResult, tune

__all__ = ["SweepResult", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedray.tuning' has no attribute {name!r}")
    return getattr(importlib.import_module("fedray.tuning.driver"), name)
