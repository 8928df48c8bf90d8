"""fedray: federated learning simulated at scale on Ray.

The public names are imported when they are first used, so that the command line answers before torch has loaded.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fedray.util.loading import load_torch

if TYPE_CHECKING:
    from fedray.api import simulate
    from fedray.core.transform import each_sample
    from fedray.core.upload import UploadRows, UploadStep
    from fedray.engine.callbacks import Callback, Report, RunStart
    from fedray.errors import ClientError, ServerError, UserError
    from fedray.evaluating.evaluate import evaluate
    from fedray.evaluating.tables import Evaluation
    from fedray.results.compare import Comparison, compare
    from fedray.simulation import Simulation
    from fedray.tracking.result import RunResult
    from fedray.tuning import SweepResult, tune
    from fedray.tuning.many import ManyRuns, simulate_many
    from fedray.warning import FedrayWarning

_HOME = {
    "Callback": "engine.callbacks", "ClientError": "errors", "Comparison": "results.compare",
    "Evaluation": "evaluating.tables", "FedrayWarning": "warning", "ManyRuns": "tuning.many",
    "Report": "engine.callbacks", "RunResult": "tracking.result", "RunStart": "engine.callbacks",
    "ServerError": "errors", "Simulation": "simulation", "SweepResult": "tuning", "UploadRows": "core.upload",
    "UploadStep": "core.upload", "UserError": "errors", "compare": "results.compare",
    "each_sample": "core.transform", "evaluate": "evaluating.evaluate", "simulate": "api",
    "simulate_many": "tuning.many", "tune": "tuning",
}  # fmt: skip

__all__ = [
    "Callback", "ClientError", "Comparison", "Evaluation", "FedrayWarning", "ManyRuns", "Report", "RunResult",
    "RunStart", "ServerError", "Simulation", "SweepResult", "UploadRows", "UploadStep", "UserError",
    "compare", "each_sample", "evaluate", "simulate", "simulate_many", "tune",
]  # fmt: skip


__version__ = "0.2.0"


if "RAY_RAYLET_PID" in os.environ:
    # this is a Ray process, and everything that such a process does with fedray needs torch
    from fedray.engine.environment import enter_ray_process

    enter_ray_process()
    load_torch()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedray.{_HOME[name]}"), name)
