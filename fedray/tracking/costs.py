"""What a round costs the simulated clients: bytes and FLOPs, and not what the simulator itself moves."""

from __future__ import annotations

from fedray.algorithms import Algorithm, Server, Traffic
from fedray.models.inspection import ModelFacts

BYTES_PER_NUMBER = 4


def bytes_per_client(traffic: Traffic, facts: ModelFacts) -> tuple[int, int]:
    """Bytes down and up of one client in one round: models with their buffers, state vectors without."""
    model = BYTES_PER_NUMBER * (facts.parameters + facts.buffers)
    vector = BYTES_PER_NUMBER * facts.parameters
    down = traffic.models_down * model + traffic.vectors_down * vector
    up = traffic.models_up * model + traffic.vectors_up * vector
    return round(down), round(up)


def flops_of_round(algorithm: Algorithm, server: Server, facts: ModelFacts, samples: int) -> float:
    """Forward and backward (3 forwards) of ``samples`` samples over all local steps, plus the algorithm's extras."""
    work, cohort = algorithm.work, server.cohort
    passes = (3 + work.forwards + 2 * work.backwards) * samples + 3 * work.full_gradients * sum(cohort.sizes)
    arithmetic = work.per_step * sum(cohort.steps) + work.once * len(cohort.ids)
    return facts.flops * passes + facts.parameters * arithmetic + algorithm.server_flops(server, facts.flops)
