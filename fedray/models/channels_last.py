"""Decides whether the convolutions of a model get the channels-last layout. CPUs and GPUs compute them faster in this
layout, unless clients are trained in stacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedray.core.norms import BATCH_NORMS
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.structure import call_on_copies, leaves, map_leaves
from fedray.core.task import Task
from fedray.errors import UserError, first_sentence
from fedray.models.behaviour import without_traces

CONVOLUTIONS = nn.Conv2d | nn.ConvTranspose2d

LEAST_CHANNELS = 16
"""The number of a convolution's output channels from which on the channels-last layout pays.

On a CPU, a gradient takes 0.93 to 1.17 of the time if the widest convolution has 8 output channels, 0.80 to 1.03 with
16, 0.68 to 0.91 with 32, 0.64 to 0.85 with 64 (``analysis/benchmarks/channels_last.py``), and 1.1 in stacks of clients.
On an H200 it pays in TF32 and bf16 (GHBM's CNN: 7,415 local steps a second instead of 5,946). In fp32 it pays for
kernels of size 3 (ResNet-18: 344 instead of 311), but not if all kernels are larger (GHBM's CNN: 1,602 instead of
3,203).
"""

TRIED = ((True, 2), (True, 1), (False, 1))
"""The passes with which a model is tried: whether in training mode, and the number of samples. Some kernels are
different for a single sample, and evaluation mode has no dropout."""

TOLERANCE = 1e-2
"""The largest difference between two outputs or gradients, relative to their length, that counts as rounding.

With torchvision's networks they differ by up to 1e-3, because rounding may move a ReLU's input across zero.
"""


def pays(module: nn.Module, device: str, precision: str) -> bool:
    """Returns whether training ``module`` would be faster with its convolutions in the channels-last memory layout, if
    clients are trained one by one. ``device`` is ``cpu`` or ``cuda``, and ``precision`` a value of ``train.precision``.
    On a CPU the answer is False if the convolutions have this layout already."""
    wide = [m for m in module.modules() if isinstance(m, CONVOLUTIONS) and m.out_channels >= LEAST_CHANNELS]
    if device == "cuda":
        return bool(wide) and (precision != "fp32" or any(max(layer.kernel_size) <= 3 for layer in wide))
    # if a dimension has length 1, is_contiguous() is true for both layouts
    return any(
        weight.stride() != torch.empty_like(weight, device="meta", memory_format=torch.channels_last).stride()
        for layer in wide
        for weight in _weights(layer)
    )


def in_channels_last(
    asked: bool | Literal["auto"], faster: bool, module: nn.Module, name: str, task: Task, x: Any, y: Tensor
) -> tuple[bool, list[str]]:
    """Converts the 2-d convolutions of ``module`` to the channels-last memory layout, in place, if that is wanted and
    possible. Returns whether they were converted, and a list of notes about it for the user.

    After the conversion the module is tried on some samples. If it fails, or gives other results than before, the
    conversion is undone.

    Args:
        asked: The value of ``engine.channels_last``. With ``auto``, convolutions are converted if that is ``faster``.
        faster: Whether the layout would make training faster, as :func:`pays` returns it.
        module: The model.
        name: The model's name in messages.
        task: The task, whose loss and metrics are computed in the trial.
        x: Inputs ``[b, ...]`` of some samples of the data.
        y: Their targets ``[b, ...]``.

    Raises:
        UserError: ``asked`` is True, and the module does not work with this layout.
    """
    if asked is False or (asked == "auto" and not faster):
        return False, []
    weights = list(_weights(module))
    former = [weight.data for weight in weights]
    before = _trial(module, task, x, y)
    convert(module)
    obstacle = _obstacle(before, _trial(module, task, x, y))
    if obstacle is None:
        return True, []
    for weight, value in zip(weights, former, strict=True):
        weight.data = value
    reason = f"model {name} does not run with it: {obstacle}"
    if "view size" in obstacle:
        reason += "; x.flatten(1) or x.reshape(...) in place of x.view(...) often helps"
    if asked is True:
        raise UserError(f"engine.channels_last=true: {reason}")
    return False, [f"engine.channels_last=false, although true would probably be faster, because {reason}"]


def convert(module: nn.Module, channels_last: bool = True) -> None:
    """Converts the weights of the 2-d convolutions in ``module`` to the channels-last layout, or back to torch's usual
    layout (contiguous) if ``channels_last`` is false. Only the order of the weights in memory changes, not their values
    and shapes."""
    for weight in _weights(module):
        weight.data = weight.data.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of the 2-d convolutions in ``module``, or the parameters from which the weights are computed
    (parametrizations)."""
    for layer in module.modules():
        if isinstance(layer, CONVOLUTIONS):
            yield from (each for each in layer.parameters() if each.dim() == 4)


Outcome = list[Tensor] | Exception
"""The result of a trial pass: tensors that depend on the layout only by rounding, or the exception that the pass
raised."""


def _trial(module: nn.Module, task: Task, x: Any, y: Tensor) -> list[Outcome]:
    """Returns the outcomes of trial passes of ``module`` with loss, gradient and metrics, one for each entry of
    :data:`TRIED`, so that they can be compared with those in another memory layout. ``module`` is left as it was."""
    with without_traces(module):
        _move(module)
        return [
            _outcome(module, task, map_leaves(lambda each, b=size: each[:b], x), y[:size], training)
            for training, size in TRIED
        ]


def _move(module: nn.Module) -> None:
    """Changes all parameters of ``module`` a little at random, because a layer of zeros would hide what happens in the
    layers before it. The changes are the same in each call."""
    draws = stream(0, Purpose.INIT)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            scale, shift = torch.from_numpy(draws.standard_normal((2, *parameter.shape), dtype=np.float32))
            parameter.data = torch.empty_like(parameter.data).copy_(parameter * (1 + 0.1 * scale) + 0.02 * shift)


def _outcome(module: nn.Module, task: Task, x: Any, y: Tensor, training: bool) -> Outcome:
    """Returns the outputs ``[b, ...]`` and the gradient of a mini-batch as a list of tensors, or the exception that the
    pass raised. The list is empty if the results of two memory layouts can't be compared: if random numbers were drawn,
    whose order depends on the layout, or if BatchNorm in training mode normalises by few numbers, so that rounding
    changes all its outputs."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        with torch_rng(0, Purpose.DROPOUT), torch.enable_grad():
            state = torch.random.get_rng_state()
            module.train(training)
            outputs = call_on_copies(module, x)
            drew = not torch.equal(state, torch.random.get_rng_state())
            total = task.training_losses(outputs, y).sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        found = [each.detach() for each in leaves(outputs) if isinstance(each, Tensor)]
        for name in ("loss", *task.metrics):
            task.sums(name, map_leaves(lambda each: each.detach() if isinstance(each, Tensor) else each, outputs), y)
    except Exception as error:
        return error
    if drew or (training and any(isinstance(layer, BATCH_NORMS) for layer in module.modules())):
        return []
    gradient = torch.cat([each.reshape(-1) for each in gradients if each is not None])
    return [*(each for each in found if each.is_floating_point()), gradient]


def _obstacle(before: list[Outcome], after: list[Outcome]) -> str | None:
    """Returns the reason why a model does not work in another memory layout, as text, or None if it does. ``before``
    and ``after`` are the outcomes of the same trial passes before and after the change of layout."""
    for one, other in zip(before, after, strict=True):
        if isinstance(one, Exception):
            continue
        if isinstance(other, Exception):
            return first_sentence(other)
        for a, b in zip(one, other, strict=True):
            off = float((a - b).norm() / a.norm().clamp(min=1e-12))
            # if the outcome before the change is not finite, nothing can be said
            if a.isfinite().all() and not off <= TOLERANCE:
                return f"its outputs or gradients are off by {100 * off:.3g} %"
    return None
