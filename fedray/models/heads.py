"""Projection and prediction heads, which take the place of a model's last Linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedray.core.model import last_linear
from fedray.errors import UserError


class Head(nn.Module):
    """``hidden`` (d -> d), ReLU, ``projection`` (d -> width) = z, ``classifier`` (width -> classes), as in MOON's code.

    With ``predicts``, FedSiam-DA's prediction MLP besides: ``predictor`` (width -> width, BatchNorm, ReLU, width ->
    width) of z, which is not on the way to the logits.
    """

    def __init__(self, features: int, width: int, classes: int, predicts: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.projection = nn.Linear(features, width)
        if predicts:
            self.predictor = nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
            )
        # last, as the input of a model's last Linear is its representation
        self.classifier = nn.Linear(width, classes)

    def forward(self, h: Tensor) -> Tensor:
        return self.classifier(self.projection(F.relu(self.hidden(h))))


def add_head(module: nn.Module, kind: str, width: int, name: str) -> None:
    """Put a head of a ``kind`` (moon or siam) in the place of the last Linear of ``module``, the model ``name``.

    Raises :class:`UserError` for a model that has no representation.
    """
    found = last_linear(module)
    if found is None:
        raise UserError(f"model.head={kind}: model {name} has no Linear layer whose input could be its representation")
    if all(parameter.startswith(f"{found}.") for parameter, _ in module.named_parameters()):
        raise UserError(f"model.head={kind}: model {name} has no representation, its classifier is its only layer")
    parent, _, child = found.rpartition(".")
    last = module.get_submodule(found)
    setattr(module.get_submodule(parent), child, Head(last.in_features, width, last.out_features, kind == "siam"))  # type: ignore[arg-type]
