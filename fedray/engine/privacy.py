"""Makes the mean of clipped updates private at the server (``privacy``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fedray.core.vectors import Vector
from fedray.engine.clipping import CLIP, UPLOADED_MODEL, WITHIN
from fedray.engine.state.run import RunState
from fedray.experiment.experiment import Experiment
from fedray.experiment.privacy import Privacy


def clip_of(state: RunState, privacy: Privacy) -> float:
    """Returns the length to which updates are clipped in this round."""
    server = state.server
    return float(server[CLIP]) if CLIP in server.vectors else privacy.mechanism.clip


def with_clip(shared: Mapping[str, Vector], state: RunState, privacy: Privacy | None) -> dict[str, Vector]:
    """Returns what the server broadcasts, with the length to which updates are clipped if the run is private."""
    if privacy is None:
        return dict(shared)
    return {**shared, CLIP: torch.tensor([clip_of(state, privacy)], device=state.device)}


def released(sums: Mapping[str, Any], state: RunState, privacy: Privacy | None) -> Mapping[str, Any]:
    """Returns what the server's rule gets in place of ``sums``: the model x plus the private mean of updates. Without
    any clients that is noise alone, so that nobody sees whether there were some. Sets the length to which the next
    updates are clipped."""
    if privacy is None:
        return sums
    server, mechanism, clip = state.server, privacy.mechanism, clip_of(state, privacy)
    count = state.layout.parameters
    total = sums.get(UPLOADED_MODEL, torch.zeros(state.layout.width, device=state.device))
    mean = torch.zeros_like(total)
    mean[:count] = mechanism.mean(total[:count], clip, server.round)
    within = float(sums.get(WITHIN, 0.0))
    clip = mechanism.next_clip(clip, within, len(server.cohort.ids), server.round)
    if mechanism.adaptive:
        server[CLIP] = torch.tensor([clip], device=state.device)
    return {UPLOADED_MODEL: server["x"] + mean}


def privacy_spent(experiment: Experiment, rounds: int) -> dict[str, float | None]:
    """Returns what a private run of so many ``rounds`` has spent, for summary.json: its epsilon, None without noise, at
    its delta."""
    if experiment.privacy is None:
        return {}
    accountant = experiment.privacy.accountant
    epsilon = accountant.epsilon(rounds)
    return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": accountant.delta}


def privacy_columns(experiment: Experiment, state: RunState, number: int) -> dict[str, float]:
    """Returns the columns of metrics.csv of round ``number``, which is about to begin: the length to which its updates
    are clipped, and if it is evaluated the epsilon of the run up to its end, which takes a moment to compute."""
    privacy = experiment.privacy
    if privacy is None:
        return {}
    clip = {"clip_norm": clip_of(state, privacy)}
    return clip | ({"epsilon": privacy.accountant.epsilon(number)} if experiment.is_evaluated(number) else {})
