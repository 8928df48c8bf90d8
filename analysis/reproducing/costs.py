"""Estimates how long the runs of published tables take here."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from fedray.config import Config, load
from fedray.results.runs import RecordedRun, read_run
from fedray.tracking.folder import is_finished
from reproducing.published import EXPERIMENTS, Cell

PROCESSORS = 2
"""The processors of the machine on which ``costs.csv`` was measured. All hours are those of so many."""


SIZES = (
    "data.clients", "train.cohort_size", "train.participation", "train.batch_size", "train.local_steps",
    "train.local_epochs", "run.rounds", "run.iterations",
)  # fmt: skip
"""The keys of a cell on which its hours depend. No experiment has other values of them for some algorithm."""


@dataclass(frozen=True)
class TableCost:
    """What a table takes: its ``runs``, how many of them are ``done``, and the ``hours`` that the others take on
    :data:`PROCESSORS` processors (NaN if their experiment was not measured).

    The hours are ``at_most`` so many if runs end at a target, since they count all rounds.
    """

    runs: int
    done: int
    hours: float
    at_most: bool


class Costs:
    """The costs of tables whose runs are, or will be, in ``folder``; ``every`` has all their cells, with their seeds.

    A run's hours are first those that were measured of its experiment, with the algorithm of its paper, times what the
    run's settings change in rounds, clients in a round and local steps. If runs have ended in ``folder``, all hours are
    multiplied by ``slowness``: how many times as long as expected those runs took. It is None if none has ended.
    """

    def __init__(self, folder: Path, every: Iterable[tuple[Cell, int]]) -> None:
        self.folder = folder
        with (EXPERIMENTS / "costs.csv").open() as file:
            self._measured = {row["experiment"]: row for row in csv.DictReader(file)}
        self._expected: dict[str, tuple[float, int]] = {}
        cells = {(cell.name, seeds): cell for cell, seeds in every}
        ended = {run: cell for (_, seeds), cell in cells.items() for run in self._runs(cell, seeds) if is_finished(run)}
        read = [(read_run(folder), cell) for folder, cell in ended.items()]
        runs = [(run, cell) for run, cell in read if isinstance(run, RecordedRun)]
        self.slowness = _ratio((_hours_taken(run), self._of_a_round(cell)[0] * len(run.rows)) for run, cell in runs)

    def of(
        self,
        cells: Sequence[Cell],
        seeds: int,
        folder: Path | None = None,
        shortened: Callable[[int], int] = lambda rounds: rounds,
    ) -> TableCost:
        """Returns what a table of ``cells`` takes, with ``seeds`` runs for each cell.

        Its runs are in ``folder``, by default the folder of all runs. ``shortened`` returns how many rounds a run has
        that would have so many.
        """
        done, asked, hours, at_most = 0, 0, 0.0, False
        each = {cell.name: cell for cell in cells}.values()
        for cell in each:
            runs = [*self._runs(cell, seeds, folder)]
            ended = sum(map(is_finished, runs))
            done, asked = done + ended, asked + len(runs)
            if ended < len(runs):
                of_a_round, rounds = self._of_a_round(cell)
                hours += (len(runs) - ended) * of_a_round * shortened(rounds)
                at_most |= "run.stop_at" in cell.settings
        return TableCost(asked, done, hours * (self.slowness or 1.0), at_most)

    def _runs(self, cell: Cell, seeds: int, folder: Path | None = None) -> Iterator[Path]:
        return ((folder or self.folder) / cell.name / f"seed-{seed}" for seed in cell.seeds(seeds))

    def _of_a_round(self, cell: Cell) -> tuple[float, int]:
        """Returns the hours that a round of a cell was measured to take, and how many rounds its runs have."""
        sized = replace(cell, settings={key: value for key, value in cell.settings.items() if key in SIZES})
        if sized.name not in self._expected:
            # reading a configuration takes milliseconds, and there are hundreds of cells that differ in nothing else
            config = sized.config({})
            row = next(filter(None, map(self._measured.get, _names(cell.file))), None)
            hours = math.nan
            if row is not None:
                cohort = config.train.cohort_size or config.data.clients
                steps = _steps_against_measured(config, _own_config(cell.file), float(row["local_steps"]))
                of_round = float(row["hours_per_run"]) / float(row["rounds"])
                hours = of_round * cohort / float(row["cohort"]) * steps
            self._expected[sized.name] = hours, config.rounds
        return self._expected[sized.name]


@cache
def _names(file: Path) -> tuple[str, ...]:
    """Returns the names by which ``costs.csv`` may know the experiment of a file: its own, and those of the experiments
    that it extends, which are read otherwise but take as long."""
    extended = yaml.safe_load(file.read_text()).get("extends") or []
    files = [Path(name) for name in ([extended] if isinstance(extended, str) else extended)]
    return tuple(f"{file.parent.name}/{each.stem}" for each in (file, *files) if each.parent.name != "bases")


@cache
def _own_config(file: Path) -> Config:
    """Returns the configuration of an experiment as it was measured."""
    return load(file, [])


def _steps_against_measured(config: Config, measured: Config, steps: float) -> float:
    """Returns how many local steps a client makes in a round for each that it made when ``steps`` were measured."""
    if config.train.local_steps is not None:
        return config.train.local_steps / steps
    if config.train.local_epochs is not None and measured.train.local_epochs is not None:
        return config.train.local_epochs / measured.train.local_epochs
    return 1.0


def _hours_taken(run: RecordedRun) -> float:
    """Returns the hours that a run took, or would have taken on :data:`PROCESSORS` processors."""
    processes = (run.summary.get("machine") or {}).get("processes", [])
    # a separate server has next to nothing to do
    clients = max(1, len(processes) - 1)
    return float(run.rows["wall_seconds"].iloc[-1]) / 3600 * clients / PROCESSORS


def _ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Returns the sum of the first numbers over that of the second ones, of those pairs that are known."""
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    below = math.fsum(second for _, second in known)
    return math.fsum(first for first, _ in known) / below if below else None
