"""What clients have sent that updates of later rounds will use (``system.mode=buffered``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import Cohort
from fedray.core.vectors import Layout, Model, Vector, row_of
from fedray.errors import UserError

PREFIX = "pending"
"""The first word of the names under which checkpoints have these sums."""


class Pending:
    """Sums of uploads that wait for their updates, and what training has reported of the clients meanwhile. ``layout``
    says where the parameters are in a model's row of numbers.

    A sum of models is a difference from the model that the clients began with, float64, so that it can be added to any
    other model. Its buffers, such as running statistics, are the sum itself, because they are averaged and not moved.
    Buffers of whole numbers, such as counts, are those of the client with the lowest number, as in synchronous rounds.
    Two further numbers at its end are the sum of the clients' weights, and that client. ``sums`` maps the number of an
    update and the name of an upload to the sum.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sums: dict[tuple[int, str], Tensor] = {}
        self._models: set[str] = set()
        self._rows: dict[int, dict[str, float]] = {}

    def add(self, update: int, name: str, total: Vector, cohort: Cohort, x: Model) -> None:
        """Adds ``total``, the sum of an upload over the clients of ``cohort`` with its weights, which began with the
        model ``x``, to what the update of round ``update`` will use."""
        row = row_of(total).double()
        if isinstance(total, Model):
            self._models.add(name)
            weight, width = math.fsum(cohort.weights), self.layout.width
            row = torch.cat([row, row.new_tensor([weight, min(cohort.ids)])])
            row[:width] -= weight * x.row[:width].double()
        there = self.sums.get((update, name))
        if there is not None and name in self._models:
            # whole numbers, and whose they are, are not added up
            other = row if there[-1] <= row[-1] else there
            for place in (*self.layout.whole_numbers, slice(-1, None)):
                other[place] = 0
        self.sums[update, name] = row if there is None else there.add_(row)

    def take(self, update: int, x: Model) -> dict[str, Vector]:
        """Removes the sums for the update of round ``update``, and returns them by the upload's name: a model has the
        parameters of the server's model ``x``, moved by the difference, the mean of the clients' buffers, in which
        those of ``x`` have the weight that is left, and one client's whole numbers."""
        found: dict[str, Vector] = {}
        for key in [key for key in self.sums if key[0] == update]:
            row = self.sums.pop(key)
            found[key[1]] = self._moved(x, row[:-2], float(row[-2])) if key[1] in self._models else row.float()
        return found

    def _moved(self, x: Model, row: Tensor, weight: float) -> Model:
        now = x.row.double()
        kept = torch.full_like(now, 1 - weight)
        kept[: self.layout.width] = 1
        for place in self.layout.whole_numbers:
            kept[place] = 0
        return self.layout.rounded(kept * now + row)

    def note(self, start: int, values: Mapping[str, float | None]) -> None:
        """Keeps what training has reported of the client whose start has the number ``start``, by column."""
        self._rows[start] = {name: math.nan if value is None else value for name, value in values.items()}

    def rows_of(self, starts: Sequence[int]) -> dict[str, list[float]]:
        """Removes what was kept of some starts, and returns it as columns, in their order."""
        rows = [self._rows.pop(start, {}) for start in starts]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name, math.nan) for row in rows] for name in names}

    def vectors(self) -> dict[str, Vector]:
        """Returns the sums by names that checkpoints have."""
        return {
            f"{PREFIX} {update} {int(name in self._models)} {name}": row for (update, name), row in self.sums.items()
        }

    def record(self) -> dict[str, Any]:
        """Returns what checkpoints store as JSON."""
        return {str(start): row for start, row in self._rows.items()}

    def restore(self, vectors: dict[str, Vector], record: Mapping[str, Mapping[str, float]]) -> None:
        """Takes the sums out of ``vectors``, those of a checkpoint, and the rest from ``record``."""
        self.sums, self._models = {}, set()
        for key in [key for key in vectors if key.startswith(f"{PREFIX} ")]:
            _, update, is_model, name = key.split(" ", 3)
            row = vectors.pop(key)
            assert isinstance(row, Tensor)
            self.sums[int(update), name] = row
            if int(is_model) and len(row) != self.layout.row_width + 2:
                raise UserError("the checkpoint has pending updates of another version of fedray")
            if int(is_model):
                self._models.add(name)
        self._rows = {int(start): dict(row) for start, row in record.items()}
