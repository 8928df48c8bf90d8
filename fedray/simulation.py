"""Runs an experiment round by round from Python: :class:`Simulation`."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fedray.api import checked
from fedray.config import Config
from fedray.engine.callbacks import Callback, Callbacks, Report
from fedray.engine.interrupting import interruptible
from fedray.errors import UserError
from fedray.stepping import STOPPING, Stepper
from fedray.tracking.progress import Display
from fedray.tracking.result import RunResult
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedray.algorithms import Algorithm
    from fedray.core.task import Loss
    from fedray.core.transform import Transform
    from fedray.core.upload import UploadStep
    from fedray.experiment.experiment import Experiment
    from fedray.robust import Attack, Rule
    from fedray.selection import Selection
    from fedray.usercode.extensions import Entry


class Simulation:
    """A run that you step through: each call of :meth:`step`, or each turn of a loop over the simulation, makes a round
    and returns its :class:`fedray.Report`. Between rounds you may look at models, give the next cohort, replace the
    server's model, and go back to a checkpoint.

    The result is that of :func:`fedray.simulate` to the bit, unless you change something. At the end of the ``with``
    statement, or with :meth:`close`, the run is closed. If it has not had all its rounds, it is interrupted then, and
    a simulation with the same settings goes on where it stopped. The run opens when it is first used. Ctrl-C lets the
    round in progress end, raises KeyboardInterrupt, and leaves the simulation as it is, so that you may go on.

    The arguments are those of :func:`fedray.simulate`, and ``keep_clients``: the numbers of clients, or true for all,
    whose models each report has if they take part (:meth:`fedray.Report.client_model`).

    Example:
        with fedray.Simulation({"algorithm.name": "fedavg", "run.rounds": 20}) as sim:
            for report in sim:
                print(report.round, report.metrics["test_accuracy"])
        print(sim.result.summary["final"])
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        data: Any = None,
        test: Any = None,
        client_column: str | None = None,
        label_column: str = "label",
        model: nn.Module | Callable[..., nn.Module] | None = None,
        loss: Loss | None = None,
        metrics: Mapping[str, Loss] | None = None,
        transform: Transform | None = None,
        algorithm: type[Algorithm] | None = None,
        upload: Sequence[Entry | UploadStep | type[UploadStep] | Callable[..., Any]] | None = None,
        sampling: Selection | type[Selection] | None = None,
        aggregation: Rule | type[Rule] | None = None,
        attack: Attack | type[Attack] | None = None,
        callbacks: Sequence[Callback | Callable[[Report], Any]] = (),
        overrides: Iterable[str] = (),
        keep_clients: Sequence[int] | bool = False,
        verbose: bool = False,
        display: Display | None = None,
    ) -> None:
        settings, custom = checked(
            config, overrides, data, test, client_column, label_column,
            model=model, loss=loss, metrics=metrics, transform=transform, algorithm=algorithm,
            upload=upload, sampling=sampling, aggregation=aggregation, attack=attack,
        )  # fmt: skip
        self._keep = _clients(keep_clients, "keep_clients")
        self._say = display or Display(quiet=not verbose, warn=PythonWarnings())
        watching = Callbacks.of(settings.run, callbacks, self._say.say)
        stepper = Stepper(settings, custom, watching, self._say, stepped=True)
        self._stepper, self._report = stepper, None
        self._model: Mapping[str, Tensor] | None = None
        self._turn = object()
        # a simulation that nobody refers to any more is closed, so that its run folder is free
        self._close = weakref.finalize(self, _close, stepper)

    _report: Report | None

    def __repr__(self) -> str:
        # it does not open the run, as that would start Ray
        run = self._stepper.result
        return f"Simulation({str(run.folder)!r}, round {self._stepper.round})" if run else "Simulation(not open yet)"

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Report]:
        """Makes one round after another and yields their reports, until the run has had all its rounds, or ends early
        (``run.stop_at``, a callback, a loss that is not finite)."""
        while (report := self._next(None, None)) is not None:
            yield report

    def step(self, cohort: Iterable[int] | None = None, *, keep_clients: Sequence[int] | bool | None = None) -> Report:
        """Makes the next round and returns its report, whose tables and models can be read until the next step.

        Args:
            cohort: The numbers of the clients that take part. The default are those that ``train.sampling`` draws. With
                a virtual clock some may be late. The run is then no longer the one that its settings describe, which
                its folder says.
            keep_clients: The clients whose models the report has, in place of the simulation's ``keep_clients``.

        Raises:
            UserError: The run has ended, or the cohort is not possible.
            KeyboardInterrupt: The user has pressed Ctrl-C; the round has been made (:attr:`report`).
        """
        report = self._next(cohort, keep_clients)
        if report is None:
            what = f"the run in {self.folder} has ended after round {self._stepper.round}"
            raise UserError(f"{what}: run.rounds says how many it has; run.resume=false starts over")
        return report

    @property
    def round(self) -> int:
        """The number of the last round that was made; 0 before the first one."""
        self._open()
        return self._stepper.round

    @property
    def rounds(self) -> int:
        """How many rounds the run has."""
        return self._experiment.rounds

    @property
    def config(self) -> Config:
        """The configuration, in which ``auto`` and null are replaced by values."""
        return self._experiment.config

    @property
    def clients(self) -> list[int]:
        """The numbers of the clients that have samples, and so may take part."""
        self._open()
        sizes = self._stepper.sizes
        assert sizes is not None
        return [int(client) for client in sizes.nonzero()[0]]

    @property
    def folder(self) -> Path:
        """The run folder."""
        self._open()
        assert self._stepper.result is not None
        return self._stepper.result.folder

    @property
    def report(self) -> Report | None:
        """The report of the last round that this simulation has made; None before the first one."""
        return self._report

    @property
    def result(self) -> RunResult:
        """The result of the run. The simulation must have been closed."""
        if self._stepper.ask is not None or self._stepper.result is None:
            raise UserError("the run has no result before the simulation is closed (sim.close())")
        return self._stepper.result

    def model(self, name: str | None = None) -> nn.Module:
        """Returns a copy of the server's model as it is now, as a module in evaluation mode on the CPU; before the
        first round it is the initial one. ``name`` is that of a further model (:meth:`fedray.Report.model`)."""
        from fedray.engine.driver import copying, module_of

        ask = self._asking()
        if self._model is not None and name is None:
            return module_of(self._experiment, self._model)
        found: nn.Module = copying(self._experiment, ask)("model", name)
        return found

    def replace_model(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Puts ``model``, a module or its ``state_dict()``, in the place of the model x with which the server begins
        the next round. What else the server has, such as its momentum, stays. The run is then no longer the one that
        its settings describe, which its folder says.

        Raises:
            UserError: The tensors are not those of the run's model, or not finite.
        """
        from fedray.core.places import Places
        from fedray.core.torch_state import neutral
        from fedray.experiment.weights import load_tensors

        if not isinstance(model, Mapping) and not hasattr(model, "state_dict"):
            raise UserError(f"replace_model takes a module or its state_dict(), not {model!r}")
        tensors = model if isinstance(model, Mapping) else model.state_dict()
        self._asking()
        if self._stepper.round == self.rounds:
            raise UserError("replace_model: the run has had all its rounds")
        with neutral():
            module = self._experiment.module()
            load_tensors(module, tensors, "model", None, "replace_model")
            self._model = {name: each.detach().cpu().clone() for name, each in Places(module).tensors.items()}

    def save_checkpoint(self) -> int:
        """Writes a checkpoint of the run as it is now, which is not removed when there are later ones. Returns the
        number of the round, with which :meth:`load_checkpoint` goes back to it.

        Raises:
            UserError: No round has been made yet.
        """
        ask = self._asking()
        if not self._stepper.round:
            raise UserError("save_checkpoint: no round has been made yet; the start is that of any run with this seed")
        if self._model is not None:
            self._stepper.notice(
                "the checkpoint does not have the model that replace_model got, which is for the next step"
            )
        ask("save")
        return self._stepper.round

    def load_checkpoint(self, round: int) -> None:
        """Goes back to the checkpoint of ``round``. The rounds after it, their rows in the run's tables and their
        checkpoints are gone, and the next step makes the round that follows.

        Raises:
            UserError: There is no checkpoint of that round.
        """
        # imported here because torch takes seconds
        from fedray.engine.state.checkpoint import require_whole

        self._asking()
        there = self._checkpoints()
        if round not in there:
            raise UserError(
                f"load_checkpoint takes a round with a checkpoint in {self.folder} "
                f"({', '.join(map(str, there)) or 'there is none'}), not {round!r}"
            )
        if self.config.run.save_best:
            raise UserError("load_checkpoint: the best model (run.save_best) may be of a round that would be gone")
        require_whole(self.folder / "checkpoints", round)
        if self._model is not None:
            self._stepper.notice("the model that replace_model got was not used, as no round has followed")
        self._stepper.go_back(round)
        self._report, self._model, self._turn = None, None, object()

    def close(self) -> RunResult | None:
        """Closes the run, and returns its result; None if it was never open. May be called more than once."""
        if self._model is not None and self._stepper.ask is not None:
            self._stepper.notice("the model that replace_model got was not used, as no round has followed")
        self._close()
        return self._stepper.result

    @property
    def _experiment(self) -> Experiment:
        self._open()
        assert self._stepper.experiment is not None
        return self._stepper.experiment

    def _open(self) -> None:
        if self._stepper.result is not None:
            return
        with interruptible(self._stepper.notice, STOPPING) as pressed:
            self._stepper.open()
        # Ray, which is imported by now, closes itself at the end of the program, after this
        atexit.register(self._stepper.close)
        if pressed.is_set():
            raise KeyboardInterrupt

    def _asking(self) -> Callable[..., Any]:
        self._open()
        if self._stepper.ask is None:
            raise UserError(f"the run in {self.folder} has ended")
        return self._stepper.ask

    def _next(self, cohort: Iterable[int] | None, keep_clients: Sequence[int] | bool | None) -> Report | None:
        from fedray.engine.driver import Order

        self._open()
        if self._stepper.ask is None and self._stepper.failure is None:
            return None
        keep = self._existing(self._keep if keep_clients is None else keep_clients, "keep_clients")
        if keep and self.config.system.mode == "buffered":
            raise UserError("keep_clients does not go with system.mode=buffered, where clients answer in later rounds")
        given = None if cohort is None else self._checked(cohort)
        order = Order(cohort=given, model=self._model, keep=keep)
        self._turn = object()
        with interruptible(self._stepper.notice, STOPPING) as pressed:
            found = self._stepper.step(order)
        self._model = None
        if found is not None:
            self._report = found = replace(found, look=self._look_at(found))
        if pressed.is_set():
            raise KeyboardInterrupt
        return found

    def _look_at(self, report: Report) -> Callable[..., Any]:
        """Returns what a report fetches parts of its round with, as long as it is the last one."""
        own, turn = weakref.ref(self), self._turn

        def look(what: str, *name: Any) -> Any:
            sim = own()
            if sim is None or sim._stepper.ask is None or sim._turn is not turn:
                raise UserError(f"the {what} of round {report.round} can be asked for only until the next step")
            assert report.look is not None
            return report.look(what, *name)

        return look

    def _checked(self, cohort: Iterable[int]) -> tuple[int, ...]:
        experiment, config = self._experiment, self._experiment.config
        ids = self._existing(cohort, "cohort")
        if isinstance(ids, bool):
            raise UserError(f"cohort must be numbers of clients, not {cohort!r}")
        if not ids:
            raise UserError("cohort: there must be at least one client")
        fixed = experiment.vectorize and experiment.compile and len(ids) != experiment.cohort_size
        for holds, why in (
            (experiment.privacy is not None, "privacy, whose epsilon is that of clients drawn at random"),
            (config.system.mode == "buffered", "system.mode=buffered, where clients begin when others have answered"),
            (fixed, f"engine.compile and stacks, which were made for {experiment.cohort_size} clients"),
        ):
            if holds:
                raise UserError(f"cohort does not go with {why}")
        return ids

    def _existing(self, given: Iterable[int] | bool, name: str) -> tuple[int, ...] | bool:
        ids = _clients(given, name)
        if not isinstance(ids, bool) and (absent := sorted(set(ids) - set(self.clients))):
            raise UserError(
                f"{name}: client {absent[0]} does not exist or has no samples (sim.clients has those that do)"
            )
        return ids

    def _checkpoints(self) -> list[int]:
        folder = self.folder / "checkpoints"
        return sorted(int(path.name.removeprefix("round-")) for path in folder.glob("round-" + "[0-9]" * 8))


def _close(stepper: Stepper) -> None:
    """Closes a simulation's run, and does no more for it at the end of the program."""
    atexit.unregister(stepper.close)
    stepper.close()


def _clients(given: Iterable[int] | bool, name: str) -> tuple[int, ...] | bool:
    """Returns the numbers of clients that the user has given as the argument ``name``, sorted."""
    if isinstance(given, bool):
        return given
    try:
        # index accepts whole numbers of NumPy, too, but no 3.5
        found = sorted(index(client) for client in given)
    except TypeError:
        raise UserError(f"{name} must be numbers of clients, not {given!r}") from None
    if len(set(found)) != len(found):
        raise UserError(f"{name} names a client twice: {found}")
    return tuple(found)
