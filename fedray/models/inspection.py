"""Finds out, by trial passes, what the engine has to know about a model before training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedray.core.network import predicting_head
from fedray.core.seeds import Purpose, torch_rng
from fedray.core.vectors import Layout
from fedray.errors import UserError
from fedray.importing import as_user_error
from fedray.models.flops import count_forward_pass, forward_flops

NAMED = 3
"""The largest number of layers that a message names of those that could not be counted."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    * ``parameters``, ``buffers``: the numbers of trainable parameters and of entries in buffers of floats.
    * ``flops``: FLOPs of one sample's forward pass in training mode, without the head's predictor;
      ``prediction_flops``: those of the predictor.
    * ``draws``: whether the forward pass draws random numbers, as dropout does.
    * ``uncounted``: the layers, as ``name (Class)``, whose FLOPs could not be counted.
    """

    parameters: int
    buffers: int
    flops: float
    draws: bool
    prediction_flops: float = 0.0
    uncounted: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """The lines that the user should know about the model."""
        if not self.uncounted:
            return []
        more = f" and {len(self.uncounted) - NAMED} more" if len(self.uncounted) > NAMED else ""
        return [
            f"warning: FLOPs of the model's {', '.join(self.uncounted[:NAMED])}{more} are not counted: costs and "
            "engine.vectorize=auto take them for zero"
        ]


def inspect_model(module: nn.Module, example: Any, name: str) -> ModelFacts:
    """Returns what fedray must know of ``module``, from a trial pass over the inputs ``example [b, ...]`` in training
    mode.

    The module's buffers stay as they are. b must be at least 2, because some normalisation layers need two samples.
    ``name`` stands for the model in messages. Raises :class:`UserError` if nothing of it can be trained.
    """
    layout = Layout(module)
    if not layout.parameters:
        raise UserError(f"model {name} has no trainable parameters")
    with without_traces(module):
        before = torch.random.get_rng_state()
        with as_user_error(f"model {name} failed in training mode"):
            _, count = count_forward_pass(module.train(), example)
        draws = not torch.equal(before, torch.random.get_rng_state())
        head = predicting_head(module)
        predicted = 0.0 if head is None else forward_flops(head.predictor, torch.zeros(2, head.classifier.in_features))
    return ModelFacts(
        parameters=layout.parameters,
        buffers=sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point()),
        flops=count.flops,
        draws=draws,
        prediction_flops=predicted,
        uncounted=count.uncounted,
    )


@contextlib.contextmanager
def without_traces(module: nn.Module) -> Iterator[None]:
    """A context in which trial passes are repeatable, and after which they have left no trace.

    In it no gradients are taken, and torch's generator always draws the same, because some models skip layers at
    random. After it the module's buffers and the generator are as they were.
    """
    with torch_rng(0, Purpose.DROPOUT), torch.no_grad():
        before = {name: value.clone() for name, value in module.named_buffers()}
        try:
            yield
        finally:
            for name, value in module.named_buffers():
                value.copy_(before[name])
