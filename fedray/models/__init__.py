"""Finds and makes models: networks of published papers, classifiers of torchvision, and user-defined ones.

A model is a class of ``torch.nn.Module``, or a function that makes a module, which maps inputs ``[b, *input_shape]`` of
b samples to logits ``[b, classes]``. It may have the arguments ``input_shape`` and ``classes``; its other arguments are
options, which a config sets as ``model.<option>``. A class may have a method ``task_loss(logits, targets) -> [b]``, a
loss for each sample that is used in place of cross-entropy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedray.data.sources.doubts import CHANNELS_FIRST, seems_channels_last
from fedray.errors import UserError, near_miss
from fedray.models.adapters import TIMM, TRANSFORMERS, timm_model, transformers_model
from fedray.models.ghbm import GHBMCNN, ResNet20
from fedray.models.heads import Head as Head
from fedray.models.small import MLP, FedTripCNN, LeNet5, Linear, Logistic
from fedray.models.soundness import require_trainable_kind
from fedray.models.text import ShakespeareLSTM, StackOverflowLSTM
from fedray.models.vision import (
    TORCHVISION,
    AlexNet,
    FireNet,
    mobilenet_v2,
    resnet18,
    resnet50,
    torchvision_model,
    vgg16,
    vit_b_16,
)
from fedray.usercode.importing import FORMS, as_user_error, import_object, is_user_defined

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": Linear,
    "logistic": Logistic,
    "mlp": MLP,
    "lenet5": LeNet5,
    "cnn": FedTripCNN,
    "ghbm_cnn": GHBMCNN,
    "resnet20": ResNet20,
    "alexnet": AlexNet,
    "vgg16": vgg16,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "vit_b_16": vit_b_16,
    "firenet": FireNet,
    "shakespeare_lstm": ShakespeareLSTM,
    "stackoverflow_lstm": StackOverflowLSTM,
}


def find_model(name: str) -> Callable[..., nn.Module]:
    """Finds a model by the name that a configuration gives it (``model.name``). Returns the class or function that
    makes the model. Called with ``input_shape`` (the shape of one sample), ``classes`` (the number of classes) and the
    model's options, it returns a ``torch.nn.Module``. A user-defined one need not have the first two arguments.

    Args:
        name: A key of :data:`MODELS`, ``torchvision:NAME`` for a classifier of torchvision, ``transformers:NAME`` and
            ``timm:NAME`` for models of these libraries, or ``file.py:Class`` or ``module:Class`` for a user-defined
            model.

    Raises:
        UserError: There is no such model, or it can't be imported or called.

    Example:
        module = find_model("lenet5")(input_shape=(1, 28, 28), classes=10)
    """
    if name.startswith(TORCHVISION):
        return torchvision_model(name.removeprefix(TORCHVISION))
    if name.startswith(TRANSFORMERS):
        return transformers_model(name.removeprefix(TRANSFORMERS))
    if name.startswith(TIMM):
        return timm_model(name.removeprefix(TIMM))
    if is_user_defined(name):
        model: Callable[..., nn.Module] = import_object(name, "model.name")
        if not callable(model):
            raise UserError(
                f"model.name={name} is not a class or function that makes a model, but {type(model).__name__}"
            )
        return model
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}{near_miss(name, MODELS)}; a user-defined one is named as {FORMS}")
    return MODELS[name]


def options_of(model: Callable[..., nn.Module]) -> dict[str, inspect.Parameter]:
    """Returns the options of a model, which a configuration sets as ``model.<option>``. ``model`` is the class or
    function that makes it. Its options are all its arguments except ``input_shape`` and ``classes``; the result is a
    dict of these arguments (:class:`inspect.Parameter`) by name.

    Raises :class:`UserError` if Python can't read the arguments of ``model``, as for some compiled functions.
    """
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        raise UserError(
            f"model=... must be a module, or a class or function that makes one, not {type(model).__name__}"
        ) from None
    return {name: p for name, p in parameters.items() if name not in ("input_shape", "classes")}


def build(
    model: Callable[..., nn.Module], name: str, input_shape: Any, classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Makes a module by calling ``model``, and checks that fedray can train it.

    Args:
        model: The class or function that makes the module.
        name: The model's name in error messages.
        input_shape: The shape of one sample, which is passed to ``model`` if it has an argument of this name. For
            samples of several tensors it is a tuple or dict of shapes.
        classes: The number of classes, which is passed to ``model`` if it has an argument of this name.
        options: The other arguments for ``model``, by name.

    Raises:
        UserError: ``model`` failed, or returned something that fedray can't train: no module, a TorchScript module, or
            a module with lazy layers, whose sizes are unknown.
    """
    offered = {"input_shape": input_shape, "classes": classes}
    asked = {key: value for key, value in offered.items() if key in inspect.signature(model).parameters}
    hint = f" ({CHANNELS_FIRST})" if seems_channels_last(input_shape) else ""
    with as_user_error(f"model {name} can't be made for inputs {_as_text(input_shape)}{hint} and {classes} classes"):
        module = model(**asked, **options)
    if not isinstance(module, nn.Module):
        raise UserError(f"model {name} must be a torch.nn.Module, not {type(module).__name__}")
    require_trainable_kind(module, f"model {name}")
    if any(nn.parameter.is_lazy(value) for value in module.state_dict().values()):
        raise UserError(f"model {name} has lazy layers, whose sizes are unknown: give them their input sizes")
    return module


def _as_text(shape: Any) -> str:
    return str(shape if isinstance(shape, Mapping) else list(shape))
