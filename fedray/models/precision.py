"""Finds out whether this machine can train a model in lower precision, by a trial step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.loop_network import LoopNetwork
from fedray.core.seeds import Purpose, torch_rng
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.errors import first_line


def precision_obstacle(module: nn.Module, task: Task, precision: str, x: Any, y: Tensor) -> str | None:
    """Returns the reason why processors like this one can't train ``module`` in ``precision``, or None if they can.

    ``x [b, ...]`` and ``y [b, ...]`` are samples of the data. Not every kernel of PyTorch exists for every type on
    every processor: that of LSTMs is missing in fp16, for example.
    """
    network = LoopNetwork(copied(module), task, precision=precision)
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    with torch_rng(0, Purpose.DROPOUT):
        try:
            network.gradients(network.loaded().rows(1), batch)
        except RuntimeError as error:
            return first_line(error)
    return None
