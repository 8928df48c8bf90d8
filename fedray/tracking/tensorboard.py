"""TensorBoard events of a run, under our own names and without TensorFlow."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAGS = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/test",
    "validation_accuracy": "accuracy/validation",
    "personalized_accuracy": "accuracy/personalized",
    "representation_accuracy": "accuracy/representation",
    "bytes_down": "cost/bytes_down",
    "bytes_up": "cost/bytes_up",
    "flops": "cost/flops",
    "virtual_seconds": "time/virtual_seconds",
    "round_seconds": "time/round_seconds",
    "wall_seconds": "time/wall_seconds",
}
"""The tag of each column of metrics.csv; a user's metrics are ``metrics/<name>``."""

SKIPPED = ("round", "iterations", "cohort_size")


class Events:
    """The event file of a run, written from round ``after`` + 1 on: later events of an earlier try are purged."""

    def __init__(self, folder: Path, after: int) -> None:
        # tensorboard takes its own file layer if this name can be imported, and TensorFlow's (seconds to load) if not
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None, flush_secs=10)

    def round(self, row: Mapping[str, Any], clients: Mapping[str, Any], histograms: bool) -> None:
        """The scalars of a round, and histograms over its clients."""
        step = int(row["round"])
        for name, value in row.items():
            if name not in SKIPPED and value is not None and math.isfinite(value):
                self._writer.add_scalar(TAGS.get(name, f"metrics/{name}"), value, step)
        if histograms:
            import numpy as np

            for name, values in clients.items():
                # the bins of a histogram end at 1e20
                drawn = np.asarray([v for v in values if v is not None and abs(v) < 1e20], dtype=np.float64)
                if len(drawn):
                    self._writer.add_histogram(f"clients/{name}", drawn, step)

    def profile(self, step: int, seconds: Mapping[str, float]) -> None:
        """What the time of a round went into."""
        for purpose, value in seconds.items():
            self._writer.add_scalar(f"profile/{purpose}", value, step)

    def hyper_parameters(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """The HParams entry of the run: its settings, typed, and its final metrics."""
        from torch.utils.tensorboard.summary import hparams

        typed = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }
        writer: Any = self._writer.file_writer
        for summary in hparams(typed, dict(metrics)):
            writer.add_summary(summary)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
