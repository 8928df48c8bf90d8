"""Keeps the folder of a run: its files, and whether a run may start in it, continue in it, or has ended in it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from fedray.config import Config, documented_keys, flat, parse_yaml
from fedray.errors import UserError
from fedray.tracking.lock import PATIENCE, folder_lock
from fedray.tracking.records import PartsDigest, RowsDigest
from fedray.util.files import replacement_of, room_for, write_whole

if TYPE_CHECKING:
    import pandas as pd

PART_ROUNDS, PART_ROWS = 500, 200_000
"""A part of a parquet folder is written at the latest when it has so many rounds or so many rows."""

WHOLE = ("round", "iterations", "cohort_size", "bytes_down", "bytes_up")

RESULT_KEYS_OF_ENGINE = (
    "threads", "portable_bits", "device", "server_gpus", "channels_last", "vectorize", "compile",
)  # fmt: skip
IGNORED = (
    "run.output", "run.checkpoint_every", "run.keep_checkpoints", "run.resume", "run.rounds", "run.callbacks",
    # the data, model and weights that these lead to are compared themselves
    "run.given", "data.root", "data.access", "model.weights",
)  # fmt: skip

UNRECORDED = MappingProxyType({"engine.compile": False, "engine.channels_last": False})
"""What an older fedray did that did not record these keys in config.yaml."""

INPUTS = "inputs.json"
"""The file with the digests of what a run depends on beside its configuration (see :mod:`fedray.experiment.inputs`)."""

Status = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class FoundRun:
    """The run that lies in a folder.

    ``rounds`` is the number of rounds that it was configured for, and ``summary`` what summary.json says if it ended.
    """

    status: Status
    rounds: int = 0
    summary: Mapping[str, Any] | None = None


class RunFolder:
    """The folder ``run.output/run.name`` of a run with the resolved configuration ``config``.

    ``inputs`` are the digests, by name, of what the run depends on beside ``config``. ``implied`` is what null stands
    for in the configuration, by dotted key.
    """

    def __init__(
        self, config: Config, inputs: Mapping[str, str], implied: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.config, self.inputs, self.implied = config, inputs, implied
        assert config.run.name is not None
        self.path = Path(config.run.output) / config.run.name
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients.parquet"
        self.evaluation = self.path / "evaluation.parquet"

    def look(self) -> FoundRun:
        """Finds out which run is in the folder, and changes nothing.

        Raises :class:`UserError` if it is a run of another configuration, data, model or code, or if ``run.resume``
        says otherwise.
        """
        resume = self.config.run.resume
        settings = self.path / "config.yaml"
        if resume is False or not settings.exists():
            if resume is True:
                raise UserError(f"run.resume=true, but there is no run in {self.path}; use run.resume=auto")
            if resume is not False and self._holds_something():
                raise UserError(f"{self.path} exists and is not a run folder: choose another run.name or run.output")
            return FoundRun("new")
        old = _read_yaml(settings)
        summary = self._summary()
        rounds = old["run"]["rounds"]
        wanted = self.config.run.rounds or 0
        differ = keys_that_differ(old, self.config.model_dump(mode="json"), self.implied)
        if wanted < rounds and (summary or {}).get("status") in ("completed", "diverged"):
            differ.append("run.rounds")
        known = self._known_inputs()
        differ += names_that_differ(self.inputs if known is None else known, self.inputs)
        if differ:
            raise UserError(
                f"{self.path} holds another run ({', '.join(differ[:6])} differ{'s' if len(differ) == 1 else ''}): "
                "use run.resume=false to start over (the old one is renamed), or another run.name"
            )
        if known is None and resume is not True:
            raise UserError(
                f"{self.path} has no {INPUTS}, so that nobody can tell whether it is of the same data and code: "
                "run.resume=true takes it for the same run, run.resume=false starts over (the old one is renamed)"
            )
        if summary and summary.get("status") == "diverged":
            return FoundRun("finished", rounds, summary)
        if (
            summary
            and summary.get("status") == "completed"
            and (summary.get("rounds") == wanted or summary.get("stopped_by"))
        ):
            return FoundRun("finished", rounds, summary)
        return FoundRun("unfinished", rounds, summary)

    def _known_inputs(self) -> dict[str, str] | None:
        path = self.path / INPUTS
        if not path.exists():
            return None
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(path.read_text())
            if isinstance(known, dict):
                return known
        raise UserError(f"{path} is damaged: use run.resume=false to start over")

    def _holds_something(self) -> bool:
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def _summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            summary = json.loads(path.read_text())
            if all(key in summary for key in ("status", "rounds", "final_accuracy", "model_sha256")):
                return summary
        except (OSError, ValueError, TypeError):
            pass
        raise UserError(f"{path} is damaged: use run.resume=false to start over")

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
        """A context in which other processes are kept out of the folder (:func:`~fedray.tracking.lock.folder_lock`)."""
        with contextlib.ExitStack() as stack:
            try:
                busy = "is being written by another run; choose another run.name"
                stack.enter_context(folder_lock(self.path, busy, say, patience))
            except OSError as error:
                raise UserError(f"can't write to run.output={self.config.run.output}: {error.strerror}") from None
            yield

    def prepare(self) -> None:
        """Makes the folder. With ``run.resume: false``, an old folder is first renamed to NAME.bak-K."""
        try:
            if self.config.run.resume is False and self.path.exists():
                number = 1
                while (aside := self.path.with_name(f"{self.path.name}.bak-{number}")).exists():
                    number += 1
                self.path.rename(aside)
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"can't write to {self.path}: {error.strerror}") from None

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder, as :func:`~fedray.util.files.write_whole` does."""
        write_whole(self.path / name, text)


