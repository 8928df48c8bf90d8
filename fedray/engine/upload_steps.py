"""Lets what clients upload pass the steps of ``train.upload``, on its way from the clients to the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms.base import Result, Upload
from fedray.client.phase import ClientPhase
from fedray.core.upload import UploadRows, UploadStep
from fedray.core.vectors import Model, Vector
from fedray.engine.clients import Clients
from fedray.engine.tasks import Handle
from fedray.errors import UserError
from fedray.tracking.diagnostics import UPDATE
from fedray.usercode.importing import as_user_error

MOST_UPLOADS = 1 << 16
"""More uploads than any phase has. It tells the random streams of the steps apart."""


class UploadSteps:
    """The steps of a run, for ``clients`` in this process."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.steps = clients, clients.experiment.upload

    @torch.no_grad()
    def apply(self, result: Result, client: ClientPhase, phase: str, handles: Sequence[Handle | None]) -> Result:
        """Returns ``result`` with uploads that have passed all steps, and with what the steps keep as further parts of
        the clients' state. ``handles`` name the states with which the clients began the round."""
        uploads: dict[str, Upload] = {}
        kept: dict[str, Vector] = {}
        for number, (name, upload) in enumerate(result.uploads.items()):
            if name == UPDATE:
                # what run.diagnostics measures, and nobody sends
                uploads[name] = upload
                continue
            rows, base = self._rows_of(upload.value, client)
            for place, step in enumerate(self.steps):
                of_rows = UploadRows(
                    name, phase, client.round, client.stack.ids, self.clients.experiment.training.seed,
                    place * MOST_UPLOADS + number,
                )  # fmt: skip
                label = f"step {place + 1} of upload {name}"
                if getattr(step, "keeps", False):
                    of_rows.kept = self.clients.kept(handles, label, rows.shape[1])
                rows = _checked(step, rows, of_rows)
                if of_rows.kept is not None:
                    kept[label] = of_rows.kept
            uploads[name] = replace(upload, value=self._value_of(rows, upload.value, base))
        # a file has all that a client keeps; what the phase does not return stays as it was
        state = {**client.state, **result.state, **kept} if kept else result.state
        return replace(result, uploads=uploads, state=state)

    def _rows_of(self, value: Vector, client: ClientPhase) -> tuple[Tensor, Tensor | None]:
        """Returns the rows ``[C, parameters]`` that steps get of an upload, and the model's parameters to which they
        are an update; None for a vector, and for a model of an algorithm that broadcasts none called x."""
        count = self.clients.network.layout.parameters
        if not isinstance(value, Model):
            return value[:, :count].clone(), None
        sent = client.shared.get("x")
        if not isinstance(sent, Model):
            return value.parameters[:, :count].clone(), None
        base = sent.parameters[..., :count]
        return value.parameters[:, :count] - base, base

    def _value_of(self, rows: Tensor, value: Vector, base: Tensor | None) -> Vector:
        """Returns an upload like ``value``, with the rows that all steps have returned."""
        count = rows.shape[1]
        rows = rows if base is None else rows + base
        if isinstance(value, Model):
            parameters = torch.cat([rows, value.parameters[:, count:]], dim=1)
            return value.with_parameters(parameters)
        return torch.cat([rows, value[:, count:]], dim=1)


def _checked(step: UploadStep, rows: Tensor, upload: UploadRows) -> Tensor:
    """Returns what ``step`` makes of ``rows``. Raises :class:`UserError` if it fails, or returns something else."""
    name = getattr(step, "__name__", type(step).__name__)
    with as_user_error(f"train.upload: {name} failed on the upload {upload.name!r} of round {upload.round}"):
        found: Any = step(rows, upload)
    for what, value in (("return", found), *([("keep", upload.kept)] if getattr(step, "keeps", False) else [])):
        if not isinstance(value, Tensor) or value.shape != rows.shape or value.dtype != rows.dtype:
            form = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"train.upload: {name} must {what} rows {list(rows.shape)} {rows.dtype}, not {form}")
    result: Tensor = found
    return result
