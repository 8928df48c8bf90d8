"""Makes a run round by round, on the engine that its configuration asks for: :class:`Stepper`, the loop behind
:func:`fedray.simulate` and :class:`fedray.Simulation`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import Config, run_name
from fedray.engine.callbacks import Callbacks, Report, RunStart
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import RayNotStarted, UserError, first_line
from fedray.tracking.progress import Display, number_text
from fedray.tracking.result import RunResult, final_metrics
from fedray.util.loading import collector_paused
from fedray.util.uris import below, is_uri
from fedray.warning import WARNING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedray.engine.driver import Driver, Event, Events, Order
    from fedray.engine.local_engine import LocalEngine
    from fedray.engine.ray.engine import RayEngine
    from fedray.experiment.custom import CustomObjects
    from fedray.experiment.experiment import Experiment
    from fedray.experiment.placement import Device, Surroundings
    from fedray.remote.mirror import Mirror


STOPPING = "stopping after this round"
"""What the user is told after Ctrl-C."""


class Stepper:
    """A run that goes on by a round with each call of :meth:`step`, and ends with :meth:`close`.

    If Ray can't be started and the user did not ask for it explicitly, the run goes on without Ray.

    Args:
        settings: The configuration of the run.
        custom: A function without arguments that returns the objects that the user passed from Python. It is called
            while Ray starts, because reading the data, importing torch and starting Ray take seconds each.
        callbacks: The run's callbacks.
        display: The object that shows the progress.
        stepped: Whether the user may do something between two rounds. If not, Ctrl-C ends the run after the round in
            progress, and this process has fedray's settings of torch until the run has ended.
        tidy: A function that gets the result at the end and may remove files of the run that are not needed any more.
            If ``run.output`` is a URI, this happens before the last files are sent there.

    Attributes:
        round: The number of the last round that was made.
        ask: ``ask(method, ...)`` calls a method of the run (:class:`~fedray.engine.run.Run`), wherever it is; None
            unless the run is open.
        failure: The error that has ended the run, if any.
        result: The result of the run, read from its folder; None before the run is open.
        shown: The path of the run folder, as the user has given it.
        experiment: What the run does; None before the run is open.
    """

    def __init__(
        self,
        settings: Config,
        custom: Callable[[], CustomObjects],
        callbacks: Callbacks,
        display: Display,
        stepped: bool = False,
        tidy: Callable[[RunResult], None] = lambda result: None,
    ) -> None:
        self.settings, self.custom, self.callbacks, self.display = settings, custom, callbacks, display
        self.stepped, self.tidy, self.stopping = stepped, tidy, threading.Event()
        self.round = 0
        self.failure: BaseException | None = None
        self.ask: Callable[..., Any] | None = None
        self.result: RunResult | None = None
        self.shown = Path()
        self.experiment: Experiment | None = None
        self.sizes: NDArray[np.int64] | None = None
        self._orders: dict[int, Order] = {}
        self._events = self._run()

    def open(self) -> None:
        """Loads the data, starts the workers, and goes to the run's last checkpoint, if it has one. The run is not open
        afterwards if it is finished already."""
        if self.ask is None:
            self._next(None)

    def step(self, order: Order | None = None) -> Report | None:
        """Makes the next round, as ``order`` wants it, and returns its report; None if the run has ended.

        If the run goes back to a checkpoint because a process died, the rounds from there on are made again, as they
        were ordered, and only the report of the next round is returned.
        """
        self.open()
        wanted = self.round + 1
        if order is not None and self.settings.engine.kind != "local":
            # without other processes no round is made again, and models would fill the memory
            self._orders[wanted] = order
        event = self._next(order)
        while event is not None and not (isinstance(event, Report) and event.round >= wanted):
            event = self._next(self._orders.get(event.round + 1))
        return event

    def go_back(self, number: int) -> None:
        """Goes back to the checkpoint of round ``number``."""
        from fedray.engine.driver import Order

        if self.stopping.is_set():
            raise UserError("the run is ending, because a callback wants it")
        self._orders = {known: order for known, order in self._orders.items() if known <= number}
        event = self._next(Order(back_to=number))
        while event is not None and event.round != number:
            if event.round < number:
                raise UserError(f"the run could not go back to round {number}, and is at round {event.round} now")
            # instead of a server that had died, another one has begun at the last checkpoint
            event = self._next(Order(back_to=number))

    def close(self) -> RunResult | None:
        """Ends the run, and returns its result. A run that has not had all its rounds is interrupted: it can be
        continued later. The result is None if the run was never open."""
        if self.ask is not None:
            self.stopping.set()
            while self._next(None) is not None:
                pass
        return self.result

    def notice(self, line: str) -> None:
        """Shows a line that the user must see even if nothing else is shown."""
        self.display.say(f"{WARNING}{line}" if self.display.quiet else line)

    def _next(self, order: Order | None) -> Event | None:
        """Goes on to the next event of the run, which is None at its end."""
        if self.failure is not None:
            raise UserError(f"the run has failed: {first_line(self.failure) or type(self.failure).__name__}")
        try:
            event = self._events.send(order if self.ask is not None else None)
        except StopIteration:
            self.ask = None
            return None
        except BaseException as error:
            self.ask, self.failure = None, error
            raise
        self.round = event.round
        if not isinstance(event, Report):
            self.ask = event.ask
        return event

    def _run(self) -> Events:
        """Yields the events of the run, and does all that belongs to it before, between and after them."""
        settings = self.settings
        with _mirrored(settings, self.display.say) as mirror:
            try:
                yield from self._run_on_engine(settings, mirror)
            except RayNotStarted as error:
                if settings.engine.asks_for_ray:
                    raise RayNotStarted(
                        f"{error}; engine.kind=local needs no Ray, and computes the same bits"
                    ) from None
                self.display.say(f"{error}; going on without Ray, as with engine.kind=local: the bits are the same")
                local = settings.engine.model_copy(update={"kind": "local"})
                yield from self._run_on_engine(settings.model_copy(update={"engine": local}), mirror)
            assert self.result is not None
            self.tidy(self.result)
            self.display.say(_line_about_end(self.result, self.shown))

    def _run_on_engine(self, settings: Config, mirror: Mirror | None) -> Events:
        """Connects to Ray first if the experiment runs on Ray. Raises :class:`RayNotStarted` if that is not possible.
        The run has changed nothing by then."""
        display, callbacks = self.display, self.callbacks
        with RayStart(settings.engine, display.say, at_once=_will_run_on_ray(settings)) as start:
            experiment, engine = _prepared(settings, self.custom, display, start)
            experiment = engine.experiment = replace(experiment, stepped=self.stepped)
            if not self._announce(experiment, engine, start):
                return
            from fedray.engine.driver import Driver

            with nullcontext() if self.stepped else interruptible(self.notice, STOPPING, self.stopping):
                if mirror is not None:
                    mirror.on_failure(self.stopping)
                driver = Driver(display.say, self.stepped or callbacks.watch_rounds, self.stopping)
                try:
                    yield from self._seen(engine, driver)
                except BaseException:
                    callbacks.failed()
                    raise
                finally:
                    display.stop()
            assert self.result is not None
            callbacks.end(self.result)

    def _announce(self, experiment: Experiment, engine: LocalEngine | RayEngine, start: RayStart) -> bool:
        """Shows what is going to be run. Returns whether there is something to do."""
        from fedray.tracking.folder import RunFolder

        folder = RunFolder(experiment.config, experiment.inputs, experiment.defaults)
        self.experiment, self.sizes = experiment, engine.data.sizes()
        found = folder.look(experiment.stepped)
        self.result, self.shown = RunResult(folder.path.absolute(), experiment.module), folder.path
        if found.status != "finished" and experiment.config.engine.kind == "ray":
            start.ready()
        for line in experiment.notes:
            self.display.say(line)
        if experiment.facts.has_private_layers and experiment.config.run.eval_test:
            metric = experiment.task.main
            self.notice(
                f"the global model has initial values in its private layers, so that final and test_{metric} say "
                f"little: look at personalized_{metric}, that of the clients' personal models"
            )
        if found.status == "finished":
            silent = "; nothing more is sent to run.loggers" if experiment.config.run.loggers else ""
            self.display.say(f"{folder.path} is finished already{silent}")
            self.round = int(self.result.summary["rounds"])
            return False
        self.display.say(
            f"{experiment.config.algorithm.name} on {experiment.config.data.source}: {engine.data.clients} clients, "
            f"cohorts of {experiment.cohort_size}, {experiment.facts.parameters:,} parameters, {experiment.rounds} "
            f"rounds -> {folder.path}"
        )
        return True

    def _seen(self, engine: LocalEngine | RayEngine, driver: Driver) -> Events:
        """Yields the events of a run on ``engine`` after the display and the callbacks have seen them."""
        events = engine.run(driver)
        go_on: Callable[[], Event] = partial(events.send, None)
        with nullcontext() if self.stepped else engine.computing():
            while True:
                with engine.computing() if self.stepped else nullcontext():
                    try:
                        event = go_on()
                    except StopIteration:
                        return
                try:
                    with nullcontext() if self.stepped else engine.user_code():
                        self._show(event)
                    go_on = partial(events.send, (yield event))
                except BaseException as error:
                    # the engine must know what ends its run, and may go on after the death of a process
                    go_on = partial(events.throw, error)

    def _show(self, event: Event) -> None:
        experiment, result = self.experiment, self.result
        assert experiment is not None
        assert result is not None
        if isinstance(event, Report):
            self.display.round(event.metrics)
            if self.callbacks.round(event):
                self.stopping.set()
        else:
            self.display.start(experiment.rounds, event.round, experiment.task.main)
            self.callbacks.start(RunStart(result.folder, experiment.config, event.round, experiment.rounds))


def _mirrored(settings: Config, say: Callable[[str], None]) -> AbstractContextManager[Mirror | None]:
    """Returns a context that copies the run folder to ``run.output`` while it changes, if that is a URI. The context's
    value is the :class:`Mirror` that copies, or None if ``run.output`` is a folder."""
    run, name = settings.run, run_name(settings, settings.data.source)
    if not is_uri(run.output):
        return contextlib.nullcontext()
    from fedray.remote.mirror import mirrored

    return mirrored(
        below(run.output, name), run.place.absolute() / name, run.output_timeout, say, anew=run.resume is False
    )


def _prepared(
    settings: Config, custom: Callable[[], CustomObjects], display: Display, start: RayStart
) -> tuple[Experiment, LocalEngine | RayEngine]:
    """Returns the experiment and the engine that runs it.

    The data are loaded here. Only the engine refers to them, so that it can free their memory.
    """
    with collector_paused():
        from fedray.core.torch_state import neutral
        from fedray.experiment.resolve import resolve

    with neutral(), display.reading() as map_all:
        experiment, data = resolve(settings, custom(), _surroundings(settings, start), map_all)
    if experiment.config.engine.kind != "ray":
        from fedray.engine.local_engine import LocalEngine

        return experiment, LocalEngine(experiment, data)
    from fedray.engine.ray.engine import RayEngine

    return experiment, RayEngine(experiment, data, start)


def _line_about_end(result: RunResult, folder: Path) -> str:
    """Returns the line that is shown at the end of a run: status, rounds, final and best metric, hash of the model,
    ``folder``."""
    summary = result.summary
    diverged = summary["status"] == "diverged"
    finals = [f", {words} {number_text(value)}" for words, value in final_metrics(summary).items()]
    return (
        f"{WARNING if diverged else ''}{summary['status']} after {summary['rounds']} round"
        + ("" if summary["rounds"] == 1 else "s")
        + (": the loss or the model is not finite any more" if diverged else "")
        + (f" ({summary['stopped_by']})" if summary.get("stopped_by") else "")
        + "".join(finals)
        + (f" (best {number_text(summary['best'])})" if summary["final"] is not None else "")
        + f", model sha256 {summary['model_sha256'][:16]} -> {folder}"
    )


def _will_run_on_ray(settings: Config) -> bool:
    """Returns whether Ray should be started right away. A run that is finished already, or that uses another engine,
    needs no Ray."""
    finished = settings.run.place / run_name(settings, settings.data.source) / "summary.json"
    return settings.engine.kind == "ray" and (settings.run.resume is False or not finished.exists())


def _surroundings(settings: Config, start: RayStart) -> Surroundings:
    """Returns what this machine or the Ray cluster offers the run: the device for ``engine.device=auto``, what an
    earlier start of the run has decided, and whether a compiler is missing."""
    from fedray.experiment.placement import Surroundings, missing_compiler
    from fedray.tracking.failure import has_failed
    from fedray.tracking.folder import decided_in

    def begun(folder: Path) -> dict[str, bool]:
        return {} if settings.run.resume is False else decided_in(folder)

    def missing(folder: Path, device: Device) -> str | None:
        if settings.run.resume is not False and (folder / "summary.json").exists() and not has_failed(folder):
            # the run is finished, so that nothing will be compiled
            return None

        def check() -> str | None:
            return missing_compiler(device)

        return check() if settings.engine.kind != "ray" else start.missing(check)

    return Surroundings(partial(_auto_device, settings, start), begun, missing)


def _auto_device(settings: Config, start: RayStart, folder: Path) -> Device:
    """Returns the device, ``cpu`` or ``cuda``, that ``engine.device=auto`` stands for.

    A run that has begun in ``folder`` stays on its device, because another one would compute other bits. A new run uses
    a GPU if this machine or the Ray cluster has one.
    """
    from fedray.experiment.placement import device_here, device_of_cluster
    from fedray.tracking.folder import device_of

    begun = device_of(folder) if settings.run.resume is not False else None
    if begun is not None:
        return begun
    if settings.engine.kind != "ray":
        return device_here(folder)
    return device_of_cluster(start.gpus(), is_this_machine=start.ready())
