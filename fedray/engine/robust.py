"""Puts gathered uploads together where a robust rule takes the place of their mean, after an attack on them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedray.algorithms.messages import MEANS
from fedray.core.seeds import SERVER, Purpose, every_rng
from fedray.core.vectors import Model, Vector, row_of
from fedray.engine.state.run import RunState
from fedray.experiment.robust import Robust
from fedray.robust.results import aggregated

KEPT = "aggregate of"
"""The beginning of the names of the server's vectors that a rule needs in the next round."""


def robust_sums(
    sums: Mapping[str, Vector],
    gathered: Mapping[str, str],
    robust: Robust | None,
    state: RunState,
    tell: Callable[[str], None],
) -> Mapping[str, Vector] | None:
    """Lets Byzantine clients attack the gathered uploads in ``sums``, and returns the sums with what the robust rule
    makes of each in place of its mean. The result is None if too few clients have answered for the rule: the server
    then has nothing to do, as in a round without clients.

    Args:
        sums: The uploads by name, with a row for each client where they are ``gathered``.
        gathered: The kind of each gathered upload, such as "weighted_mean".
        robust: The rule and the attack, None if there are none.
        state: The state of the run.
        tell: Shows a line to the user.
    """
    if robust is None:
        return sums
    found, answered = dict(sums), len(state.server.cohort.ids)
    if any(kind in MEANS for kind in gathered.values()) and answered < robust.rule.least():
        tell(
            f"round {state.server.round}: {answered} clients have answered, and train.aggregation needs "
            f"{robust.rule.least()}: the server's model stays as it is, and all that it keeps"
        )
        return None
    for place, (name, kind) in enumerate(gathered.items()):
        value = sums[name]
        rows = row_of(value)
        updates, base = _updates(value, state)
        with _seeded(name, robust, state):
            if robust.attackers is not None:
                sent = _sent(rows, state)
                attacked, ids, number = updates[:, sent].flatten(1), state.server.cohort.ids, state.server.round
                attacked = robust.attackers.upload(attacked, ids, number, name, place)
                updates[:, sent] = attacked.view_as(updates[:, sent])
            if kind in MEANS:
                total = base + _together(name, kind, updates, isinstance(value, Model), robust, state)
                found[name] = _as_before(value, total, rows[0], state)
            else:
                found[name] = _as_before(value, updates.double() + base, rows, state)
    return found


def _seeded(name: str, robust: Robust, state: RunState) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a user-defined rule or attack may draw from the global generators: they are seeded by
    ``run.seed``, the round and the ``name`` of the upload."""
    if not robust.user_code:
        return contextlib.nullcontext()
    server, place = state.server, zlib.crc32(f"train.aggregation {name}".encode())
    return every_rng(server.seed, Purpose.ALGORITHM, server.round, SERVER, place)


def _together(name: str, kind: str, updates: Tensor, is_model: bool, robust: Robust, state: RunState) -> Tensor:
    """Returns what the rule makes of the ``updates [m, ...]``, those of models or of vectors, float64."""
    server, flat = state.server, updates.flatten(1)
    uniform = [1 / len(flat)] * len(flat)
    weights = torch.tensor(server.cohort.weights if kind == "weighted_mean" else uniform, device=flat.device)
    key = f"{KEPT} {name}"
    # lengths and distances are those of parameters; running statistics are averaged, and have no history
    width = state.layout.width if is_model else flat.shape[1]
    finite = flat.isfinite().all(dim=1)
    shares = weights[finite].double() / weights[finite].double().sum()
    mean = (shares @ flat[finite][:, width:].double()).float()
    before = server[key][:width] if key in server.vectors else None
    where = f"the upload {name!r} of round {server.round}"
    made = torch.cat([aggregated(robust.rule, flat[:, :width], weights, before, where), mean])
    if robust.rule.keeps:
        server[key] = made
    return made.double().view_as(updates[0])


def _updates(value: Vector, state: RunState) -> tuple[Tensor, Tensor]:
    """Returns the rows of ``value`` as differences from the server's model, without what is not sent, float32, and what
    was taken from them, float64. Of vectors nothing is taken."""
    if not isinstance(value, Model):
        return value.clone(), torch.zeros_like(value[0], dtype=torch.float64)
    x = state.server["x"].row
    updates = value.row - x
    for part in state.layout.whole_numbers:
        updates[:, part] = 0
    if state.private is not None and state.server.round >= state.private_from:
        updates[:, state.private] = 0
    return updates, x.double()


def _sent(rows: Tensor, state: RunState) -> Tensor:
    """Returns the places of the numbers on which clients can lie: the parameters that they send, int64. Running
    statistics stay what they are, because nobody could evaluate a model with a negative variance."""
    if rows.shape[1:] not in ((state.layout.width,), (state.layout.row_width,)):
        return torch.arange(rows.shape[1], device=rows.device)
    places = torch.zeros(rows.shape[1], dtype=torch.bool)
    for slot in state.layout.slots:
        places[slot.start : slot.start + slot.size] = True
    if state.private is not None and state.server.round >= state.private_from:
        private = state.private.cpu()
        places[private[private < len(places)]] = False
    return places.nonzero().flatten().to(rows.device)


def _as_before(value: Vector, total: Tensor, rows: Tensor, state: RunState) -> Vector:
    """Returns ``total [..., d]``, float64, as a model or a vector like ``value``. Counts are those of ``rows``, because
    they are no numbers to be added."""
    if not isinstance(value, Model):
        return total.float()
    for part in state.layout.whole_numbers:
        total[..., part] = rows[..., part].double()
    return state.layout.rounded(total) if total.dim() == 1 else state.layout.model(total.float())
