"""Callbacks: the user's objects that follow a run, in the process that started it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fedray.config import Config
from fedray.errors import UserError
from fedray.usercode.extensions import Entry, make
from fedray.usercode.importing import as_user_error, error_line

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedray.tracking.result import RunResult

Look: TypeAlias = Callable[..., Any]
"""The type of a function that fetches a part of the last reported round. ``look("clients")``, ``look("evaluation")``
and ``look("layers")`` return columns by name, or None; ``look("model", name)`` returns one of the round's models."""


@dataclass(frozen=True)
class RunStart:
    """A run that begins, or continues from a checkpoint, as a callback's method ``start`` gets it.

    ``folder`` is the run's folder, and ``config`` its configuration, in which ``auto`` and null are replaced by values.
    ``round`` is the number of rounds that are already done (0 for a new run), and ``rounds`` the total number.

    Example:
        def start(self, run):
            print(run.folder, run.config.algorithm.name, run.rounds - run.round)
    """

    folder: Path
    config: Config
    round: int
    rounds: int


@dataclass(frozen=True)
class Report:
    """A finished round, as a callback gets it: its number ``round`` (from 1), and ``metrics``, its row of metrics.csv.

    The other parts of the round are fetched from the process that runs the rounds when a callback reads them, so that
    they cost nothing otherwise. They are copies, and can be read only until the callback returns.

    Example:
        def on_round(report):
            print(report.round, report.metrics["train_loss"], report.clients["loss"].max())
    """

    round: int
    metrics: Mapping[str, Any]
    look: Look | None = field(default=None, repr=False, compare=False)

    @property
    def clients(self) -> pd.DataFrame:
        """The round's rows of clients.parquet, one for each client of the cohort. Columns are ``round``, ``client``,
        ``samples``, ``steps`` and what the algorithm records, such as ``loss``."""
        found = self._table("clients")
        assert found is not None
        return found

    @property
    def evaluation(self) -> pd.DataFrame | None:
        """The round's rows of evaluation.parquet, one for each client that was scored on its test samples, with a
        column ``<model>_<metric>`` for each model. None if no client was scored."""
        return self._table("evaluation")

    @property
    def layers(self) -> pd.DataFrame | None:
        """The round's rows of layers.parquet, one for each layer of the server's model, with the columns ``round``,
        ``layer``, ``update_norm`` and ``norm``. None without ``run.diagnostics``."""
        return self._table("layers")

    def model(self, name: str | None = None) -> nn.Module:
        """Returns the model after the round, in evaluation mode and on the CPU.

        Args:
            name: One of the algorithm's further models, such as pFedMo's ``representation``. The default is the
                evaluated model.

        Raises:
            UserError: The algorithm has no model of that name, or the callback has already returned.

        Example:
            logits = report.model()(images)
        """
        found: nn.Module = self._asked("model", name)
        return found

    def _table(self, what: str) -> pd.DataFrame | None:
        import pandas as pd

        found = self._asked(what)
        return None if found is None else pd.DataFrame(found)

    def _asked(self, what: str, *name: str | None) -> Any:
        if self.look is None:
            raise UserError(f"the {what} of round {self.round} can be asked for only while its callback is called")
        return self.look(what, *name)


class Callback:
    """The methods of a callback, all of them optional. Any object with one of these methods is a callback; it need not
    be a subclass.

    Example:
        class Logger(Callback):
            def round(self, report):
                print(report.round, report.metrics["test_accuracy"])
    """

    def start(self, run: RunStart) -> None:
        """Called before the first round, and again if the run goes back to a checkpoint because a process died."""

    def round(self, report: Report) -> bool | None:
        """Called after each round. The next round waits until this method returns, and the run ends if it
        returns true."""

    def end(self, result: RunResult) -> None:
        """Called when the run has been completed, has diverged, or was interrupted (``result.status``)."""


class Callbacks:
    """All callbacks of a run: those that ``run.callbacks`` names (``named``), and those that were passed from Python
    (``handed_over``). A function is used as the method ``round``, and a class is instantiated without arguments.

    An exception of a named callback becomes a :class:`UserError`, which names the callback, the file and the line. An
    exception of a callback from Python is raised unchanged.
    """

    def __init__(self, named: Sequence[Entry], handed_over: Sequence[Any]) -> None:
        self._named, self._handed_over = named, handed_over
        self._made: list[tuple[str | None, Any]] | None = None

    @property
    def watch_rounds(self) -> bool:
        """Whether any callback has the method ``round``, so that the run must wait for callbacks after each round."""
        return any(_method(each, "round") for _, each in self._all())

    def start(self, run: RunStart) -> None:
        """Calls the method ``start`` of all callbacks that have one, with ``run``, before the rounds begin."""
        self._call("start", run)

    def round(self, report: Report) -> bool:
        """Calls the method ``round`` of all callbacks that have one. Returns whether the run must end, because one of
        them returned true. Afterwards the report's parts, such as its clients, can no longer be read."""
        opened = [report.look]

        def look(what: str, *name: str | None) -> Any:
            return replace(report, look=opened[0])._asked(what, *name)

        try:
            return any(self._call("round", replace(report, look=look)))
        finally:
            opened[0] = None

    def end(self, result: RunResult) -> None:
        """Calls the method ``end`` of all callbacks that have one, with ``result``, after the run."""
        self._call("end", result)

    def _all(self) -> list[tuple[str | None, Any]]:
        if self._made is None:
            key = "run.callbacks"
            named = [(f"{key}: {_name(entry)}", make(entry, key)) for entry in self._named]
            others = [(None, each() if isinstance(each, type) else each) for each in self._handed_over]
            for where, each in (*named, *others):
                if not any(_method(each, name) for name in ("start", "round", "end")):
                    raise UserError(
                        f"{where or 'callbacks='}: {type(each).__name__} has none of the methods start, round and end"
                    )
            self._made = [*named, *others]
        return self._made

    def _call(self, name: str, argument: Any) -> list[bool]:
        return [
            _called(where, name, method, argument)
            for where, each in self._all()
            if (method := _method(each, name)) is not None
        ]


def _called(where: str | None, name: str, method: Callable[[Any], Any], argument: Any) -> bool:
    if where is not None:
        with as_user_error(f"{where} failed in {name}"):
            return bool(method(argument))
    with _noted(method, name):
        return bool(method(argument))


@contextlib.contextmanager
def _noted(method: Callable[[Any], Any], name: str) -> Iterator[None]:
    """A context for calling ``method``, the method ``name`` of a callback. An exception gets a note that names the
    callback, if this version of Python has notes."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"raised by {getattr(method, '__qualname__', method)}, a callback: {error_line(error)}")
        raise


def _method(callback: Any, name: str) -> Callable[[Any], Any] | None:
    """Returns the method ``name`` ("start", "round" or "end") of a callback, or None if it has no such method. A
    function counts as its own method ``round``."""
    found = getattr(callback, name, None)
    if callable(found) and getattr(type(callback), name, None) is not getattr(Callback, name):
        method: Callable[[Any], Any] = found
        return method
    has_methods = any(callable(getattr(callback, each, None)) for each in ("start", "round", "end"))
    return callback if name == "round" and callable(callback) and not has_methods else None


def _name(entry: Entry) -> str:
    return entry if isinstance(entry, str) else str(entry["name"])
