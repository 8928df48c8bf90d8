"""The table that compares what algorithms cost."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from fedray.algorithms import Algorithm, Work
from fedray.core.upload import UploadStep
from fedray.models.inspection import ModelFacts
from fedray.tracking import costs
from fedray.tracking.costs import Load

TIMED = {"virtual_seconds": "virtual seconds", "joules": "joules"}
"""The columns of a table with a virtual clock, and their headings."""

WIDEST = 1000
"""The largest number of characters in a line of a table."""


@dataclass(frozen=True)
class Candidate:
    """An ``algorithm`` in the table of costs (``fedray costs``), and what its costs depend on.

    ``name`` is the algorithm's name. ``facts`` has the number of parameters, the FLOPs and other properties of the
    model that it trains. ``head`` is the name of the last layers that replace the model's own (``model.head``), or
    ``none``. ``server_flops`` is the number of FLOPs that the server computes in a round. ``usual`` has the virtual
    seconds and joules of a round, if the configuration has a virtual clock.
    """

    name: str
    algorithm: Algorithm
    head: str
    facts: ModelFacts
    server_flops: float
    usual: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """The setting for which the costs of all algorithms are compared (``fedray costs``).

    ``load`` is the amount of local training of the mean client in a round, ``cohort`` the number of clients in a round,
    and ``rounds`` the number of rounds. The plain model is the model without the head (the last layers) that some
    algorithms add to it: ``plain`` has its number of parameters, its FLOPs and other properties, ``build_plain()``
    makes it, and ``example`` is a batch of inputs for it, ``[b, ...]``. ``upload`` has the steps that uploads pass, and
    ``choosing`` what clients receive, send and compute in a round before its clients are chosen among them.
    """

    load: Load
    cohort: int
    rounds: int
    plain: ModelFacts
    build_plain: Callable[[], nn.Module]
    example: Any
    upload: Sequence[UploadStep] = ()
    choosing: tuple[float, float, float] = (0, 0, 0)


@dataclass(frozen=True)
class CostTable:
    """A table of what algorithms cost. ``columns`` maps each heading to the format of the numbers below it, such as
    ``.4g``, or to an empty text for a column of texts.

    ``rows`` has a row of values for each algorithm. ``notes`` are lines below the table.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]

    def show(self) -> None:
        """Prints the table to the terminal, with the notes below it. Long lines are not wrapped, and a pipe gets
        plain text."""
        table = Table(box=None, pad_edge=False)
        for heading, form in self.columns.items():
            lines = "\n".join(["", *heading.split(" ", 1)][-2:])
            table.add_column(lines, justify="right" if form else "left")
        for row in self.rows:
            table.add_row(*(format(value, form) for value, form in zip(row, self.columns.values(), strict=True)))
        console = Console(markup=False, highlight=False, emoji=False, width=WIDEST)
        with console.capture() as shown:
            console.print(table)
        print("\n".join([*(line.rstrip() for line in shown.get().splitlines()), *self.notes]))

    def write(self, path: Path) -> None:
        """Writes the table to the file ``path`` as CSV, with all digits and without the notes."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)


def cost_table(candidates: Sequence[Candidate], scenario: Scenario) -> CostTable:
    """Returns a table of what each algorithm costs in one round, with a row for each of ``candidates``. ``scenario`` is
    the setting that all of them share.

    The columns are the bytes and FLOPs of the mean client, counted as in metrics.csv, and the FLOPs of the server.
    """
    load = scenario.load
    plain = costs.client_flops(Work(), scenario.plain, load)
    columns = {
        "algorithm": "", "parameters": ",", "models down": "g", "vectors down": "g", "models up": "g",
        "vectors up": "g", "bytes down": ",", "bytes up": ",", "overhead": "g", "GFLOPs": ".4g",
        "server GFLOPs": ".4g",
    }  # fmt: skip
    timed = {name: heading for name, heading in TIMED.items() if any(name in each.usual for each in candidates)}
    columns |= dict.fromkeys(timed.values(), ".4g") | {"extra %": ".3g", "extra": ""}
    rows = []
    for candidate in candidates:
        traffic, work, facts = candidate.algorithm.traffic, candidate.algorithm.work, candidate.facts
        flops = costs.client_flops(work, facts, load)
        rows.append([
            candidate.name, facts.parameters, traffic.models_down, traffic.vectors_down, traffic.models_up,
            traffic.vectors_up, *costs.bytes_per_client(traffic, facts, scenario.upload), costs.overhead(traffic),
            flops / 1e9, candidate.server_flops / 1e9, *(candidate.usual[name] for name in timed),
            100 * (flops / plain - 1), extra_work(work, candidate.head if facts != scenario.plain else "none"),
        ])  # fmt: skip
    notes = [
        f"Per round and client, the mean one: {load_text(load)}. The server's own FLOPs: per round of "
        f"{scenario.cohort} clients{', and so are virtual seconds and joules' if timed else ''}.",
        "A vector has the parameters of a model without its buffers. Overhead: (down + up) / 2. Extra: the client's, "
        "over FedAvg.",
        *scenario.plain.notes,
    ]
    if any(scenario.choosing):
        down, up, chosen_flops = scenario.choosing
        notes.append(
            f"Besides, in a round its candidates (train.sampling) receive {down:,.6g} bytes, send {up:,.6g}, and "
            f"compute {chosen_flops / 1e9:.4g} GFLOPs, all of them together."
        )
    return CostTable(columns, rows, notes)


def load_text(load: Load) -> str:
    return f"{load.samples:,.6g} samples, {load.steps:,.6g} steps, {load.seen:,.6g} samples in their batches"


def extra_work(work: Work, head: str = "none") -> str:
    """Returns a text for a table that says what a client of an algorithm computes in a round beyond what a client of
    FedAvg computes, such as ``1 full-batch gradient + 1 fwd/bwd per step``. The text is ``-`` if that is nothing.

    ``4 J|w|`` in the text means four operations per parameter in each of the J local steps, and ``10 further steps``
    are made on mini-batches of their own. ``work`` has the numbers of the additional computations. ``head`` is the name
    of a head (last layers) that the algorithm adds to the model, or ``none``.
    """
    both = min(work.forwards, work.backwards)
    parts = {
        f"{head} head": head != "none",
        f"{work.further:g} further step{'s' if work.further > 1 else ''}": work.further,
        f"{work.further_epochs:g} further epoch{'s' if work.further_epochs > 1 else ''}": work.further_epochs,
        f"{work.per_step:g} J|w|": work.per_step,
        f"{work.once:g} |w|": work.once,
        f"{work.full_gradients:g} full-batch gradient{'s' if work.full_gradients > 1 else ''}": work.full_gradients,
        f"{work.full_losses:g} full-batch loss{'es' if work.full_losses > 1 else ''}": work.full_losses,
        f"{both:g} fwd/bwd per step": both,
        f"{work.forwards - both:g} fwd per step": work.forwards - both,
        f"{work.backwards - both:g} bwd per step": work.backwards - both,
        f"{work.predictions:g} fwd/bwd of the predictor per step": work.predictions,
    }
    return " + ".join(text for text, amount in parts.items() if amount) or "-"
