"""Counts what algorithms cost as two papers do, as far as that follows from their tables.

They are FedTrip (X. Li et al., IPDPS 2023) and GHBM (R. Zaccone et al., TMLR 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedray.algorithms import Algorithm, Traffic, Work
from fedray.algorithms.mime import Mime
from fedray.core.structure import arguments
from fedray.experiment.costs import compare_algorithms
from fedray.models.inspection import ModelFacts
from fedray.tracking import costs
from fedray.tracking.cost_tables import Candidate, CostTable, Scenario, load_text
from fedray.tracking.costs import Load
from reproducing.published import Cell

GIB = 2**30

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def fedtrip_table(candidates: Sequence[Candidate], scenario: Scenario) -> CostTable:
    """Returns the table by FedTrip's accounting (X. Li et al., IPDPS 2023, Tables V and VIII)."""
    forward = forward_of(scenario)
    load, rounds, parameters = scenario.load, scenario.rounds, scenario.plain.parameters
    columns = {
        "algorithm": "", "MFLOPs a round": ",.3f", f"GFLOPs in {rounds} rounds": ",.3f", "attached cost": "",
        "attached MFLOPs": ",.3f", "extra communication, |w|": "g",
    }  # fmt: skip
    rows = []
    for candidate in candidates:
        work = candidate.algorithm.work
        flops = fedtrip_flops(work, forward, parameters, load)
        attached = fedtrip_attached(work, forward, parameters, load)
        rows.append([
            candidate.name, flops / 1e6, rounds * flops / 1e9, attached_formula(work), attached / 1e6,
            fedtrip_communication(candidate.algorithm.traffic),
        ])  # fmt: skip
    notes = [
        f"One client, the mean one: {load_text(load)}. |w| = {parameters:,}; F = {forward:,.0f} "
        "multiply-adds of a sample's forward pass.",
        "A round costs n F (1 + P) + K a |w|, with P extra forward passes and a operations per parameter and step; "
        "backward passes are not counted.",
        "Attached to FedAvg's: K steps of M samples each, n samples in all, FP = F, BP = 2 F. All have the same model, "
        "without heads that only some need.",
    ]
    return CostTable(columns, rows, notes)


def ghbm_table(candidates: Sequence[Candidate], scenario: Scenario) -> CostTable:
    """Returns the table by GHBM's accounting (R. Zaccone et al., TMLR 2025, Table 4).

    It also has the bytes that are really exchanged.
    """
    columns = {"algorithm": "", "parameters": ",", "overhead": "g", "GiB": ".4g", "GiB of all": ".4g"}
    rows = []
    for candidate in candidates:
        algorithm, facts = candidate.algorithm, candidate.facts
        charged = ghbm_bytes(algorithm, facts.parameters, scenario.rounds)
        exchanged = sum(costs.bytes_per_client(algorithm.traffic, facts)) * scenario.cohort * scenario.rounds
        overhead = ghbm_overhead(algorithm)
        rows.append([candidate.name, facts.parameters, overhead, charged / GIB, exchanged / GIB])
    notes = [
        f"GiB: 4 bytes x parameters x {scenario.rounds:,} rounds x overhead, of one client in one direction.",
        f"GiB of all: what the {scenario.cohort} clients of each round exchange in both directions.",
    ]
    return CostTable(columns, rows, notes)


TABLES = {"fedtrip": fedtrip_table, "ghbm": ghbm_table}
"""The tables by whose accounting they are."""


def gflops_of_a_round(cell: Cell) -> float:
    """Returns the GFLOPs of one client in a round, by FedTrip's accounting (its Table V)."""
    candidate, scenario = _costs_of(cell)
    work, parameters = candidate.algorithm.work, scenario.plain.parameters
    return fedtrip_flops(work, forward_of(scenario), parameters, scenario.load) / 1e9


def gib_of_a_run(cell: Cell) -> float:
    """Returns the GiB of one client in one direction in a whole run, by GHBM's accounting (its Table 4)."""
    candidate, scenario = _costs_of(cell)
    return ghbm_bytes(candidate.algorithm, candidate.facts.parameters, scenario.rounds) / GIB


