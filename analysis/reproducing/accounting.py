"""What a cell of a published table costs, as its paper counts it."""

from __future__ import annotations

from functools import lru_cache

from fedray.experiment.costs import compare_algorithms
from fedray.tracking import costs
from fedray.tracking.cost_tables import GIB, Candidate, Scenario
from reproducing.published import Cell


def gflops_of_a_round(cell: Cell) -> float:
    """Returns the GFLOPs of one client in a round, by FedTrip's accounting (its Table V)."""
    candidate, scenario = _costs_of(cell)
    work, parameters = candidate.algorithm.work, scenario.plain.parameters
    return costs.fedtrip_flops(work, scenario.forward, parameters, scenario.load) / 1e9


def gib_of_a_run(cell: Cell) -> float:
    """Returns the GiB of one client in one direction in a whole run, by GHBM's accounting (its Table 4)."""
    candidate, scenario = _costs_of(cell)
    return costs.ghbm_bytes(candidate.algorithm, candidate.facts.parameters, scenario.rounds) / GIB


@lru_cache(maxsize=256)
def _costs_of(cell: Cell) -> tuple[Candidate, Scenario]:
    config = cell.config({})
    candidates, scenario, _ = compare_algorithms(config)
    (candidate,) = [each for each in candidates if each.name == config.algorithm.name]
    return candidate, scenario
