"""Finds the buffers that are vectors of length 1: those of spectral normalisation, which point along singular
vectors."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def unit_vectors(module: nn.Module) -> set[str]:
    """Returns the names of the buffers of ``module`` that spectral normalisation keeps at length 1."""
    found = set()
    for prefix, layer in module.named_modules():
        keys = ["_u", "_v"] if isinstance(layer, _SpectralNorm) else []
        # the older form is a hook
        olds = [hook.name for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        keys += [f"{name}_{part}" for name in olds for part in ("u", "v")]
        found |= {f"{prefix}.{key}" if prefix else key for key in keys if layer._buffers.get(key) is not None}
    return found
