"""Callbacks: objects and functions of the user's that are called as a run goes on, in the process that started it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fedray.config import Config
from fedray.errors import UserError
from fedray.loggers import LOGGERS
from fedray.usercode.extensions import Entry, check_entry, make
from fedray.usercode.importing import as_user_error, error_line
from fedray.util.arguments import callbacks_of
from fedray.warning import WARNING

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedray.config.sections import RunConfig
    from fedray.tracking.result import RunResult

Look: TypeAlias = Callable[..., Any]
"""The type of a function that fetches a part of the last reported round. ``look("clients")``, ``look("evaluation")``
and ``look("layers")`` return columns by name, or None; ``look("model", name)`` returns one of the round's models."""


@dataclass(frozen=True)
class RunStart:
    """The argument of a callback's method ``start``: a run that begins, or that continues from a checkpoint.

    ``folder`` is the folder with the run's results, and ``config`` the run's configuration, in which ``auto`` and null
    are replaced by values. ``round`` is the number of rounds that are already done (0 for a new run), and ``rounds``
    the total number.

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
    """Describes a finished round. It is the argument of a callback's method ``round``.

    ``round`` is the number of the round, from 1. ``metrics`` has the round's row of metrics.csv, as values by column.
    The other results of the round, such as :attr:`clients` and :meth:`model`, are fetched from the process that runs
    the rounds when a callback reads them, so that they cost nothing otherwise. They are copies, and can be read only
    until the callback returns. ``look`` is the function that fetches them, which fedray sets.

    Example:
        def on_round(report):
            print(report.round, report.metrics["train_loss"], report.clients["loss"].max())
    """

    round: int
    metrics: Mapping[str, Any]
    look: Look | None = field(default=None, repr=False, compare=False)

    @property
    def clients(self) -> pd.DataFrame:
        """A table with a row for each client that took part in the round: the round's rows of clients.parquet. Its
        columns are ``round``, ``client`` (the client's number), ``samples``, ``steps`` (local ones), the clients' names
        if they have some, and what the algorithm records, such as ``loss``."""
        found = self._table("clients")
        assert found is not None
        return found

    @property
    def evaluation(self) -> pd.DataFrame | None:
        """A table with a row for each client that was scored on its test samples after the round: the round's rows of
        evaluation.parquet. It has a column ``<model>_<metric>`` for each model. None if no client was scored."""
        return self._table("evaluation")

    @property
    def layers(self) -> pd.DataFrame | None:
        """A table with a row for each layer of the server's model: the round's rows of layers.parquet. Its columns are
        ``round``, ``layer`` (the name), ``update_norm`` (the norm of the layer's change in the round) and ``norm`` (of
        its parameters after the round). None without ``run.diagnostics``."""
        return self._table("layers")

    def model(self, name: str | None = None) -> nn.Module:
        """Returns a copy of the model after the round, as a module in evaluation mode on the CPU.

        Args:
            name: The name of one of the algorithm's further models, such as pFedMo's ``representation``. The default is
                the evaluated model, the one that the algorithm would deploy.

        Raises:
            UserError: The algorithm has no model of that name, or the callback has already returned.

        Example:
            logits = report.model()(images)
        """
        found: nn.Module = self._asked("model", name)
        return found

    def client_model(self, client: int) -> nn.Module:
        """Returns the model of a client after its local training in the round, as a module in evaluation mode on the
        CPU. Only a :class:`fedray.Simulation` has models of clients, of those that it ``keep_clients``.

        Raises:
            UserError: The client's model was not kept, or the client did not take part.
        """
        found: nn.Module = self._asked("client model", client)
        return found

    def _table(self, what: str) -> pd.DataFrame | None:
        import pandas as pd

        found = self._asked(what)
        return None if found is None else pd.DataFrame(found)

    def _asked(self, what: str, *name: Any) -> Any:
        if self.look is None:
            raise UserError(f"the {what} of round {self.round} can be asked for only while its callback is called")
        return self.look(what, *name)


class Callback:
    """The base class of callbacks, which follow a run in the user's process, for example to log it or to end it early.
    All methods are optional. Any object that has one of these methods is a callback; it need not be a subclass.

    Example:
        class Logger(Callback):
            def round(self, report):
                print(report.round, report.metrics["test_accuracy"])
    """

    def start(self, run: RunStart) -> None:
        """Called with a description of the ``run`` before the first round, and again if the run goes back to a
        checkpoint because a process died."""

    def round(self, report: Report) -> bool | None:
        """Called after each round with the ``report`` of its results. The next round waits until this method returns,
        and the run ends if it returns true."""

    def end(self, result: RunResult) -> None:
        """Called with the ``result`` of the run when the run has been completed, has diverged, or was interrupted
        (``result.status``)."""


class Callbacks:
    """Calls all callbacks and loggers of a run.

    ``named`` are the entries of the key ``run.callbacks``, such as ``file.py:Name`` or
    ``{name: file.py:Name, option: 1}``. ``handed_over`` are the callbacks that were passed from Python. A callback may
    also be a function, which is called after each round like a method ``round``. It may also be a class: an instance is
    made, with the options of its entry, or without arguments if there are none. ``loggers`` are the entries of
    ``run.loggers``. These are callbacks, too, but no round waits for them. If one fails after the start, a warning is
    given to ``say``, and the run goes on without it.

    An exception of a named callback becomes a :class:`UserError`, which names the callback, the file and the line. An
    exception of a callback from Python is raised unchanged.
    """

    def __init__(
        self,
        named: Sequence[Entry],
        handed_over: Sequence[Any],
        loggers: Sequence[Entry] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._named, self._handed_over, self._named_loggers, self._say = named, handed_over, loggers, say
        self._made: list[tuple[str | None, Any]] | None = None
        self._loggers: list[tuple[str, Any]] | None = None

    @classmethod
    def of(cls, run: RunConfig, handed_over: Sequence[Any], say: Callable[[str], None]) -> Callbacks:
        """Returns the callbacks and loggers of the section ``run`` of a configuration, and those that were handed
        over. Raises :class:`UserError` if these are no list."""
        return cls(run.callbacks, callbacks_of(handed_over), run.loggers, say)

    @property
    def watch_rounds(self) -> bool:
        """Whether any callback has the method ``round``, so that the run must wait for callbacks after each round."""
        return any(_method(each, "round") for _, each in self._all())

    def start(self, run: RunStart) -> None:
        """Calls the method ``start`` of all callbacks and loggers that have one, with ``run``, before the rounds
        begin."""
        self._call("start", run)
        if self._loggers is not None:
            return self._log("start", run)
        key = "run.loggers"
        self._loggers = [
            (f"{key}: {check_entry(entry, key, LOGGERS)}", make(entry, key, LOGGERS)) for entry in self._named_loggers
        ]
        # what is wrong with a logger is better known before the first round
        for where, each in self._loggers:
            if method := _method(each, "start"):
                _called(where, "start", method, run)

    def round(self, report: Report) -> bool:
        """Calls the method ``round`` of all callbacks that have one, with ``report``. Returns whether the run must end,
        because a callback returned true. Afterwards the report's parts, such as its clients, can no longer be read."""
        self._log("round", replace(report, look=None))
        opened = [report.look]

        def look(what: str, *name: str | None) -> Any:
            return replace(report, look=opened[0])._asked(what, *name)

        try:
            return any(self._call("round", replace(report, look=look)))
        finally:
            opened[0] = None

    def end(self, result: RunResult) -> None:
        """Calls the method ``end`` of all callbacks and loggers that have one, with ``result``, after the run."""
        try:
            self._call("end", result)
        finally:
            self._log("end", result)

    def failed(self) -> None:
        """Tells the loggers that an error has ended the run."""
        self._log("failed")

    def _log(self, name: str, *argument: Any) -> None:
        """Calls the method ``name`` of the loggers. One that fails is not called any more."""
        for where, each in list(self._loggers or ()):
            try:
                if method := _method(each, name):
                    _called(where, name, method, *argument)
            except UserError as error:
                assert self._loggers is not None
                self._loggers.remove((where, each))
                self._say(f"{WARNING}{error}; the run goes on without it")

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


def _called(where: str | None, name: str, method: Callable[..., Any], *argument: Any) -> bool:
    if where is not None:
        with as_user_error(f"{where} failed in {name}"):
            return bool(method(*argument))
    with _noted(method):
        return bool(method(*argument))


@contextlib.contextmanager
def _noted(method: Callable[[Any], Any]) -> Iterator[None]:
    """A context for calling ``method`` of a callback. An exception gets a note that names the callback, if this version
    of Python has notes."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"raised by {getattr(method, '__qualname__', method)}, a callback: {error_line(error)}")
        raise


def _method(callback: Any, name: str) -> Callable[..., Any] | None:
    """Returns the method ``name`` ("start", "round" or "end", of a logger also "failed") of a callback, or None if it
    has no such method. A function counts as its own method ``round``."""
    found = getattr(callback, name, None)
    if callable(found) and getattr(type(callback), name, found) is not getattr(Callback, name, None):
        method: Callable[..., Any] = found
        return method
    has_methods = any(callable(getattr(callback, each, None)) for each in ("start", "round", "end"))
    return callback if name == "round" and callable(callback) and not has_methods else None


def _name(entry: Entry) -> str:
    return entry if isinstance(entry, str) else str(entry["name"])
