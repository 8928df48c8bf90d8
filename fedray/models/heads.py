"""Projection and prediction heads, which take the place of a model's last Linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.core.network import Predicting
from fedray.errors import UserError
from fedray.importing import blamed


class ProjectionHead(nn.Module):
    """``hidden`` (d -> d), ReLU, ``projection`` (d -> width) = z, ``classifier`` (width -> classes), as in MOON."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.projection = nn.Linear(features, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.projection(F.relu(self.hidden(input))))


class SiamHead(ProjectionHead, Predicting):
    """The same with FedSiam-DA's prediction MLP beside it: ``predictor`` (width -> width, BatchNorm, ReLU, width ->
    width) of z, which is not on the way to the logits."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.predictor = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        )


HEADS = {"moon": ProjectionHead, "siam": SiamHead}


def add_head(module: nn.Module, kind: str, width: int, name: str, example: Tensor) -> None:
    """Put a head of a ``kind`` in the place of the Linear that ``module``, the model ``name``, calls last.

    ``example [b, ...]``: inputs to try it with. Raises :class:`UserError` for a model that has no representation: none
    ``[b, d]`` that enters a last Linear, or nothing trained before it.
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
    head = HEADS[kind](last.in_features, width, last.out_features)
    for place, layer in list(module.named_modules(remove_duplicate=False)):
        if layer is last:
            parent, _, child = place.rpartition(".")
            setattr(module.get_submodule(parent), child, head)


def _last_call(module: nn.Module, name: str, example: Tensor) -> tuple[nn.Linear | None, torch.Size]:
    """The Linear that is called last in a forward pass, and the shape of its input."""
    calls: list[tuple[nn.Linear, torch.Size]] = []

    def remember(layer: nn.Linear, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        calls.append((layer, (inputs[0] if inputs else named["input"]).shape))

    hooks = [
        layer.register_forward_pre_hook(remember, with_kwargs=True)
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    takes = blamed(f"model {name} can't take inputs of shape {list(example.shape[1:])}")
    with takes, torch.random.fork_rng(devices=[]), torch.no_grad():
        module.eval()(example)
    module.train()
    for hook in hooks:
        hook.remove()
    return calls[-1] if calls else (None, torch.Size())
