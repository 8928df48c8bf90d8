"""Applies the steps of ``train.upload`` to clients' uploads, before these are summed."""

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
from fedray.engine.row_check import mixing_step
from fedray.engine.tasks import Handle
from fedray.errors import UserError
from fedray.gradients.known_code import is_of_known
from fedray.tracking.diagnostics import LOCAL_UPDATE
from fedray.usercode.importing import as_user_error

MOST_UPLOADS = 1 << 16
"""More uploads than any phase has. With this number each upload step gets its own stream of random numbers for
each upload."""


class UploadSteps:
    """Applies the steps of ``train.upload``, functions such as clipping or noise, to the uploads of clients in this
    process. ``clients`` has the steps, the network, and the clients' states, which also contain what the steps have
    stored for each client in earlier rounds."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.steps = clients, clients.experiment.upload
        self._to_try = {place for place, step in enumerate(self.steps) if not is_of_known(step)}

    @torch.no_grad()
    def apply(self, result: Result, client: ClientPhase, phase: str, handles: Sequence[Handle | None]) -> Result:
        """Applies all steps of ``train.upload`` to the uploads of clients that are trained together; steps get nothing
        of private layers. Returns ``result``, which the algorithm's ``phase`` (its name) has returned for these
        clients, with the changed uploads. What the steps store for later rounds is added to the clients' new states in
        the result.

        ``client`` is the object that the phase got, which stands for all of these clients. ``handles`` has for each
        client a reference to the state with which it began the round, or None if it had no state.
        """
        layout, experiment = self.clients.network.layout, self.clients.experiment
        earlier = (*experiment.algorithm.phases, phase).index(phase) * len(self.steps)
        uploads: dict[str, Upload] = {}
        kept: dict[str, Vector] = {}
        for number, (name, upload) in enumerate(result.uploads.items()):
            of_parameters = isinstance(upload.value, Model) or upload.value.shape[1:] == (layout.width,)
            if name == LOCAL_UPDATE or not of_parameters:
                # the update that run.diagnostics measures, which no real client would send; or other numbers
                uploads[name] = upload
                continue
            rows, base = self._rows_of(upload.value, client)
            whole, shared = rows, None if client.private is None else client.private.shared(rows.shape[1])
            rows = rows if shared is None else rows[:, shared]
            for place, step in enumerate(self.steps if rows.shape[1] else ()):
                of_rows = UploadRows(
                    name, phase, client.round, client.stack.ids, experiment.training.seed,
                    (earlier + place) * MOST_UPLOADS + number,
                )  # fmt: skip
                label = f"step {place + 1} of upload {name}"
                if getattr(step, "keeps", False):
                    of_rows.kept = self.clients.kept(handles, label, rows.shape[1])
                if place in self._to_try and len(rows) > 1:
                    self._to_try.remove(place)
                    rows = self._tried(step, rows, of_rows)
                else:
                    rows = _checked(step, rows, of_rows)
                if of_rows.kept is not None:
                    kept[label] = of_rows.kept
            if shared is not None:
                rows = torch.zeros_like(whole).index_copy_(1, shared, rows)
            uploads[name] = replace(upload, value=self._value_of(rows, upload.value, base))
        # the file has everything that a client keeps, so vectors that the phase does not return are copied
        state = {**client.state, **result.state, **kept} if kept else result.state
        return replace(result, uploads=uploads, state=state)

    def _tried(self, step: UploadStep, rows: Tensor, upload: UploadRows) -> Tensor:
        """As :func:`_checked`, and tells the user if the step mixes clients."""
        before, kept = rows.clone(), None if upload.kept is None else upload.kept.clone()
        found = _checked(step, rows, upload)

        def alone(row: int) -> Tensor:
            one = slice(row, row + 1)
            of_it = replace(upload, clients=upload.clients[one], kept=None if kept is None else kept[one].clone())
            return step(before[one].clone(), of_it)

        if line := mixing_step(_name(step), found, alone):
            self.clients.say(line)
        return found

    def _rows_of(self, value: Vector, client: ClientPhase) -> tuple[Tensor, Tensor | None]:
        """Returns the rows ``[C, parameters]`` that the steps get for the upload ``value``, and what was
        subtracted from them. For a model the rows are the update y_i - x, where x is the model that the server
        sent, by the name x or as its only one, and whose parameters were subtracted. The second value is None for a
        vector, and if the algorithm broadcasts no such model."""
        count = self.clients.network.layout.parameters
        if not isinstance(value, Model):
            return value[:, :count].clone(), None
        models = {name: each for name, each in client.shared.items() if isinstance(each, Model)}
        only = next(iter(models.values())) if len(models) == 1 else None
        sent = models.get("x", only)
        if sent is None:
            return value.parameters[:, :count].clone(), None
        base = sent.parameters[..., :count]
        return value.parameters[:, :count] - base, base

    def _value_of(self, rows: Tensor, value: Vector, base: Tensor | None) -> Vector:
        """Returns the upload that is sent: the ``rows`` after all steps as a model or vector, like ``value`` before the
        steps. ``base`` is what :meth:`_rows_of` subtracted."""
        count = rows.shape[1]
        rows = rows if base is None else rows + base
        if isinstance(value, Model):
            parameters = torch.cat([rows, value.parameters[:, count:]], dim=1)
            return value.with_parameters(parameters)
        return torch.cat([rows, value[:, count:]], dim=1)


def _checked(step: UploadStep, rows: Tensor, upload: UploadRows) -> Tensor:
    """Returns ``step(rows, upload)``. Raises :class:`UserError` if the step fails, or returns or keeps anything but
    rows of the same shape and type."""
    name = _name(step)
    with as_user_error(f"train.upload: {name} failed on the upload {upload.name!r} of round {upload.round}"):
        found: Any = step(rows, upload)
    for what, value in (("return", found), *([("keep", upload.kept)] if getattr(step, "keeps", False) else [])):
        if not isinstance(value, Tensor) or value.shape != rows.shape or value.dtype != rows.dtype:
            form = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"train.upload: {name} must {what} rows {list(rows.shape)} {rows.dtype}, not {form}")
    result: Tensor = found
    return result


def _name(step: UploadStep) -> str:
    return str(getattr(step, "__name__", type(step).__name__))
