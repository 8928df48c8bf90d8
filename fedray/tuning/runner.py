"""Trials on a Ray cluster, by Ray Tune: each has a placement group with all that it needs, and none waits for ever.

Tune starts the trials, side by side, keeps their actors from one trial to the next, and starts a trial again whose
process died. What a sweep knows is not Tune's: it is told to a :class:`Desk`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from fedray.engine.stored import StoredSource
from fedray.errors import UserError
from fedray.tuning.resources import Bundles, shortage
from fedray.tuning.trial import Assignment, Message, Running, TrialEnd

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
        """The process of a trial died: it is started again."""

    def failed(self, key: str, error: str) -> None:
        """The process of a trial died too often."""


class TrialActor(tune.Trainable):
    """Runs one trial after another in a process."""

    def setup(self, config: dict[str, Any], shared: Mapping[str, Any] | None = None) -> None:
        own = dict(shared or {})
        source: StoredSource | None = own.pop("source")
        self._own = own if source is None else own | {"data": source.get()}
        self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._trial = Running(Assignment(**config["assignment"]), self._own)

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
    """Gives Tune what the desk has, at most ``concurrency`` at a time."""

    def __init__(self, desk: Desk, concurrency: int) -> None:
        super().__init__()
        self.desk, self.concurrency = desk, concurrency
        self.keys: dict[str, str] = {}
        self.lost: dict[str, str] = {}

    def suggest(self, trial_id: str) -> Any:
        if self.desk.exhausted:
            # idle processes end now: nobody needs them, and Tune does not survive the death of one
            return Searcher.FINISHED
        if len(self.keys) >= self.concurrency:
            return None
        assignment = self.desk.next()
        if assignment is None:
            return None
        self.keys[trial_id] = assignment.key
        return {"assignment": assignment._asdict()}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        key = self.keys.pop(trial_id, None)
        if error and key is not None:
            self.lost[trial_id] = key

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the desk keeps its own records."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its own records."""


class _Judge(FIFOScheduler):
    """Hands what trials tell to the desk."""

    def __init__(self, desk: Desk, asker: _Asker) -> None:
        super().__init__()
        self.desk, self.asker = desk, asker

    def on_trial_result(self, controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
        stop = self.desk.hear(self.asker.keys[trial.trial_id], result["told"][0])
        return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE

    def on_trial_complete(self, controller: Any, trial: Any, result: Mapping[str, Any]) -> None:
        message = result["told"][0]
        if isinstance(message, TrialEnd):
            self.desk.hear(self.asker.keys[trial.trial_id], message)


class _Watch(tune.Callback):
    """Sees to it that trials start in time, and hears of processes that die."""

    def __init__(self, desk: Desk, asker: _Asker, bundles: Bundles, patience: float, stopping: threading.Event) -> None:
        self.desk, self.asker, self.bundles, self.patience, self.stopping = desk, asker, bundles, patience, stopping
        self.running: set[str] = set()
        self.waiting_since: float | None = None

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        if self.stopping.is_set():
            raise Interrupted
        if self.running or not self.asker.keys:
            self.waiting_since = None
            return
        now = time.monotonic()
        self.waiting_since = self.waiting_since or now
        if now - self.waiting_since > self.patience:
            raise UserError(f"no trial could be started in {self.patience:g} s: {shortage(self.bundles)}")

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.discard(trial.trial_id)

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.discard(trial.trial_id)
        self.desk.lost(self.asker.keys[trial.trial_id], _reason(trial))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.discard(trial.trial_id)
        # Tune has told the searcher before
        self.desk.failed(self.asker.lost.pop(trial.trial_id), _reason(trial))


class Interrupted(Exception):
    """The user asked for an end: trials stop after the round that they are in, with a checkpoint."""


def run_trials(
    desk: Desk,
    bundles: Bundles,
    concurrency: int,
    shared: Mapping[str, Any],
    patience: float,
    stopping: threading.Event,
    max_lost: int = 3,
) -> None:
    """Run what ``desk`` gives until it is exhausted, ``concurrency`` trials at once, each in ``bundles`` of its own.

    ``shared``: what all trials get: ``source``, a :class:`StoredSource` or None, and further arguments of
    :func:`fedray.simulate`. Raises :class:`UserError` if none can be started for ``patience`` seconds, and
    :class:`Interrupted` when ``stopping`` is set.
    """
    asker = _Asker(desk, concurrency)
    watch = _Watch(desk, asker, bundles, patience, stopping)
    resources = tune.PlacementGroupFactory(bundles)
    trainable = tune.with_resources(tune.with_parameters(TrialActor, shared=shared), resources)
    with tempfile.TemporaryDirectory(prefix="fedray-tune-") as scratch, _settings(concurrency):
        tune.run(
            trainable,
            name="sweep",
            search_alg=asker,
            scheduler=_Judge(desk, asker),
            callbacks=[watch],
            num_samples=-1,
            reuse_actors=True,
            max_failures=max_lost,
            raise_on_failed_trial=False,
            storage_path=scratch,
            verbose=0,
        )


@contextlib.contextmanager
def _settings(concurrency: int) -> Iterator[None]:
    """Tune's settings, which are environment variables, and its silence."""
    settings = SETTINGS | {"TUNE_MAX_PENDING_TRIALS_PG": str(concurrency)}
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


def _reason(trial: Any) -> str:
    """Why the process of a trial died, in a line."""
    error = trial.get_pickled_error() or trial.get_error() or "its process died"
    return (str(error).strip().splitlines() or ["its process died"])[0]