def names_that_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the names under which two mappings have different values, or one of them has no value."""
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def keys_that_differ(
    old: Mapping[str, Any], new: Mapping[str, Any], implied: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Returns the dotted keys whose values differ in two configurations, of those keys that can change a result.

    ``implied`` says what null stands for.
    """
    a, b = (_without_sizes(_without_nulls(with_unrecorded(each), implied)) for each in (old, new))
    vectorized = b.get("engine.vectorize") is True

    def matters(key: str) -> bool:
        if key.startswith("engine."):
            name = key.removeprefix("engine.")
            return name in RESULT_KEYS_OF_ENGINE or (name == "chunk" and vectorized)
        return key not in IGNORED

    return [key for key in sorted({*a, *b}) if matters(key) and a.get(key) != b.get(key)]


def with_unrecorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run by dotted key, from what config.yaml holds. Keys that it lacks are what they were
    when it was written: their defaults, or :data:`UNRECORDED`."""
    return {key: default for key, default, *_ in documented_keys()} | UNRECORDED | flat(config)


def _without_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns ``settings`` with ``engine.server_gpus`` as whether the server computes on a GPU, which is all of it that
    a result depends on."""
    on_gpu = settings["engine.device"] == "cuda" and bool(settings["engine.server_gpus"])
    return settings | {"engine.server_gpus": on_gpu}


def _without_nulls(values: Mapping[str, Any], implied: Mapping[str, Any]) -> dict[str, Any]:
    return {key: implied.get(key) if value is None else value for key, value in values.items()}


def device_of(folder: Path) -> Literal["cpu", "cuda"] | None:
    """Returns the device of the run in ``folder``; None if there is no run, or its configuration is damaged."""
    device = _engine_of(folder).get("device")
    return device if device in ("cpu", "cuda") else None


def decided_in(folder: Path) -> dict[str, bool]:
    """Returns what was decided for the run in ``folder`` when it began: ``compile`` and ``channels_last``, the keys of
    section ``engine``; nothing if there is no run, or its configuration is damaged."""
    found = _engine_of(folder)
    if not found:
        return {}
    unrecorded = {key.removeprefix("engine."): value for key, value in UNRECORDED.items()}
    values = {name: found.get(name, value) for name, value in unrecorded.items()}
    return {name: value for name, value in values.items() if isinstance(value, bool)}


