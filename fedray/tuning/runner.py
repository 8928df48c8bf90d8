"""Runs the trials of a source on a Ray cluster, with Ray Tune.

Tune starts the trials side by side, each in a placement group with all the resources that it needs, and keeps their
processes from one trial to the next. A :class:`~fedray.tuning.trial_source.TrialSource` decides which trials run and
what their reports mean. A Tune searcher asks it for trials; a Tune callback passes it their reports and deaths.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from fedray.engine.environment import user_import_path
from fedray.engine.machines.leftovers import SCRATCH
from fedray.engine.ray.engine import ship_user_code
from fedray.engine.ray.start import how_busy
from fedray.engine.ray.stored import StoredSource, store_source
from fedray.errors import UserError
from fedray.tuning.memory_monitor import survive_memory_monitor
from fedray.tuning.resources import Bundles, trial_shortage
from fedray.tuning.trial import Assignment, Message, TrialEnd, TrialThread
from fedray.tuning.trial_source import TrialSource
from fedray.util.folder_use import FolderUse

if TYPE_CHECKING:
    from fedray.experiment.custom import CustomObjects

SETTINGS = {
    # fedray keeps the records, shows the progress and handles Ctrl-C
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    # Tune's new output prints a table even if it is asked to be silent
    "RAY_AIR_NEW_OUTPUT": "0",
    # the user's modules and files are found from the working directory of the program
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""The settings of Tune that are environment variables."""

MAX_RESTARTS = 3
"""How often a trial is restarted after its process died. After that it counts as failed."""


@dataclass(frozen=True)
class Shared:
    """The objects that the processes of all trials receive when they start.

    ``source`` is the data set in Ray's object store, and ``custom`` has the user's other objects, such as a model.
    ``path`` lists the folders with the user's modules. ``directory`` is the working directory of the program that the
    user started; paths in a configuration are relative to it. When the file ``stop_file`` appears, each trial ends
    after the round in progress.
    """

    source: StoredSource
    custom: CustomObjects
    path: Sequence[str]
    directory: Path
    stop_file: Path


class TrialActor(tune.Trainable):
    """The process in which Ray Tune runs a trial (one choice of hyper-parameters), and possibly further trials after
    it. Tune calls ``step()`` again and again; each call lets the trial compute until its next message, such as a
    finished round, and returns this message.

    The trial runs in a thread. Tune's function API would make this thread unnecessary, but it waits only 2 s for a
    trial that it stops, so that a pruned run could lose its last records.
    """

    def setup(self, config: dict[str, Any], shared: Shared | None = None) -> None:
        assert shared is not None
        sys.path += [entry for entry in shared.path if entry not in sys.path]
        os.chdir(shared.directory)
        self._custom = replace(shared.custom, source=shared.source.get())
        self._stop_file = shared.stop_file
        self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._trial = TrialThread(Assignment(**config["assignment"]), self._custom, self._stop_file.exists)

    def step(self) -> dict[str, Any]:
        message = self._trial.next_message()
        # the message is in a list, because Tune would flatten a dict or a named tuple
        return {"messages": [message], "done": isinstance(message, TrialEnd)}

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        self._trial.stop()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        self._trial.stop()


