"""Hyper-parameter search: spaces, trials that Ray Tune runs, studies that Optuna keeps.

:func:`tune` does all of it. It is imported when it is first used, because Optuna and Ray take time to import and the
command line should answer before.
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
