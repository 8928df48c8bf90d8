"""Trials on a Ray cluster, by Ray Tune: each has a placement group with all that it needs, and none waits for ever.

Tune starts the trials, side by side, keeps their actors from one trial to the next, and starts a trial again whose
process died. What a sweep knows is not Tune's: it is told to a :class:`Desk`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ray import tune
from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.execution import tune_controller
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from fedray.engine.process import user_import_path
from fedray.engine.stored import StoredSource, store_source
from fedray.errors import UserError
from fedray.tuning.resources import Bundles, shortage
from fedray.tuning.trial import Assignment, Message, Running, TrialEnd

if TYPE_CHECKING:
    from fedray.experiment import Own

SETTINGS = {
    # our records are our own
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    # a user's modules and files are where the program was started
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class Desk(Protocol):
    """Who decides what is run, and hears of it."""

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing to run, and will be nothing, but for what is running."""

    def next(self) -> Assignment | None:
        """What to run next; None if there is nothing now."""

    def hear(self, key: str, message: Message) -> bool:
        """Take a message of a trial; whether it is to stop."""

    def lost(self, key: str, error: str) -> None:
        """The process of a trial died: the trial is started again."""

    def failed(self, key: str, error: str) -> None:
        """The process of a trial died too often."""


@dataclass(frozen=True)
class Shared:
    """What all trials get: what they are made from, whose data set is in the object store; where the user has modules;
    the driver's working directory, to which paths in a configuration are relative; and the file on their node that
    tells them, when it is there, to end after the round that they are in."""

    source: StoredSource
    own: Own
    path: Sequence[str]
    directory: Path
    stop_file: Path


class TrialActor(tune.Trainable):
    """Runs one trial after another in a process."""

    def setup(self, config: dict[str, Any], shared: Shared | None = None) -> None:
        assert shared is not None
        sys.path += [entry for entry in shared.path if entry not in sys.path]
        os.chdir(shared.directory)
        self._own = replace(shared.own, source=shared.source.get())
        self._stop_file = shared.stop_file
        self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._trial = Running(Assignment(**config["assignment"]), self._own, self._stop_file.exists)

    def step(self) -> dict[str, Any]:
        message = self._trial.next()
        # Tune takes a dict apart, and leaves a list as it is
        return {"told": [message], "done": isinstance(message, TrialEnd)}

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        self._trial.stop()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        self._trial.stop()


