"""Finds normalisation layers that need special treatment: batch normalisation of a single sample, frozen layers, and
spectral normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedray.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The layers of batch normalisation. Their subclasses count too."""

TRACKING_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""The normalisation layers that may keep running statistics."""


def norm_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the normalisation layers of ``module``, each with its name. Classes whose names end with ``Norm`` count,
    too."""
    for name, layer in module.named_modules():
        known = isinstance(layer, (*TRACKING_NORMS, nn.GroupNorm, nn.LayerNorm))
        if known or type(layer).__name__.endswith("Norm"):
            yield name, layer


def single_value_norms(module: nn.Module, run: Callable[[], Any]) -> list[nn.Module]:
    """Finds the layers of batch normalisation that can't be trained on a mini-batch of one sample, because they get
    only one value per channel, and returns them as a list. For such mini-batches the caller lets these layers use their
    running statistics.

    Args:
        module: the model that contains the layers; it is left in evaluation mode.
        run: a function without arguments that makes a forward pass of ``module`` with one sample.

    Raises:
        UserError: such a layer has no running statistics.
    """
    found: dict[nn.Module, str] = {}

    def look(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() == inputs[0].shape[1]:
            found[layer] = name
            if not layer.track_running_stats:
                raise UserError(
                    f"the layer {name} ({type(layer).__name__}) has one value per channel in a mini-batch of a single "
                    "sample, and no running statistics to use instead (track_running_stats=False): let no client have "
                    "such mini-batches (data.partition.min_samples, train.batch_size), or use another norm (model.norm)"
                )

    norms = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, BATCH_NORMS))
    hooks = [layer.register_forward_pre_hook(partial(look, name)) for name, layer in norms]
    try:
        module.eval()
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(found)


FROZEN = "_is_frozen_for_fedray"
"""The attribute of a layer that is frozen although it has no parameters by which that could be seen."""


def freeze(layer: nn.Module) -> None:
    """Notes that ``layer`` is frozen, which matters if it has no parameters (:func:`is_frozen`)."""
    setattr(layer, FROZEN, True)


def is_frozen(layer: nn.Module) -> bool:
    """Returns whether none of the parameters of ``layer`` is trained (``requires_grad`` is false). Parameters of its
    sublayers do not count, and a layer without parameters is frozen only after :func:`freeze`."""
    parameters = list(layer.parameters(recurse=False))
    return not any(each.requires_grad for each in parameters) if parameters else getattr(layer, FROZEN, False)


def unit_vectors(module: nn.Module) -> set[str]:
    """Returns the names of the buffers of ``module`` that spectral normalisation keeps at length 1, such as
    ``layer.parametrizations.weight.0._u``. The mean of several clients' buffers is shorter than 1, so these buffers
    have to be scaled after averaging."""
    found = set()
    for prefix, layer in module.named_modules():
        keys = ["_u", "_v"] if isinstance(layer, _SpectralNorm) else []
        # the older torch.nn.utils.spectral_norm is a hook
        olds = [hook.name for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        keys += [f"{name}_{part}" for name in olds for part in ("u", "v")]
        found |= {f"{prefix}.{key}" if prefix else key for key in keys if layer._buffers.get(key) is not None}
    return found
