"""Trains a part of a model: layers that are named, or small ones of the library peft beside the model's own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedray.config.model import PeftConfig
from fedray.core.private import private_names
from fedray.core.vectors import Layout
from fedray.errors import UserError
from fedray.usercode.importing import as_user_error


def adapt(module: nn.Module, peft: PeftConfig | None, trainable: Sequence[str] | None) -> None:
    """Freezes all parameters of ``module`` but those that ``trainable`` names (see
    :func:`fedray.core.private.private_names`) and those of the layers that ``peft`` asks for, which are added in place.
    With ``peft`` the last layer is trained too unless ``trainable`` is set. Without either, nothing changes.

    Raises :class:`UserError` if nothing has such a name, or the layers can't be added.
    """
    if peft is None and trainable is None:
        return
    patterns = ["head"] if trainable is None else trainable
    trained = private_names(module, Layout(module), patterns, "model.trainable")
    named = dict(module.named_parameters())
    chosen = [named[name] for name in trained if name in named]
    for parameter in named.values():
        parameter.requires_grad_(False)
    if peft is not None:
        _add_layers(module, peft, [name for name in trained if name in named])
    for parameter in chosen:
        parameter.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"model.trainable={list(patterns)} leaves nothing to train")


def _add_layers(module: nn.Module, peft: PeftConfig, trained: Sequence[str]) -> None:
    """Adds the layers of ``peft`` to ``module``, except to layers of the parameters ``trained``."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("model.peft needs the library peft: pip install 'fedray[peft]'") from None
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    targets = linear if peft.targets == "all-linear" else peft.targets
    whole = {name.rpartition(".")[0] for name in trained}
    config = LoraConfig(
        r=peft.r,
        lora_alpha=peft.alpha,  # type: ignore[arg-type]
        lora_dropout=peft.dropout,
        target_modules=list(targets),
        exclude_modules=sorted(whole) or None,
    )
    with as_user_error(f"model.peft: layers {peft.targets} can't get matrices of width {peft.r}"):
        inject_adapter_in_model(config, module)