class _Asker(Searcher):
    """Gives Tune what the desk has, at most ``concurrency`` at a time; and again, ``max_lost`` times, what was in a
    process that died."""

    def __init__(self, desk: Desk, concurrency: int, max_lost: int) -> None:
        super().__init__()
        self.desk, self.concurrency, self.max_lost = desk, concurrency, max_lost
        self.stopping = False
        self.given: dict[str, Assignment] = {}
        self.again: deque[Assignment] = deque()
        self.deaths: Counter[str] = Counter()

    def suggest(self, trial_id: str) -> Any:
        if not self.given and not self.again and (self.stopping or self.desk.exhausted):
            return Searcher.FINISHED
        if self.stopping or len(self.given) >= self.concurrency:
            return None
        assignment = self.again.popleft() if self.again else self.desk.next()
        if assignment is None:
            return None
        self.given[trial_id] = assignment
        return {"assignment": assignment._asdict()}

    def ended(self, trial_id: str) -> None:
        """A trial needs no process any more."""
        self.given.pop(trial_id, None)

    def died(self, trial_id: str, error: str) -> None:
        """The process of a trial died, or could not be made ready."""
        assignment = self.given.pop(trial_id)
        line = error.splitlines()[0]
        self.deaths[assignment.key] += 1
        if self.deaths[assignment.key] > self.max_lost:
            self.desk.failed(assignment.key, f"{error}\n{line} ({self.deaths[assignment.key]} times)")
        else:
            self.again.append(assignment)
            self.desk.lost(assignment.key, line)

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Nothing: the scheduler and the callback hear of it too, and of more."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the desk keeps its own records."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its own records."""


class _Judge(FIFOScheduler):
    """Hands what trials tell to the desk."""

    def __init__(self, desk: Desk, asker: _Asker) -> None:
        super().__init__()
        self.desk, self.asker = desk, asker
        self.error: Exception | None = None

    def on_trial_result(self, controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        stop = self._hear(trial, result["told"][0])
        return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE

    def on_trial_complete(self, controller: Any, trial: Any, result: Mapping[str, Any]) -> None:
        message = result["told"][0]
        if isinstance(message, TrialEnd):
            self._hear(trial, message)

    def _hear(self, trial: Any, message: Message) -> bool:
        try:
            return self.desk.hear(self.asker.given[trial.trial_id].key, message)
        except Exception as error:
            # Tune would make another of it, or start the trial again
            self.error = self.error or error
            return True


class _Watch(TrialProgressCallback):
    """Sees to it that trials start in time, and hears of processes that die. In the place of Tune's own, which prints,
    and asks processes that Ray's memory monitor has killed."""

    def __init__(
        self,
        asker: _Asker,
        judge: _Judge,
        bundles: Bundles,
        patience: float,
        stopping: threading.Event,
        stop_file: Path,
    ) -> None:
        super().__init__()
        self.asker, self.judge, self.bundles, self.patience = asker, judge, bundles, patience
        self.stopping, self.stop_file = stopping, stop_file
        self.running: set[str] = set()
        self.waiting_since: float | None = None

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        if self.judge.error is not None:
            raise self.judge.error
        if self.stopping.is_set() and not self.asker.stopping:
            self.asker.stopping = True
            self.stop_file.touch()
        if self.asker.stopping and not self.running:
            raise Interrupted
        if self.running or not self.asker.given:
            self.waiting_since = None
            return
        now = time.monotonic()
        self.waiting_since = self.waiting_since or now
        if now - self.waiting_since > self.patience:
            raise UserError(f"no trial could be started in {self.patience:g} s: {shortage(self.bundles)}")

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        """Nothing: the judge hears of it."""

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.discard(trial.trial_id)
        self.asker.ended(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.discard(trial.trial_id)
        self.asker.died(trial.trial_id, _reason(trial))


class _ActorManager(RayActorManager):
    """Tune's own takes a process that Ray's memory monitor has killed for an error of its own, and ends all trials."""

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            exception = RayActorError(error_msg=str(exception))
        super()._actor_task_failed(tracked_actor_task, exception)


class Interrupted(Exception):
    """The user asked for an end: trials stop after the round that they are in, with a checkpoint."""


def run_trials(
    desk: Desk,
    bundles: Bundles,
    concurrency: int,
    own: Own,
    patience: float,
    stopping: threading.Event,
    max_lost: int = 3,
) -> None:
    """Run what ``desk`` gives until it is exhausted, ``concurrency`` trials at once, each in ``bundles`` of its own.

    ``own`` is what all are made from. A trial whose process dies is started again
    ``max_lost`` times. Raises :class:`UserError` if none can be started for ``patience`` seconds, and
    :class:`Interrupted` when ``stopping`` is set.
    """
    with tempfile.TemporaryDirectory(prefix="fedray-tune-") as scratch, _settings(concurrency):
        stop_file = Path(scratch) / "stop"
        asker = _Asker(desk, concurrency, max_lost)
        judge = _Judge(desk, asker)
        assert own.source is not None
        shared = Shared(store_source(own.source), replace(own, source=None), user_import_path(), Path.cwd(), stop_file)
        trainable = tune.with_parameters(TrialActor, shared=shared)
        tune.run(
            tune.with_resources(trainable, tune.PlacementGroupFactory(bundles)),
            name="sweep",
            search_alg=asker,
            scheduler=judge,
            callbacks=[_Watch(asker, judge, bundles, patience, stopping, stop_file)],
            num_samples=-1,
            reuse_actors=True,
            raise_on_failed_trial=False,
            storage_path=scratch,
            verbose=0,
        )
        if judge.error is not None:
            raise judge.error


@contextlib.contextmanager
def _settings(concurrency: int) -> Iterator[None]:
    """Tune's settings, which are environment variables, its silence, and an actor manager that it can't be given."""
    settings = SETTINGS | {"TUNE_MAX_PENDING_TRIALS_PG": str(concurrency)}
    before = {name: os.environ.get(name) for name in settings}
    logger = logging.getLogger("ray.tune")
    level = logger.level
    os.environ.update(settings)
    logger.setLevel(logging.CRITICAL)
    manager = tune_controller.RayActorManager
    tune_controller.RayActorManager = _ActorManager  # type: ignore[misc]
    try:
        yield
    finally:
        logger.setLevel(level)
        tune_controller.RayActorManager = manager  # type: ignore[misc]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _reason(trial: Any) -> str:
    """Why the process of a trial died: a line, and what else Ray says below it."""
    # Tune's own ways to ask for it look where nothing is kept
    found = Path(trial.error_file).read_text() if trial.error_file else ""
    said = [line for line in found.splitlines() if line.strip() and not line.startswith("Failure #")]
    return "\n".join(["its process died" + (f": {said[0]}" if said else ""), *said[1:]])
