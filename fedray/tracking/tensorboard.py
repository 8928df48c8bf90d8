"""Writes the TensorBoard events of a run, without TensorFlow."""

from __future__ import annotations

import math
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedray.tracking.columns import tag
from fedray.util.files import move_whole

BOTH_WAYS = ("bytes_down", "bytes_up")

SKIPPED = ("round", "iterations", "cohort_size")


def declare_columns(folder: Path, keys: Sequence[str], columns: Sequence[str]) -> None:
    """Writes an event file that declares the columns of TensorBoard's HParams table for the runs of a sweep.

    ``folder`` contains the folders of the runs. ``keys`` are the hyper-parameters, and ``columns`` are columns of
    metrics.csv that are shown beside them; ``bytes`` stands for ``bytes_down`` and ``bytes_up``. If ``folder`` already
    has an event file, nothing is written.
    """
    if any(folder.glob("events.out.tfevents.*")):
        return
    _without_tensorflow()
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from torch.utils.tensorboard.writer import FileWriter

    tags = [tag(name) for column in columns for name in (BOTH_WAYS if column == "bytes" else (column,))]
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=key) for key in keys],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in tags],
    )
    data = plugin_data_pb2.HParamsPluginData(experiment=experiment, version=metadata.PLUGIN_DATA_VERSION)
    value = Summary.Value(
        tag=metadata.EXPERIMENT_TAG, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    # the file is written elsewhere and then renamed, so that it is never incomplete
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        writer: Any = FileWriter(scratch)
        writer.add_summary(Summary(value=[value]))
        writer.close()
        for path in Path(scratch).iterdir():
            move_whole(path, folder / path.name)


def _without_tensorflow() -> None:
    """Keeps the package tensorboard from importing TensorFlow, which takes seconds.

    If a module named ``notf`` can be imported, tensorboard uses its own file functions instead of TensorFlow's.
    """
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))


class Events:
    """Writes the TensorBoard event file of a run into ``folder``. The run continues after round ``after``, which is 0
    for a new run.

    An interrupted run may have written events of rounds beyond ``after`` already. When it is resumed, these rounds are
    made again, and TensorBoard does not show the old events.
    """

    def __init__(self, folder: Path, after: int) -> None:
        _without_tensorflow()
        from torch.utils.tensorboard import SummaryWriter

        # a run that has gone back to its beginning has events of rounds that are made again, too
        again = after or any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if again else None, flush_secs=10)

    def round(self, row: Mapping[str, Any], clients: Mapping[str, Any], histograms: bool) -> None:
        """Writes the numbers of a round, ``row``, which is its row of metrics.csv by column, as TensorBoard scalars.

        Those of evaluated models are written once more with the virtual seconds as their time, if there is a virtual
        clock. ``clients`` has, by column, a list with a value for each client of the round. With ``histograms``, a
        histogram of each list is written as well.
        """
        step, virtual = int(row["round"]), row.get("virtual_seconds")
        for name, value in row.items():
            if name not in SKIPPED and value is not None and math.isfinite(value):
                self._writer.add_scalar(tag(name), value, step)
                if virtual is not None and tag(name).startswith(("accuracy/", "loss/", "metrics/")):
                    self._writer.add_scalar(f"virtual_time/{tag(name)}", value, step, walltime=float(virtual))
        if histograms:
            import numpy as np

            for name, values in clients.items():
                # TensorBoard's histograms end at 1e20
                drawn = np.asarray([v for v in values if v is not None and abs(v) < 1e20], dtype=np.float64)
                if len(drawn):
                    self._writer.add_histogram(f"clients/{name}", drawn, step)

    def profile(self, step: int, seconds: Mapping[str, float]) -> None:
        """Writes how many seconds round ``step`` spent on each purpose as TensorBoard scalars.

        ``seconds`` has the seconds of each purpose, such as ``gradient``.
        """
        for purpose, value in seconds.items():
            self._writer.add_scalar(f"profile/{purpose}", value, step)

    def end(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Writes the run's row of TensorBoard's HParams table at the end of the run: its settings ``values`` and its
        final ``metrics``, each by name."""
        from torch.utils.tensorboard import summary as summaries

        hparams: Any = summaries.hparams
        typed = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }
        writer: Any = self._writer.file_writer
        # the first summary is left out: it declares the columns, which declare_columns does once for all runs
        for summary in hparams(typed, dict(metrics))[1:]:
            writer.add_summary(summary)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value)
        self.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
