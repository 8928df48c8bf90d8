"""What clients keep of their models (:mod:`fedray.core.private`), in the models that they receive and send."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedray.core.vectors import Model, Vector, row_of


@dataclass(frozen=True)
class PrivateRows:
    """The private layers of C clients that are trained together.

    ``columns`` int64 ``[k]`` says where they are in a model's row, and ``rows`` ``[C, k]`` has the clients' own numbers
    for these places. ``known`` bool ``[C, 1]`` is false for a client that has none yet, because it never took part.
    """

    columns: Tensor
    rows: Tensor
    known: Tensor

    def within(self, model: Model) -> Model:
        """Returns C models, one for each client: ``model`` with the client's own private layers. A client without any
        gets those of ``model``, which are the initial ones."""
        row = model.row.expand(len(self.rows), -1).clone()
        row[:, self.columns] = torch.where(self.known, self.rows, row[:, self.columns])
        return Model(row, model.width)

    def of(self, models: Model) -> Tensor:
        """Returns the private layers of C ``models``, ``[C, k]``."""
        return models.row[:, self.columns]

    def shared(self, parameters: int) -> Tensor:
        """Returns the places of the other parameters, int64, of a model that has so many ``parameters``."""
        others = torch.ones(parameters, dtype=torch.bool, device=self.columns.device)
        others[self.columns[self.columns < parameters]] = False
        return others.nonzero().flatten()

    def without(self, value: Vector, width: int) -> Vector:
        """Returns C models or vectors of which nothing private is left: there are zeros in its place. ``width`` is that
        of vectors with a number for each parameter; others have nothing private."""
        if not isinstance(value, Model) and value.shape[1:] != (width,):
            return value
        row = row_of(value).clone()
        row[:, self.columns[self.columns < row.shape[1]]] = 0
        return Model(row, value.width) if isinstance(value, Model) else row
