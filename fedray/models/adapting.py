"""Trains a part of a model: layers that are named, or small ones of the library peft beside the model's own."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from fedray.config.model import PeftConfig
from fedray.core.linear import is_adapter
from fedray.core.norms import TRACKING_NORMS, freeze
from fedray.core.places import Places
from fedray.core.private import private_names
from fedray.core.vectors import Layout
from fedray.errors import UserError, near_miss
from fedray.usercode.importing import as_user_error


def adapt(module: nn.Module, peft: PeftConfig, trainable: Sequence[str] | None) -> None:
    """Freezes all parameters of ``module`` but those that ``trainable`` names (see
    :func:`fedray.core.private.private_names`) and those of the layers that ``peft`` asks for, which are added in place.
    With ``peft`` the last layer is trained too, except for weights that it shares with another, unless ``trainable`` is
    set.

    Raises :class:`UserError` if nothing has such a name, or the layers can't be added.
    """
    patterns = ["head"] if trainable is None else trainable
    trained = private_names(module, Layout(module), patterns, "model.trainable")
    if trainable is None:
        trained -= Places(module).shared
    named = dict(module.named_parameters())
    chosen = [named[name] for name in trained if name in named]
    for parameter in named.values():
        parameter.requires_grad_(False)
    for name, layer in module.named_modules():
        if isinstance(layer, TRACKING_NORMS) and not any(key.startswith(f"{name}.") for key in trained):
            freeze(layer)
    if peft.kind != "none":
        _add_layers(module, peft, {id(parameter) for parameter in chosen})
    for parameter in chosen:
        parameter.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"model.trainable={list(patterns)} leaves nothing to train")


def _add_layers(module: nn.Module, peft: PeftConfig, whole: Collection[int]) -> None:
    """Adds the layers of ``peft`` to ``module``, but not to layers whose weights are trained as a ``whole`` (their
    ids)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("model.peft needs the library peft: pip install 'fedray[peft]'") from None
    targets = _targets(module, peft.targets, whole)
    config = LoraConfig(
        r=peft.r,
        lora_alpha=peft.alpha,  # type: ignore[arg-type]
        lora_dropout=peft.dropout,
        target_modules="|".join(map(re.escape, targets)),
    )
    with (
        as_user_error(f"model.peft: {', '.join(targets)} can't get matrices of width {peft.r}"),
        warnings.catch_warnings(),
    ):
        # of layers whose weights lie the other way round, which peft finds out itself
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, module)
    _leave_fast_path(module)


def _leave_fast_path(module: nn.Module) -> None:
    """Makes the encoder layers of torch call their linear layers in evaluation mode, too, where they would otherwise
    read the weights alone, without the matrices beside them."""
    for layer in module.modules():
        if not any(is_adapter(name) for name, _ in layer.named_modules()):
            continue
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def _is_able(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or (type(layer).__name__ == "Conv1D" and "transformers" in type(layer).__module__)


def _targets(module: nn.Module, asked: Sequence[str] | str, whole: Collection[int]) -> list[str]:
    """Returns the names of the layers of ``module`` that are ``asked`` for, by their names or the ends of these. Layers
    that are trained as a whole, or share their weights with others, are left out. Raises :class:`UserError` if a name
    means none of the layers that can have further matrices."""
    # a subclass of Linear may be read by another layer, which would pass by the matrices
    able = {name: layer for name, layer in module.named_modules() if _is_able(layer)}
    shared = Counter(id(p) for layer in module.modules() for p in layer.parameters(recurse=False))
    free = [name for name, layer in able.items() if id(layer.weight) not in whole and shared[id(layer.weight)] == 1]
    if isinstance(asked, str):
        found = free
    else:
        for target in asked:
            if not any(name == target or name.endswith(f".{target}") for name in free):
                near = near_miss(target, {name.rpartition(".")[2] for name in free})
                raise UserError(f"model.peft.targets: there is no linear layer {target!r}{near} beside those trained")
        found = [name for name in free if any(name == each or name.endswith(f".{each}") for each in asked)]
    if not found:
        raise UserError("model.peft: the model has no linear layers beside those that are trained as a whole")
    return found
