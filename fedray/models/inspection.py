"""Finds out, by trial passes, what the engine has to know about a model, its loss and metrics before training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedray.core.network import Loss, predicting_head
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.vectors import Layout
from fedray.errors import UserError
from fedray.importing import as_user_error
from fedray.models.flops import count_forward_pass, forward_flops

OWN_FIGURES = ("accuracy", "loss", "correct")
"""The figures of every evaluation. A metric can't have one of these names."""

NAMED = 3
"""The largest number of layers that a message names of those that could not be counted."""

TRIALS, LARGEST, SIZES = 3, 250, (2, 7, 50, 120)
"""A loss or a metric is tried on ``TRIALS`` batches of ``LARGEST`` samples, and on their first ``SIZES`` samples."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model and its loss.

    * ``parameters``, ``buffers``: the numbers of trainable parameters and of entries in buffers of floats.
    * ``flops``: FLOPs of one sample's forward pass in training mode, without the head's predictor;
      ``prediction_flops``: those of the predictor.
    * ``draws``: whether the forward pass draws random numbers, as dropout does.
    * ``uncounted``: the layers, as ``name (Class)``, whose FLOPs could not be counted.
    * ``loss_of_batch``: whether a sample's loss depends on the other samples of its batch.
    """

    parameters: int
    buffers: int
    flops: float
    draws: bool
    prediction_flops: float = 0.0
    uncounted: tuple[str, ...] = ()
    loss_of_batch: bool = False

    @property
    def notes(self) -> list[str]:
        """The lines that the user should know about the model."""
        lines = []
        if self.uncounted:
            more = f" and {len(self.uncounted) - NAMED} more" if len(self.uncounted) > NAMED else ""
            lines.append(
                f"warning: FLOPs of the model's {', '.join(self.uncounted[:NAMED])}{more} are not counted: costs and "
                "engine.vectorize=auto take them for zero"
            )
        if self.loss_of_batch:
            lines.append(
                "warning: the loss of a sample depends on the other samples of its batch, so test_loss depends on the "
                "size of evaluation batches, and train_loss on train.batch_size"
            )
        return lines


def inspect_model(module: nn.Module, loss: Loss, example: Tensor, classes: int, name: str) -> ModelFacts:
    """Returns what fedray must know of ``module``, from trial passes over ``example [b, ...]`` in training mode and in
    evaluation mode.

    The module's buffers stay as they are. b must be at least 2, because some normalisation layers need two samples.
    ``name`` stands for the model in messages. Raises :class:`UserError` if the outputs or the loss do not have the
    shapes that fedray needs.
    """
    layout = Layout(module)
    if not layout.parameters:
        raise UserError(f"model {name} has no trainable parameters")
    with _without_traces(module):
        with as_user_error(f"model {name} can't take inputs of shape {list(example.shape[1:])}"):
            logits = module.eval()(example)
        _check_logits(logits, len(example), classes, name)
        check_per_sample("the loss", loss, classes, "use reduction='none'")
        loss_of_batch = depends_on_batch("the loss", loss, classes)
        before = torch.random.get_rng_state()
        with as_user_error(f"model {name} failed in training mode"):
            logits, count = count_forward_pass(module.train(), example)
        draws = not torch.equal(before, torch.random.get_rng_state())
        _check_logits(logits, len(example), classes, f"{name}, in training mode,")
        head = predicting_head(module)
        predicted = 0.0 if head is None else forward_flops(head.predictor, torch.zeros(2, head.classifier.in_features))
    return ModelFacts(
        parameters=layout.parameters,
        buffers=sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point()),
        flops=count.flops,
        draws=draws,
        prediction_flops=predicted,
        uncounted=count.uncounted,
        loss_of_batch=loss_of_batch,
    )


@contextlib.contextmanager
def _without_traces(module: nn.Module) -> Iterator[None]:
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


def _check_logits(logits: object, samples: int, classes: int, name: str) -> None:
    if not isinstance(logits, Tensor):
        raise UserError(f"model {name} must give logits [b, {classes}], a tensor, not {type(logits).__name__}")
    if logits.shape != (samples, classes):
        first = ["b"] if logits.shape[:1] == (samples,) else [f"{size} for b = {samples}" for size in logits.shape[:1]]
        shape = ", ".join([*first, *map(str, logits.shape[1:])])
        raise UserError(f"model {name} must give logits [b, {classes}], not [{shape}]")


def check_metrics(metrics: Mapping[str, Loss], classes: int) -> None:
    """Raises :class:`UserError` for a metric that can't be used.

    A metric must return for each sample a number that does not depend on other samples, and must not have the name of
    one of fedray's own figures.
    """
    for name, metric in metrics.items():
        if name in OWN_FIGURES:
            raise UserError(f"metric {name!r} has the name of a figure of fedray's own: choose another")
        check_per_sample(f"metric {name!r}", metric, classes, "fedray takes the mean over the test set itself")
        if depends_on_batch(f"metric {name!r}", metric, classes):
            raise UserError(
                f"metric {name!r} gives a sample another value when there are other samples in its batch, so its mean "
                "would depend on the size of evaluation batches: let it look at each sample alone"
            )


def check_per_sample(what: str, function: Loss, classes: int, advice: str) -> None:
    """Raises :class:`UserError` unless ``function(logits [b, classes], targets [b])`` returns a tensor ``[b]``."""
    # two sizes are tried, because one of them may happen to be the number of classes
    for size in (2, classes + 1):
        logits, targets = torch.zeros(size, classes), torch.zeros(size, dtype=torch.long)
        with as_user_error(f"{what} failed on logits [{size}, {classes}] and targets [{size}]"):
            values = function(logits, targets)
        if not isinstance(values, Tensor):
            raise UserError(f"{what} must give one value per sample, a tensor [b], not {type(values).__name__}")
        if values.shape != targets.shape:
            raise UserError(
                f"{what} must give one value per sample, [b], not a tensor of shape {list(values.shape)}: {advice}"
            )


def depends_on_batch(what: str, function: Loss, classes: int) -> bool:
    """Returns whether a sample's value of ``function`` changes with the rest of its batch.

    ``function(logits [b, classes], targets [b])`` is called with the first samples of random batches, half of which are
    predicted rightly, both with and without the rest. For a function that draws random numbers nobody can tell, and the
    answer is False.
    """
    for draw in range(TRIALS):
        rng = stream(0, Purpose.INIT, draw)
        logits = torch.from_numpy(rng.standard_normal((LARGEST, classes), dtype=np.float32))
        targets = torch.from_numpy(rng.integers(0, classes, LARGEST))
        targets[::2] = logits[::2].argmax(1)
        for size in SIZES:
            with as_user_error(f"{what} failed on logits [{LARGEST}, {classes}] and targets [{LARGEST}]"):
                whole, part, again = (function(logits[:b], targets[:b]).double()[:size] for b in (LARGEST, size, size))
            if not torch.allclose(part, again, equal_nan=True):
                return False
            if not torch.allclose(whole, part, rtol=1e-3, atol=1e-6, equal_nan=True):
                return True
    return False