def _engine_of(folder: Path) -> Mapping[str, Any]:
    """Returns the section ``engine`` of the run in ``folder``; nothing if it can't be read."""
    try:
        found = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))["engine"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"))
        if isinstance(loaded["run"]["rounds"], int):
            return loaded
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        pass
    raise UserError(f"{path} is damaged: use run.resume=false to start over")


class RoundsFile:
    """A CSV file to which each round appends a row.

    ``lost`` is the number of rows of earlier rounds that should be there and are not, and ``digest`` that of all rows.
    """

    def __init__(self, path: Path, columns: Sequence[str], after: int) -> None:
        """Opens the file; rows of rounds after ``after`` are removed."""
        self.path, self.columns = path, columns
        kept = _rows_until(path, after)
        self.lost, self.digest = after - len(kept), RowsDigest(kept)
        with replacement_of(path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns)

    def append(self, row: Mapping[str, Any]) -> None:
        cells = {name: "" if row.get(name) is None else str(row[name]) for name in self.columns}
        with room_for(self.path):
            self._writer.writerow(cells)
            self._file.flush()
        self.digest.add(cells)

    def sync(self) -> None:
        with room_for(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rows_until(path: Path, after: int) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file that are of rounds up to ``after``."""
    if not after or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if (row.get("round") or "").isdigit()]
    return [row for row in rows if int(row["round"]) <= after]


def check_numbers(path: Path, after: int) -> None:
    """Raises :class:`UserError` if something in the rows of a CSV file that are of rounds up to ``after`` is no number,
    so that nothing can go on with them."""
    for row in _rows_until(path, after):
        for name, cell in row.items():
            try:
                float(cell or 0)
            except (TypeError, ValueError):
                what = f"column {name} has {cell!r}" if name else f"there is {','.join(cell)!r} too much"
                raise UserError(
                    f"{path} is damaged: in round {row['round']} {what}; mend it, or use run.resume=false to start over"
                ) from None


class ParquetRows:
    """A folder of parquet files, to which each round appends several rows, such as clients.parquet.

    Each file holds the rows of some consecutive rounds. ``digest`` is that of all files.
    """

    def __init__(self, path: Path, after: int) -> None:
        """Opens the folder; rows of rounds after ``after`` are removed."""
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._held = 0
        path.mkdir(exist_ok=True)
        for part in path.glob("part-*-*.parquet"):
            first, last = (int(number) for number in part.stem.split("-")[1:3])
            if first > after:
                part.unlink()
            elif last > after:
                table = pq.read_table(part)
                with replacement_of(path / _name_of_part(first, after)) as staging:
                    pq.write_table(table.filter(pa.compute.field("round") <= after), staging)
                part.unlink()
        self.digest = PartsDigest(path)

    def append(self, rows: Mapping[str, Any]) -> None:
        """Appends the rows of one round.

        ``rows`` has for each column a list, all of the same length, and ``round`` as one number.
        """
        self._rows.append(dict(rows))
        self._held += _length(rows)
        if len(self._rows) >= PART_ROUNDS or self._held >= PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that were appended since the last time, as a file of its own."""
        if not self._rows:
            return
        tables = [
            pa.table({"round": [rows["round"]] * _length(rows)} | {k: v for k, v in rows.items() if k != "round"})
            for rows in self._rows
        ]
        part = self.path / _name_of_part(self._rows[0]["round"], self._rows[-1]["round"])
        with replacement_of(part) as staging:
            pq.write_table(pa.concat_tables(tables, promote_options="default"), staging)
        self.digest.add(part)
        self._rows, self._held = [], 0


def _name_of_part(first: int, last: int) -> str:
    return f"part-{first:08d}-{last:08d}.parquet"


def _length(rows: Mapping[str, Any]) -> int:
    return len(next(values for name, values in rows.items() if name != "round"))


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads the table metrics.csv of a run folder. Numbers are read back to the bit; empty cells are NaN."""
    with (path / "metrics.csv").open(encoding="utf-8") as file:
        names = next(csv.reader(file))
    kinds = {name: pa.int64() if name in WHOLE else pa.float64() for name in names}
    return pa.csv.read_csv(path / "metrics.csv", convert_options=pa.csv.ConvertOptions(column_types=kinds)).to_pandas()