class SourceSearcher(Searcher):
    """The object that Ray Tune asks for the next trial (a Tune "searcher"). It takes the trials from ``source``, such
    as a sweep (:class:`~fedray.tuning.trial_source.TrialSource`).

    A trial whose process died is handed to Tune again, at most ``max_restarts`` times. After that the trial counts as
    failed. While the attribute ``stopping`` is true, no further trials are handed out.

    The attribute ``error`` is the first exception that the source raised, or None. It does not reach Tune, which would
    end at once, with trials that have not written their checkpoints, and would say it as a text only.
    """

    def __init__(self, source: TrialSource, max_restarts: int) -> None:
        super().__init__()
        self.source, self.max_restarts = source, max_restarts
        self.stopping = False
        self.error: Exception | None = None
        self.running: dict[str, Assignment] = {}
        self.lost: deque[Assignment] = deque()
        self.deaths: Counter[str] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        # a sweep is continued from fedray's records, never from Tune's
        return {}

    def suggest(self, trial_id: str) -> Any:
        if not self.running and not self.lost and (self.stopping or self.source.exhausted):
            return Searcher.FINISHED
        if self.stopping:
            return None
        assignment = None
        with self._error_kept():
            assignment = self.lost.popleft() if self.lost else self.source.next_trial()
        if assignment is None:
            return None
        self.running[trial_id] = assignment
        return {"assignment": assignment._asdict()}

    def report(self, trial_id: str, message: Message) -> bool:
        """Passes a message of a trial to the source, and returns whether the trial must stop."""
        with self._error_kept():
            return self.source.report(self.running[trial_id].key, message)
        return True

    @contextlib.contextmanager
    def _error_kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        if not error:
            self.running.pop(trial_id, None)

    def trial_died(self, trial_id: str, error: str) -> None:
        """Called when the process of a trial died or could not be set up. The trial is queued again, or, if it was
        restarted too often, reported as failed to ``source``, the object that proposes trials.

        ``trial_id`` is Tune's name for the trial. The first line of ``error`` says why the process died.
        """
        assignment = self.running.pop(trial_id)
        line = error.splitlines()[0]
        self.deaths[assignment.key] += 1
        with self._error_kept():
            if self.deaths[assignment.key] > self.max_restarts:
                self.source.trial_failed(assignment.key, f"{error}\n{line} ({self.deaths[assignment.key]} times)")
            else:
                self.lost.append(assignment)
                self.source.trial_lost(assignment.key, line)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing. Tune's interface has this method to save the state of a searcher, but here the source of the
        trials keeps records of its own."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing. Tune's interface has this method to load the state of a searcher that :meth:`save` has written,
        but here the source of the trials continues from records of its own."""


class Interrupted(Exception):
    """Raised by :func:`run_trials` if the user interrupted the sweep. By then all trials have stopped after the round
    in progress, and have written a checkpoint."""


class SourceStopper(Stopper, tune.Callback):
    """Tells Ray Tune when a trial, or the whole search, must stop. To decide this, it passes the messages of the
    trials to their source, the object that decides which trials run. It also tells the source when the process of a
    trial has died.

    Tune asks at each message whether the trial must stop, and about ten times a second whether all trials must. They
    must if the source raises an exception, or if no trial could start for ``start_timeout`` seconds. When the event
    ``stopping`` is set, the file ``stop_file`` is created, at which the trials end by themselves; Tune stops after
    that. After the search, the attribute ``error`` is the exception that the caller must raise, or None.

    ``searcher`` is the object from which Tune gets the trials; its attribute ``source`` is their source. ``bundles``
    are the resources of one trial, for an error message.
    """

    def __init__(
        self,
        searcher: SourceSearcher,
        bundles: Bundles,
        start_timeout: float,
        stopping: threading.Event,
        stop_file: Path,
    ) -> None:
        self.searcher, self.bundles, self.start_timeout = searcher, bundles, start_timeout
        self.stopping, self.stop_file = stopping, stop_file
        self.started: set[str] = set()
        self.waiting_since: float | None = None
        self.error: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self.searcher.report(trial_id, result["messages"][0])

    def stop_all(self) -> bool:
        if self.searcher.error is not None and self.error is None:
            self.error = self.searcher.error
            # the runs keep their checkpoints, from which the same command goes on
            self.stop_file.touch()
        if self.stopping.is_set() and not self.searcher.stopping:
            self.searcher.stopping = True
            self.stop_file.touch()
        if self.started or not self.searcher.running:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = time.monotonic()
        if self.error is not None:
            return True
        if self.searcher.stopping and not self.started:
            self.error = Interrupted()
        elif self.waiting_since is not None and time.monotonic() - self.waiting_since > self.start_timeout:
            shortage = trial_shortage(self.bundles)
            found = f"no trial could be started in {self.start_timeout:g} s: {shortage}; {how_busy()}"
            self.error = UserError(found)
        return self.error is not None

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.started.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.started.discard(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.started.discard(trial.trial_id)
        self.searcher.trial_died(trial.trial_id, _cause_of_death(trial))


def run_trials(
    source: TrialSource,
    bundles: Bundles,
    max_concurrent_trials: int,
    custom: CustomObjects,
    start_timeout: float,
    stopping: threading.Event,
) -> None:
    """Runs the trials of ``source`` (choices of hyper-parameters, each with one or more runs) on Ray until there are no
    further trials.

    A trial whose process dies is started again, at most :data:`MAX_RESTARTS` times.

    Args:
        source: Decides which trials run, and receives their messages.
        bundles: The resources of one trial, which Ray reserves as one placement group.
        max_concurrent_trials: How many trials run at the same time.
        custom: The data set and the user's objects, which all trials use.
        start_timeout: Seconds after which the sweep ends if no trial could be started.
        stopping: When this event is set, the trials stop after the round in progress.

    Raises:
        UserError: No trial could be started.
        Interrupted: ``stopping`` was set, and the trials have stopped.
        Exception: Whatever ``source`` raises.
    """
    ship_user_code(custom.code)
    with (
        _scratch() as scratch,
        _tune_settings(max_concurrent_trials),
        survive_memory_monitor(),
    ):
        stop_file = scratch / "stop"
        searcher = SourceSearcher(source, MAX_RESTARTS)
        stopper = SourceStopper(searcher, bundles, start_timeout, stopping, stop_file)
        assert custom.source is not None
        shared = Shared(
            store_source(custom.source), replace(custom, source=None), user_import_path(), Path.cwd(), stop_file
        )
        trainable = tune.with_parameters(TrialActor, shared=shared)
        tune.Tuner(
            tune.with_resources(trainable, tune.PlacementGroupFactory(bundles)),
            tune_config=tune.TuneConfig(
                search_alg=searcher, num_samples=-1, max_concurrent_trials=max_concurrent_trials, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=str(scratch),
                stop=stopper,
                callbacks=[stopper],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        ).fit()
        if stopper.error is not None:
            raise stopper.error


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A context with a folder for what Ray Tune writes, which ``fedray clean`` finds if this process is killed."""
    use = FolderUse(Path(tempfile.mkdtemp(prefix=SCRATCH)), f"process {os.getpid()} on {platform.node()}")
    use.begin()
    try:
        yield use.path
    finally:
        use.remove(patience=0, anyway=True)


@contextlib.contextmanager
def _tune_settings(max_concurrent_trials: int) -> Iterator[None]:
    """A context in which Ray Tune's environment variables are set for our use and its logger is silent."""
    settings = SETTINGS | {"TUNE_MAX_PENDING_TRIALS_PG": str(max_concurrent_trials)}
    before = {name: os.environ.get(name) for name in settings}
    logger = logging.getLogger("ray.tune")
    level = logger.level
    os.environ.update(settings)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _cause_of_death(trial: Any) -> str:
    """Returns why the process of a trial of Ray Tune died: one line, and under it whatever else Ray says."""
    # trial.get_error() looks for this file in the storage, where Tune would copy it only later
    found = Path(trial.error_file).read_text(encoding="utf-8", errors="replace") if trial.error_file else ""
    lines = [line for line in found.splitlines() if line.strip() and not line.startswith("Failure #")]
    return "\n".join(["its process died" + (f": {lines[0]}" if lines else ""), *lines[1:]])
