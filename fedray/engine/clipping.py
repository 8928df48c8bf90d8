"""Clips what clients send in a private run (``privacy``)."""

from __future__ import annotations

from fedray.algorithms.base import Result, Upload
from fedray.algorithms.messages import MEANS
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model
from fedray.errors import UserError
from fedray.privacy import Mechanism

CLIP = "length to which updates are clipped"
"""The server's vector ``[1]``, which clients receive."""

UPLOADED_MODEL = "y"
"""The name of the model that clients upload, and in a private run of its clipped update."""

WITHIN = "updates that are not longer"
"""The name of the upload that counts updates which were not clipped (adaptive clipping)."""


def clipped(result: Result, client: ClientPhase, mechanism: Mechanism, width: int) -> Result:
    """Returns ``result``, which a phase has returned for C clients, with the sum of clipped updates in place of the
    mean of their models. ``width`` is that of an update.

    Raises :class:`UserError` if the phase sends anything else.
    """
    upload, x = result.uploads.get(UPLOADED_MODEL), client.shared.get("x")
    alone = len(result.uploads) == 1 and not result.scalars and isinstance(x, Model)
    if upload is None or not isinstance(upload.value, Model) or upload.weights not in MEANS or not alone:
        names = ", ".join([*result.uploads, *result.scalars])
        raise UserError(f"privacy: clients may send one thing, the mean of their models y, and they send {names}")
    updates = upload.value - client.shared["x"]
    if client.private is not None:
        updates[:, client.private.columns[client.private.columns < width]] = 0
    updates, within = mechanism.clipped(updates, client.shared[CLIP])
    sent = {UPLOADED_MODEL: Upload.sum(updates)} | ({WITHIN: Upload.sum(within)} if mechanism.adaptive else {})
    return Result(sent, result.state, kept=result.kept)
