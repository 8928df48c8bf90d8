"""Puts gathered uploads together where a robust rule takes the place of their mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fedray.core.vectors import Model, Vector
from fedray.engine.state.run import RunState
from fedray.experiment.robust import Robust

KEPT = "aggregate of"
"""The beginning of the names of the server's vectors that a rule needs in the next round."""


def robust_sums(
    sums: Mapping[str, Vector], means: Collection[str], robust: Robust | None, state: RunState
) -> Mapping[str, Vector]:
    """Returns the ``sums`` of what clients have sent, in which what ``robust`` makes of their rows takes the place of
    the uploads ``means``, of which ``sums`` has a row for each client. Byzantine clients have attacked before."""
    if robust is None:
        return sums
    return {
        name: _together(name, place, value, robust, state) if name in means else value
        for place, (name, value) in enumerate(sums.items())
    }


def _together(name: str, place: int, value: Vector, robust: Robust, state: RunState) -> Vector:
    server, cohort = state.server, state.server.cohort
    rows = value.row if isinstance(value, Model) else value
    base = server["x"].row if isinstance(value, Model) else torch.zeros_like(rows[0])
    updates = rows - base
    counts = state.layout.whole_numbers if isinstance(value, Model) else ()
    for part in counts:
        updates[:, part] = 0
    if isinstance(value, Model) and state.private is not None:
        updates[:, state.private] = 0
    if robust.attack is not None:
        updates = robust.attack.upload(updates, cohort.ids, server.round, place)
    weights = torch.tensor(cohort.weights, device=rows.device, dtype=torch.float32)
    key = f"{KEPT} {name}"
    found = robust.rule(updates, weights, server[key] if key in server.vectors else None)
    if robust.rule.keeps:
        server[key] = found
    if not isinstance(value, Model):
        return base + found
    total = base.double() + found.double()
    for part in counts:
        total[part] = rows[0, part].double()
    return state.layout.rounded(total)
