"""The papers' models.

A model is a ``torch.nn.Module`` class from inputs ``[b, *input_shape]`` to logits ``[b, classes]``. Its constructor may
ask for ``input_shape`` and ``classes``; its other arguments are options that a config sets as ``model.<option>``. A
class may carry its own ``task_loss(logits, targets) -> [b]``; cross-entropy else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedray.errors import UserError, near_miss
from fedray.importing import import_object
from fedray.models.small import MLP, FedTripCNN, LeNet5, Linear, Logistic

MODELS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "logistic": Logistic,
    "mlp": MLP,
    "lenet5": LeNet5,
    "cnn": FedTripCNN,
}


def find_model(name: str) -> Callable[..., nn.Module]:
    """The class of a model's name, or what ``module:Class`` of the user's names."""
    if ":" in name:
        return import_object(name, "model.name")
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}{near_miss(name, MODELS)}; your own is given as module:Class")
    return MODELS[name]


def options_of(model: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    """The options of a model: its constructor's arguments but ``input_shape`` and ``classes``."""
    parameters = inspect.signature(model).parameters
    return {name: p for name, p in parameters.items() if name not in ("input_shape", "classes")}


def build(
    model: Callable[..., nn.Module], name: str, input_shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """The module, with options checked against its constructor; a constructor's own ValueError is the user's."""
    known = options_of(model)
    any_option = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for option in options:
        if option not in known and not any_option:
            raise UserError(f"unknown key model.{option} for model {name}{near_miss(option, known)}")
    offered = {"input_shape": input_shape, "classes": classes}
    asked = {key: value for key, value in offered.items() if key in inspect.signature(model).parameters}
    try:
        return model(**asked, **options)
    except (ValueError, TypeError) as error:
        raise UserError(f"model {name} can't be made for inputs {input_shape}, {classes} classes: {error}") from error
