"""Heads: layers that replace a model's last Linear layer and give the model a representation z, a vector for each
sample."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.core.structure import call_on_copies, leaves
from fedray.errors import UserError, near_miss
from fedray.gradients.passes import Predicting
from fedray.usercode.importing import FORMS, as_user_error, import_object, is_user_defined


class Head(nn.Module):
    """The base class of heads, layers that replace a model's last Linear layer and give the model a representation z: a
    vector for each sample that some algorithms, such as MOON, compare between models. A user-defined head is named by
    ``model.head=file.py:Class``.

    A head maps features ``[b, features]`` to logits ``[b, classes]``. The input of the Linear layer that it calls last
    is the representation z.

    Args:
        features: The number of inputs of the layer that the head replaces.
        width: ``model.proj_dim``, the intended width of the representation.
        classes: The number of outputs.

    Example:
        class Narrow(Head):
            def __init__(self, features, width, classes):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))

            def forward(self, x):
                return self.layers(x)
    """


class LinearHead(Head):
    """A head of a single linear layer, like the last layer of the model that it replaces. The representation z is its
    input, so z has ``features`` numbers, and ``width`` is not used. The other arguments are those of :class:`Head`."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = self.classifier(input)
        return logits


class ProjectionHead(Head):
    """The head of MOON's paper (Li, He, Song, CVPR 2021), which replaces a model's last Linear layer by three:
    ``hidden`` (d -> d) with ReLU, ``projection`` (d -> width), whose output is the representation z, and ``classifier``
    (width -> classes). Here d is ``features``, the number of inputs."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.projection = nn.Linear(features, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.projection(F.relu(self.hidden(input))))
        return logits


class SiamHead(ProjectionHead, Predicting):
    """The head of FedSiam-DA's paper (Yang et al., 2022): the layers of MOON's head (:class:`ProjectionHead`), and an
    MLP, ``predictor``, which does not contribute to the logits.

    The predictor takes the representation z: Linear (width -> width), BatchNorm, ReLU, Linear (width -> width). The
    arguments are those of :class:`Head`.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.predictor = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        )


HEADS: dict[str, type[Head]] = {"linear": LinearHead, "moon": ProjectionHead, "siam": SiamHead}

DEFAULT = {"nothing": "none", "features": "linear", "projection": "moon", "prediction": "siam"}
"""The head that ``model.head=auto`` selects for each value of ``Algorithm.needs_head``."""


def in_words(need: str) -> str:
    """Returns a value of ``Algorithm.needs_head`` with its article."""
    return need if need == "features" else f"a {need}"


def find_head(name: str) -> type[Head] | None:
    """Finds the class of a head (layers that replace a model's last one) by its name in a configuration
    (``model.head``): ``linear``, ``moon``, ``siam``, or ``file.py:Class`` for a user-defined one. Returns None for
    ``none``, with which the model keeps its last layer.

    Raises :class:`UserError` if there is no such head.
    """
    if name == "none":
        return None
    if not is_user_defined(name):
        if name not in HEADS:
            hint = near_miss(name, ["auto", "none", *HEADS])
            raise UserError(f"unknown model.head {name!r}{hint}; a user-defined one is named as {FORMS}")
        return HEADS[name]
    found = import_object(name, "model.head")
    if not (isinstance(found, type) and issubclass(found, Head)):
        raise UserError(f"model.head={name} is not a subclass of fedray.models.Head")
    return found


def serves(name: str, need: str) -> bool:
    """Returns whether a model with the head ``name`` (a value of ``model.head``) has what an algorithm needs. ``need``
    is the algorithm's ``needs_head``: ``nothing``, ``features`` or ``projection`` (a representation z, the input of
    the last Linear layer), or ``prediction`` (also a predictor, a second network that takes z)."""
    head = find_head(name)
    if head is None:
        return need == "nothing"
    return need != "prediction" or issubclass(head, Predicting)


def add_head(module: nn.Module, head: type[Head], kind: str, width: int, name: str, example: Any) -> None:
    """Replaces the Linear layer that ``module`` calls last by a new ``head``, in place, so that the model has a
    representation z (the input of the head's last Linear layer).

    Args:
        module: The model, whose forward pass is tried to find its last Linear layer.
        head: The class of the head.
        kind: The head's name in error messages, a value of ``model.head``.
        width: The intended width of the representation, ``model.proj_dim``.
        name: The model's name in error messages.
        example: Inputs ``[b, ...]`` for the trial pass.

    Raises:
        UserError: The model has no representation: it calls no Linear layer, the input of the last one is not
            ``[b, d]``, or no other layer has parameters.
    """
    asked = f"model.head={kind}: model {name}"
    last, shape = _last_call(module, name, example)
    if last is None:
        raise UserError(f"{asked} calls no Linear layer whose input could be its representation")
    if len(shape) != 2:
        found = ", ".join(["b", *map(str, shape[1:])])
        raise UserError(f"{asked} has no representation [b, d]: its last Linear takes inputs [{found}]")
    within = set(last.parameters())
    if all(parameter in within for parameter in module.parameters()):
        raise UserError(f"{asked} has no representation, its classifier is its only layer")
    new = head(last.in_features, width, last.out_features)
    for place, layer in list(module.named_modules(remove_duplicate=False)):
        if layer is last:
            parent, _, child = place.rpartition(".")
            setattr(module.get_submodule(parent), child, new)


def _last_call(module: nn.Module, name: str, example: Any) -> tuple[nn.Linear | None, torch.Size]:
    """Finds the Linear layer that ``module`` calls last in a forward pass of ``example``. Returns the layer and the
    shape of its input, or None and an empty shape if no Linear layer is called. ``name`` is the model's name in error
    messages."""
    calls: list[tuple[nn.Linear, torch.Size]] = []

    def remember(layer: nn.Linear, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        calls.append((layer, (inputs[0] if inputs else named["input"]).shape))

    shapes = ", ".join(str(list(leaf.shape[1:])) for leaf in leaves(example))
    with contextlib.ExitStack() as hooks:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                hooks.enter_context(layer.register_forward_pre_hook(remember, with_kwargs=True))
        module.eval()
        with (
            as_user_error(f"model {name} can't take inputs of shape {shapes}"),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            call_on_copies(module, example)
    module.train()
    return calls[-1] if calls else (None, torch.Size())
