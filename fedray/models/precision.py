"""Checks ``train.precision``, and tells the user if another precision would be faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedray.config import TrainConfig
from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.precision import TENSOR_CORES
from fedray.core.seeds import Purpose, torch_rng
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.errors import UserError, first_line
from fedray.gradients.loop import LoopNetwork

DOCUMENTED = "see 'Precision on GPUs' in the engine's documentation"
"""Where users can read what each precision gains."""

LEAST_FLOPS = 4e7
"""The smallest number of forward FLOPs of a mini-batch for which a lower precision is suggested. LeNet-5 with
mini-batches of 64 takes 53 million, and TF32 makes it a third faster. Smaller models spend their time launching
kernels."""


def check_precision(precision: str, device: str, module: nn.Module, name: str, task: Task, x: Any, y: Tensor) -> None:
    """Checks that a model can be trained in a numeric precision, by computing a trial gradient in it. On a GPU nothing
    is checked.

    Args:
        precision: A value of ``train.precision``.
        device: Where clients are trained, ``cpu`` or ``cuda``.
        module: The model.
        name: The model's name in error messages.
        task: The task, whose loss is differentiated.
        x: Inputs ``[b, ...]`` of some samples of the data.
        y: Their targets ``[b, ...]``.

    Raises:
        UserError: The model can't be trained in this precision on a CPU.
    """
    if device != "cpu" or precision == "fp32":
        return
    if precision == "tf32":
        raise UserError(
            "train.precision=tf32 is for GPUs, and clients are trained on a CPU here: use fp32 or bf16, or "
            "engine.device=cuda on a machine with a GPU"
        )
    reason = precision_obstacle(module, task, precision, x, y)
    if reason:
        raise UserError(
            f"train.precision={precision}: model.name={name} can't be trained in it on this processor: {reason}"
        )


def precision_obstacle(module: nn.Module, task: Task, precision: str, x: Any, y: Tensor) -> str | None:
    """Returns the reason why ``module`` can't be trained in ``precision`` (a value of ``train.precision``) on a
    processor like this one, as text for messages, or None if it can.

    A trial gradient of the loss of ``task`` is computed, on samples with inputs ``x [b, ...]`` and targets
    ``y [b, ...]``. PyTorch lacks some kernels for some types and processors: LSTMs in fp16, for example.
    """
    network = LoopNetwork(copied(module), task, precision=precision)
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    with torch_rng(0, Purpose.DROPOUT):
        try:
            network.gradients(network.loaded().rows(1), batch)
        except RuntimeError as error:
            return first_line(error)
    return None


def faster_precision(train: TrainConfig, device: str, flops: float) -> str | None:
    """Returns a note for the user that training on a GPU would be faster in another precision than fp32, the default.
    Returns None if ``device`` is not ``cuda``, if the user has chosen a precision in ``train`` (a section of the
    configuration), if the model is so small that precision makes no difference, or if the GPU of this machine has no
    faster precision. ``flops`` are the FLOPs of a mini-batch's forward pass."""
    if device != "cuda" or "precision" in train.model_fields_set or flops < LEAST_FLOPS:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < TENSOR_CORES:
        return None
    return (
        "train.precision=fp32: GPUs since 2020 train faster in tf32 or bf16, which round the factors of products to "
        f"about three digits: an H200 1.3 (LeNet-5 in tf32) to 3.7 times as fast (ResNet-18 in either); {DOCUMENTED}"
    )
