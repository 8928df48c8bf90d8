"""Writes the records of a run: its tables, TensorBoard's events, log.txt, config.yaml and summary.json."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fedray.tracking.columns import CLIENT_FACTS, METRICS, PURPOSES
from fedray.tracking.folder import BY_HAND, INPUTS, RunFolder
from fedray.tracking.records import FILES, KEY, digest_of
from fedray.tracking.tables import ParquetRows, RoundsFile, read_metrics
from fedray.tracking.tensorboard import Events
from fedray.util.files import room_for, write_whole

if TYPE_CHECKING:
    import pandas as pd

    from fedray.config.sections import RunConfig


class Recorder:
    """Writes the files of a run into its folder. The run continues after round ``after``, which is 0 for a new run.

    ``settings`` is the text of config.yaml, the resolved configuration. ``machine`` is the value of the key ``machine``
    in summary.json: its ``processes`` describe the processes of the run, and ``bits_promised`` says whether the same
    bits are promised if the run is made again. ``extra_columns`` are the columns of metrics.csv after those that every
    run has (:data:`~fedray.tracking.columns.METRICS`). ``hyper_parameters`` has the settings for TensorBoard's HParams
    table, by dotted key. ``with_scores`` says whether single clients are scored on their own test samples.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: str,
        machine: Mapping[str, Any],
        extra_columns: Sequence[str],
        after: int,
        hyper_parameters: Mapping[str, Any],
        with_scores: bool = False,
    ) -> None:
        self.folder, self.machine, self.hyper_parameters = folder, dict(machine), dict(hyper_parameters)
        path, run = folder.path, folder.config.run
        write_whole(path / "config.yaml", settings)
        write_whole(path / INPUTS, json.dumps(dict(folder.inputs), indent=2) + "\n")
        (path / "summary.json").unlink(missing_ok=True)
        self._metrics = RoundsFile(path / "metrics.csv", [*METRICS, *extra_columns], after)
        self._clients = ParquetRows(path / "clients.parquet", after) if run.log_clients else None
        self._scores = ParquetRows(path / "evaluation.parquet", after) if run.log_clients and with_scores else None
        self._layers = ParquetRows(path / "layers.parquet", after) if run.diagnostics else None
        self._profile: RoundsFile | None = None
        if folder.config.engine.profile or (after and (path / "profile.csv").exists()):
            self._profile = RoundsFile(path / "profile.csv", ["round", *PURPOSES], after)
        else:
            (path / "profile.csv").unlink(missing_ok=True)
        self._events = Events(path, after)
        self._log = (path / "log.txt").open("a", encoding="utf-8")
        self.note(f"round {after} reached before; resuming" if after else "started")

    @property
    def rows_lost(self) -> int:
        """The number of rows that metrics.csv lacks for the rounds that were made before the run was resumed."""
        return self._metrics.lost

    def digests(self) -> dict[str, str]:
        """Returns the digests of the run's tables, such as metrics.csv, by file name.

        The digests may lack the latest rows until :meth:`sync` is called.
        """
        tables = (self._metrics, self._profile, self._clients, self._scores, self._layers)
        return {table.path.name: table.digest.value for table in tables if table is not None}

    def note(self, line: str) -> None:
        """Writes ``line`` to the run's log.txt, with the time before it."""
        with room_for(self.folder.path / "log.txt"):
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
            self._log.flush()

    def _room_for_events(self) -> AbstractContextManager[None]:
        return room_for(self.folder.path / "events.out.tfevents")

    def withdraw_promise(self, operations: Sequence[str]) -> None:
        """Records that ``operations``, which are names of torch's operations, may give different bits in another run.

        The run's summary then does not promise equal bits, and lists the operations.
        """
        for operation in operations:
            known = self.machine.get("nondeterministic", [])
            if operation not in known:
                self.machine |= {"bits_promised": False, "nondeterministic": [*known, operation]}
                self.note(f"warning: bits are not promised: {operation}")

    def by_hand(self, changes: Mapping[int, Sequence[str]]) -> None:
        """Records what the user has changed by hand, such as the cohort, in which rounds. From then on the folder does
        not hold the run that its settings describe."""
        rounds = {
            what: [number for number in sorted(changes) if what in changes[number]] for what in ("model", "cohort")
        }
        text = ", ".join(f"{what} of {_rounds_text(numbers)}" for what, numbers in rounds.items() if numbers)
        write_whole(self.folder.path / INPUTS, json.dumps({**self.folder.inputs, BY_HAND: text}, indent=2) + "\n")

    def add_process(self, facts: Mapping[str, Any]) -> None:
        """Records that another process computes for the run. Its description ``facts`` is added to the run's
        summary."""
        self.machine |= {"processes": [*self.machine["processes"], dict(facts)]}

    def round(self, row: Mapping[str, Any], clients: Mapping[str, Any]) -> None:
        """Records a finished round in metrics.csv, in clients.parquet and for TensorBoard.

        ``row`` is the round's row of metrics.csv, by column. ``clients`` has the rows of the round's clients: for each
        column a list with a value for each client, except that ``round`` is a single number.
        """
        self._metrics.append(row)
        if self._clients:
            self._clients.append(clients)
        scores = {name: values for name, values in clients.items() if name not in CLIENT_FACTS}
        with self._room_for_events():
            self._events.round(row, scores, histograms="test_loss" in row)

    def scores(self, rows: Mapping[str, Any]) -> None:
        """Appends the scores of clients on their own test samples to evaluation.parquet, a row for each client.

        ``rows`` has for each column a list with a value for each client, except that ``round`` is a single number. Does
        nothing if the run has no such table, because clients are not scored or ``run.log_clients`` is false.
        """
        if self._scores:
            self._scores.append(rows)

    def layers(self, rows: Mapping[str, Any]) -> None:
        """Appends how much each tensor of the server's model has changed in a round to layers.parquet, a row for each
        tensor.

        ``rows`` has for each column a list with a value for each tensor, except that ``round`` is a single number. Only
        runs with ``run.diagnostics`` have this table.
        """
        assert self._layers is not None
        self._layers.append(rows)

    def profile(self, round: int, seconds: Mapping[str, float]) -> None:
        """Writes how many seconds round ``round`` spent on each purpose into profile.csv, if the run has
        ``engine.profile``.

        ``seconds`` has the seconds of each purpose, such as ``gradient``. They are counted from the end of the previous
        round to the end of this one.
        """
        if self._profile:
            self._profile.append({"round": round, **seconds})
            with self._room_for_events():
                self._events.profile(round, seconds)

    def sync(self) -> None:
        """Writes all rows that have been recorded so far to the disk. This is done before a checkpoint is written."""
        self._metrics.sync()
        for table in (self._clients, self._scores, self._layers):
            if table:
                table.flush()
        with self._room_for_events():
            self._events.flush()

    def finish(self, status: str, **facts: Any) -> None:
        """Writes summary.json, the last file that a run writes. ``status`` says how the run ended, such as
        ``completed``, and ``facts`` are additional keys of the file."""
        self.sync()
        config, path = self.folder.config, self.folder.path
        summary = summarize(read_metrics(path), status, config.run, config.task.metric or "accuracy", config.task.mode)
        whole = {name: digest_of(path / name) for name in FILES if (path / name).exists()}
        summary |= facts | {"versions": versions(), "machine": self.machine, KEY: self.digests() | whole}
        final = {f"final/{key}_{summary['metric']}": summary[key] for key in ("final", "best")}
        with self._room_for_events():
            self._events.end(self.hyper_parameters, {tag: x for tag, x in final.items() if x is not None})
        self.note(f"{status} after round {summary['rounds']}")
        write_whole(path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        for each in (self._metrics, self._profile, self._events, self._log):
            # everything that must be on the disk is there; the error to show is the one that ended the run
            with contextlib.suppress(OSError):
                if each is not None:
                    each.close()


def _rounds_text(numbers: Sequence[int]) -> str:
    """Returns sorted numbers of rounds as a text: ``round 3``, ``rounds 1-4 and 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    texts = [f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"round{'s' if len(numbers) > 1 else ''} {listed}"


def summarize(
    metrics: pd.DataFrame, status: str, run: RunConfig, metric: str = "accuracy", mode: str = "max"
) -> dict[str, Any]:
    """Returns the keys of summary.json that are computed from metrics.csv, with their values.

    ``metrics`` is that table, ``status`` says how the run ended, and ``run`` is the section ``run`` of the
    configuration. ``metric`` is the main metric, and ``mode`` says whether larger (max) or smaller (min) values of it
    are better.

    The keys ``final``, ``best`` and ``last10`` are the last value of the main metric on the test set, its best value,
    and the mean of its last ten values. ``targets`` has an entry for each of ``run.targets``: None if the metric did
    not reach it, and otherwise a dict with the first round that did (``round``), and the ``bytes``, ``flops`` and
    ``seconds`` of the run up to this round, and with a virtual clock
    ``virtual_seconds`` and ``joules``. ``final_personalized_accuracy`` and so on are the last values of personal
    models, if there are some. fedray/tracking/README.md explains all keys.
    """
    values = metrics[f"test_{metric}"]
    reached: dict[str, Any] = {}
    for target in run.targets:
        rows = metrics[values <= target if mode == "min" else values >= target]
        first = None if rows.empty else rows.iloc[0]
        reached[f"{target:g}"] = None if first is None else {
            "round": int(first["round"]),
            "bytes": int(first["bytes_down"] + first["bytes_up"]),
            "flops": float(first["flops"]),
            "seconds": float(first["wall_seconds"]),
            **_of_clock(first),
        }  # fmt: skip
    end = int(metrics["round"].max()) if len(metrics) else 0
    last_rounds = None
    if run.last_rounds is not None:
        last = values[metrics["round"] > end - run.last_rounds].dropna()
        last_rounds = {
            "from_round": max(1, end - run.last_rounds + 1),
            "to_round": end,
            "evaluations": len(last),
            "mean": _number(last.mean()),
        }
    accuracy = _figures(metrics["test_accuracy"], "max")
    return {
        "status": status,
        "metric": metric,
        "mode": "min" if mode == "min" else "max",
        **_figures(values, mode),
        "last_rounds": last_rounds,
        **{f"{name}_accuracy": value for name, value in accuracy.items()},
        **_personal_finals(metrics, metric),
        "rounds": end,
        "targets": reached,
    }


def _personal_finals(metrics: pd.DataFrame, metric: str) -> dict[str, float | None]:
    """Returns the last values of the columns of metrics.csv about personal models, as ``final_<column>``. Columns that
    are missing or empty are left out."""
    beginnings = (f"personalized_{metric}", f"clients_personal_{metric}_")
    columns = metrics[[name for name in map(str, metrics) if name.startswith(beginnings)]].dropna(how="all", axis=1)
    return {f"final_{name}": _number(column.dropna().iloc[-1]) for name, column in columns.items()}


def _of_clock(row: pd.Series[Any]) -> dict[str, float]:
    """Returns what the virtual clock shows in a row of metrics.csv: ``virtual_seconds`` and ``joules``, if known."""
    found = {name: float(row.get(name, math.nan)) for name in ("virtual_seconds", "joules")}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _figures(column: pd.Series[float], mode: str) -> dict[str, float | None]:
    """Returns ``final``, ``best`` and ``last10`` of a column of metrics.csv, which are keys of summary.json.

    They are the last value, the best one, and the mean of the last ten values; None if there are no values.
    """
    values = column.dropna()
    best = values.min() if mode == "min" else values.max()
    last = values.iloc[-1] if len(values) else math.nan
    return {"final": _number(last), "best": _number(best), "last10": _number(values.tail(10).mean())}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def versions() -> dict[str, str]:
    """Returns the versions, by name, of Python and of the packages that a result depends on, such as torch."""
    found = {"python": platform.python_version()}
    for name in ("fedray", "torch", "numpy", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