@lru_cache(maxsize=256)
def _costs_of(cell: Cell) -> tuple[Candidate, Scenario]:
    config = cell.config({})
    candidates, scenario, _ = compare_algorithms(config)
    (candidate,) = [each for each in candidates if each.name == config.algorithm.name]
    return candidate, scenario


def forward_of(scenario: Scenario) -> float:
    """Returns FedTrip's F of the model without a head that only some algorithms need."""
    return fedtrip_forward(scenario.build_plain(), scenario.plain, scenario.example)


def fedtrip_forward(module: nn.Module, facts: ModelFacts, example: Any) -> float:
    """Returns FedTrip's F: the operations of one sample's forward pass, for the inputs ``example [b, ...]``.

    They are the multiply-adds, and an addition for each output of a convolution with bias; biases of linear layers do
    not count. No other way of counting leads to the numbers of the paper's Table V.
    """
    biases = 0

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal biases
        biases += output[0].numel()

    biased = [layer for layer in module.modules() if isinstance(layer, CONVOLUTIONS) and layer.bias is not None]
    hooks = [layer.register_forward_hook(count) for layer in biased]
    with torch.no_grad():
        # some normalisation layers need two samples
        args, named = arguments(example)
        module.eval()
        module(*args, **named)
    for hook in hooks:
        hook.remove()
    return facts.flops / 2 + biases


def fedtrip_flops(work: Work, forward: float, parameters: int, load: Load) -> float:
    """Returns the cost of a round in FedTrip's Table V: n F (1 + P) + J a |w|.

    F is ``forward``, P the number of extra forward passes, a the operations for each parameter and step, and n the
    samples in all mini-batches, which in the paper's one epoch are those that the client holds. Backward passes are not
    counted, also not those of full-batch gradients.
    """
    passes = (1 + work.forwards) * load.seen + work.full_gradients * load.samples
    return forward * passes + parameters * costs.arithmetic(work, load)


def fedtrip_attached(work: Work, forward: float, parameters: int, load: Load) -> float:
    """Returns the cost that FedTrip's Table VIII adds to FedAvg's round, with FP = F (``forward``) and BP = 2 FP."""
    passes = (work.forwards + 2 * work.backwards) * load.seen + 3 * work.full_gradients * load.samples
    return forward * passes + parameters * costs.arithmetic(work, load)


def fedtrip_communication(traffic: Traffic) -> float:
    """Returns the extra communication of a round in FedTrip's Table VIII, in |w|."""
    return 2 * costs.overhead(traffic) - 2


def ghbm_overhead(algorithm: Algorithm) -> float:
    """Returns the overhead in GHBM's cost table, in models for each direction."""
    # Mime exchanges 2.5 models, but in two exchanges, for which the table charges 3
    return 3.0 if isinstance(algorithm, Mime) else costs.overhead(algorithm.traffic)


def ghbm_bytes(algorithm: Algorithm, parameters: int, rounds: int) -> float:
    """Returns the bytes in GHBM's cost table: those of one client that takes part in every round, in one direction."""
    return costs.BYTES_PER_NUMBER * parameters * rounds * ghbm_overhead(algorithm)


def attached_formula(work: Work) -> str:
    """Returns an algorithm's extra work as a formula, as in FedTrip's Table VIII: ``2(K+1)|w| + n(FP+BP)``."""
    terms = []
    if work.per_step and work.per_step == work.once:
        terms.append(f"{work.once:g}(K+1)|w|")
    else:
        terms += [f"{_factor(work.per_step)}K|w|"] if work.per_step else []
        terms += [f"{_factor(work.once)}|w|"] if work.once else []
    if work.full_gradients:
        terms.append(f"{_factor(work.full_gradients)}n(FP+BP)")
    if work.forwards and work.backwards:
        terms.append(f"KM({_factor(work.forwards)}FP+{_factor(work.backwards)}BP)")
    elif work.forwards or work.backwards:
        terms.append(f"{_factor(work.forwards or work.backwards)}KM {'FP' if work.forwards else 'BP'}")
    return " + ".join(terms) or "0"


def _factor(times: float) -> str:
    return "" if times == 1 else f"{times:g}"
