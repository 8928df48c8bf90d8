"""Reads what has been published: tables and figures as data, each with the experiments that it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedray.config import Config, check, expand, flat, load, plain, read_file
from fedray.config.section import Real, Section, Whole
from fedray.errors import UserError, near_miss

if TYPE_CHECKING:
    from fedray.tuning.planned import Planned

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
"""The experiments of the papers."""

Measure = Literal[
    "rounds", "ratio", "minutes", "final", "last", "best", "at_round", "loss", "gflops", "gib", "gib_sent"
]

Of = Literal["test", "train", "representation", "local"]

Until = Literal["target", "first row"]

Marks = Literal["dots", "boxes", "bars"]

UNTIL_TARGET = ("rounds", "ratio", "gflops", "minutes")
"""The measures for which a run need not go on once it has reached its target."""


class ColumnConfig(Section):
    """A column of a published table: the experiment that it is measured by, and the published values of its rows.

    There are none if what was published is a picture.
    """

    experiment: str = Field(description="the file in analysis/experiments, without .yaml")
    settings: dict[str, Any] = Field({}, alias="with", description="keys that differ from the file's")
    round: Whole | None = Field(None, ge=1, description="at_round: the round whose accuracy is meant")
    published: list[Real | Literal["diverged", "never"] | None] | None = Field(None, description="a value for each row")
    seeds: list[Whole] | None = Field(None, description="the seeds of its runs, in place of 0, 1, 2 and so on")


class RowConfig(Section):
    """A row of a published table that is not simply an algorithm."""

    settings: dict[str, Any] = Field({}, alias="with", description="keys that differ from the experiment's")
    of: Of | None = Field(None, description="which accuracy it has, if not the table's")


class TableConfig(Section):
    """A published table or figure."""

    title: str = Field(description="the paper and its table, and what it shows")
    measure: Measure = Field(description="what the numbers are")
    of: Of = Field("test", description="on which data, and of which model, the accuracy is")
    seeds: Whole = Field(ge=1, description="how many seeds the paper has")
    over_runs: Literal["median", "mean"] = Field(
        "median", description="how what the runs of a cell took until a target becomes one number"
    )
    until: Until = Field(
        "target", description="the accuracy until which is counted: the file's target, or the first row's"
    )
    smoothing: Real = Field(0, ge=0, lt=1, description="factor of the moving average that curves are drawn of")
    marks: Marks = Field("dots", description="how cells are drawn; boxes: the last rounds of all runs (last)")
    rows: list[str | dict[str, RowConfig]] = Field(description="algorithms, or names with what they are")
    columns: dict[str, ColumnConfig]
    notes: list[str] = Field([], description="what is to be known beside the numbers")


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell of a table: its row and column, the published value (None if there is none), and the experiment's file,
    with the keys that the row and the column set. ``of`` says which accuracy it has, and ``chosen_seeds`` from which
    seeds its runs are, if not from 0, 1, 2 and so on."""

    row: str
    column: str
    published: float | str | None
    file: Path
    settings: Mapping[str, Any]
    round: int | None
    of: Of
    chosen_seeds: Sequence[int] = ()

    def seeds(self, count: int) -> list[int]:
        """Returns the seeds of its first ``count`` runs."""
        return list(self.chosen_seeds or range(count))[:count]

    @property
    def name(self) -> str:
        """The name of the folder of its runs, which other tables with the same experiment share."""
        own = {key: value for key, value in self.settings.items() if key != "algorithm.name"}
        parts = [str(self.settings.get("algorithm.name", "own")), *(f"{key}={value}" for key, value in own.items())]
        return f"{self.file.parent.name}/{self.file.stem}/{plain(','.join(parts))}"

    def config(self, more: Mapping[str, Any]) -> Config:
        """Returns its configuration, with ``more`` keys on top."""
        return load(self.file, [f"{key}={_text(value)}" for key, value in {**self.settings, **more}.items()])

    def planned(self, seeds: int, more: Mapping[str, Any]) -> list[Planned]:
        """Returns its runs with so many ``seeds``, by which data are partitioned as well."""
        from fedray.tuning.planned import Planned

        found = []
        for seed in self.seeds(seeds):
            config = self.config({**more, "run.seed": seed, "data.seed": seed})
            values = config.model_dump(mode="json", exclude_unset=True, exclude={"for_algorithm"})
            found.append(Planned(f"{self.name}/seed-{seed}", flat(values)))
        return found


@dataclass(frozen=True)
class PublishedTable:
    """A published table or figure, by its name, such as ``fedtrip/table4``."""

    name: str
    title: str
    measure: Measure
    seeds: int
    over_runs: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Cell]
    notes: Sequence[str]
    smoothing: float = 0.0
    marks: Marks = "dots"
    until: Until = "target"


def known_tables() -> dict[str, Path]:
    """Returns the files of all tables, by name."""
    files = sorted(EXPERIMENTS.glob("*/published/*.yaml"))
    return {f"{path.parent.parent.name}/{path.stem}": path for path in files}


def read_table(name: str) -> PublishedTable:
    """Returns a table. Raises :class:`UserError` if there is none of this name, or its file has a mistake."""
    known = known_tables()
    if name not in known:
        raise UserError(
            f"there is no published table {name!r}{near_miss(name, known)}; see python analysis/reproduce.py --list"
        )
    path = known[name]
    said: TableConfig = check(TableConfig, read_file(path), f"{path}: ")
    rows = dict(_rows(said))
    cells: list[Cell] = []
    ends_at_target = said.measure in UNTIL_TARGET and said.until == "target"
    for column, of in said.columns.items():
        values = of.published or [None] * len(rows)
        if len(values) != len(rows):
            raise UserError(f"{path}: {column}: there are {len(rows)} rows, but {len(values)} published values")
        file = EXPERIMENTS / f"{of.experiment}.yaml"
        for (name_of_row, row), published in zip(rows.items(), values, strict=True):
            settings = {**flat(expand(of.settings)), **flat(expand(row.settings))}
            cell = Cell(name_of_row, column, published, file, settings, of.round, row.of or said.of, of.seeds or ())
            cells.append(_until_target(cell) if ends_at_target else cell)
    return PublishedTable(
        name, said.title, said.measure, said.seeds, said.over_runs, list(rows), list(said.columns), cells, said.notes,
        said.smoothing, said.marks, said.until,
    )  # fmt: skip


def _rows(said: TableConfig) -> Iterator[tuple[str, RowConfig]]:
    for row in said.rows:
        if isinstance(row, str):
            yield row, RowConfig.model_validate({"with": {"algorithm.name": row}})
        else:
            yield from row.items()


def _until_target(cell: Cell) -> Cell:
    """Returns the cell with runs that end at their target, which takes a fraction of the time."""
    target: float | dict[str, float] = _target_of(cell.file)
    if cell.of == "train":
        target = {"train_accuracy": target}
    return replace(cell, settings={**cell.settings, "run.stop_at": target})


@lru_cache(maxsize=256)
def _target_of(file: Path) -> float:
    return load(file).run.targets[-1]


def _text(value: Any) -> str:
    return json.dumps(value)
