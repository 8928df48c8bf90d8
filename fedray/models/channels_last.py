"""Decides whether the convolutions of a model have the channels-last layout, in which CPUs compute them faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedray.core.structure import leaves
from fedray.errors import UserError, first_sentence
from fedray.models.stacking import TOLERANCE

CONVOLUTIONS = nn.Conv2d | nn.ConvTranspose2d

LEAST_CHANNELS = 16
"""The output channels of a convolution from which on the channels-last layout pays.

A gradient takes 0.93 to 1.17 of the time where the widest convolution has 8, 0.80 to 1.03 with 16, 0.68 to 0.91 with
32, and 0.64 to 0.85 with 64 (``analysis/benchmarks/channels_last.py``). In stacks of clients two
networks took 1.1 of the time, with other programs beside them.
"""


def in_channels_last(
    asked: bool | Literal["auto"], stacked: bool, module: nn.Module, name: str, outputs_of: Callable[[bool], Any]
) -> tuple[bool, list[str]]:
    """Returns whether the 2-d convolutions of ``module`` are to be converted, and lines for the user about that.

    ``asked`` is ``engine.channels_last``. ``stacked`` says whether clients are trained in batched stacks.
    ``outputs_of(training)`` gives the outputs of ``module``, called ``name`` in messages, for some samples. If the
    answer is yes, ``module`` has been converted. Raises :class:`UserError` if the user wants what is not possible.
    """
    if asked is False or (asked == "auto" and (stacked or not _would_be_faster(module))):
        return False, []
    obstacle = _convert(module, outputs_of)
    if obstacle is None:
        return True, []
    reason = f"model {name} does not run with it: {obstacle}"
    advice = "x.flatten(1) or x.reshape(...) in place of x.view(...) often helps"
    if asked is True:
        raise UserError(f"engine.channels_last=true: {reason}; {advice}")
    return False, [f"engine.channels_last=false, although true is faster, because {reason}; {advice}"]


def convert(module: nn.Module) -> None:
    """Gives the weights of 2-d convolutions the channels-last layout. Their values and shapes stay as they are."""
    module.to(memory_format=torch.channels_last)


def _would_be_faster(module: nn.Module) -> bool:
    """Returns whether a 2-d convolution has many channels, and not the channels-last layout."""
    return any(
        isinstance(layer, CONVOLUTIONS)
        and layer.out_channels >= LEAST_CHANNELS
        and not layer.weight.is_contiguous(memory_format=torch.channels_last)
        for layer in module.modules()
    )


def _convert(module: nn.Module, outputs_of: Callable[[bool], Any]) -> str | None:
    """Converts ``module`` and tries it. If it fails, its weights are made contiguous, and the reason is returned."""
    before = leaves(outputs_of(False))
    convert(module)
    try:
        # in training mode layers may draw other numbers, because they draw in the order of memory
        outputs_of(True)
        obstacle = _difference(before, leaves(outputs_of(False)))
    except Exception as error:
        obstacle = first_sentence(error)
    if obstacle is not None:
        module.to(memory_format=torch.contiguous_format)
    return obstacle


def _difference(before: list[Any], after: list[Any]) -> str | None:
    both = zip(before, after, strict=True)
    pairs = [(a, b) for a, b in both if isinstance(a, Tensor) and a.is_floating_point()]
    off = max((float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs), default=0.0)
    # where outputs are not finite, nothing can be said
    return f"its outputs are off by {100 * off:.3g} %" if off > TOLERANCE else None
