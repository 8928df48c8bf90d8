"""Replaces the normalisation layers of a model (``model.norm``).

BatchNorm's running statistics are averaged over clients whose data differ, which is why federated learning often uses
GroupNorm instead (K. Hsieh et al.: The Non-IID Data Quagmire of Decentralized Machine Learning. ICML 2020).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedray.core.norms import BATCH_NORMS
from fedray.errors import UserError


def replace_norms(module: nn.Module, norm: str, groups: int, name: str) -> None:
    """Replaces the BatchNorm and GroupNorm layers of ``module``, in place, as ``model.norm`` asks for. New layers begin
    as in torch, with weight 1 and bias 0. LayerNorm and other layers stay.

    Args:
        module: The model.
        norm: ``batch`` turns GroupNorm into BatchNorm for images, ``group`` turns all these layers into GroupNorm, and
            ``none`` removes them.
        groups: The number of groups of a new GroupNorm, ``model.norm_groups``.
        name: The model's name in error messages.

    Raises:
        UserError: There is no layer to replace, the model is itself such a layer, or the channels of a layer can't be
            divided into the groups.
    """
    layers = module.named_modules(remove_duplicate=False)
    found = {place: layer for place, layer in layers if isinstance(layer, (*BATCH_NORMS, nn.GroupNorm))}
    if not found:
        raise UserError(f"model.norm={norm}: model {name} has neither BatchNorm nor GroupNorm")
    replaced: dict[nn.Module, nn.Module] = {}
    for place, layer in found.items():
        parent, _, child = place.rpartition(".")
        if not place:
            raise UserError(f"model.norm={norm}: model {name} is itself a normalisation layer")
        # a layer that is used in several places stays one layer
        if layer not in replaced:
            replaced[layer] = _new(layer, norm, groups, f"{name}: {place}")
        setattr(module.get_submodule(parent), child, replaced[layer])


def _new(layer: Any, norm: str, groups: int, where: str) -> nn.Module:
    new = _without(layer, norm, groups, where)
    further = [] if new is layer else _further(layer, where)
    return nn.Sequential(new, *further) if further else new


def _further(layer: Any, where: str) -> list[nn.Module]:
    """Returns what a norm does after normalising, as those of timm do: drop-out and an activation. Raises
    :class:`UserError` for any other class than torch's own, which may do anything."""
    if type(layer).__module__.startswith("torch."):
        return []
    after = [getattr(layer, name, None) for name in ("drop", "act")]
    if type(layer).__module__.startswith("timm.") and all(isinstance(each, nn.Module) for each in after):
        return [each for each in after if isinstance(each, nn.Module)]
    raise UserError(f"model.norm: {where} is a {type(layer).__name__}, which may do more than normalise")


def _without(layer: Any, norm: str, groups: int, where: str) -> nn.Module:
    if norm == "none":
        return nn.Identity()
    channels, affine = getattr(layer, "num_channels", None) or layer.num_features, layer.affine
    if norm == "batch":
        return nn.BatchNorm2d(channels, affine=affine) if isinstance(layer, nn.GroupNorm) else layer
    if channels % groups:
        raise UserError(f"model.norm_groups={groups}: {where} has {channels} channels, which {groups} does not divide")
    return nn.GroupNorm(groups, channels, affine=affine)
