"""Makes the runs that a table lacks, side by side on a Ray cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import load
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import last_line
from fedray.tracking.progress import clock
from fedray.tuning.finals import is_finished
from fedray.tuning.trial import Assignment, Message, RunEnd, TrialEnd
from reproducing.published import Planned

if TYPE_CHECKING:
    from fedray.data.sources.source import Source

Say = Callable[[str], None]


class PlannedRuns:
    """A source (:class:`~fedray.tuning.trial_source.TrialSource`) of the planned runs that have not ended.

    ``folder`` is that of all runs. ``engine`` is what the cluster adds to their settings. ``failures`` counts the runs
    that failed.
    """

    def __init__(self, planned: Sequence[Planned], folder: Path, engine: Mapping[str, Any], say: Say) -> None:
        self.folder, self.engine, self.say = folder, engine, say
        self.left = {run.folder: run for run in planned if not is_finished(folder / run.folder)}
        self.total, self.failures = len(self.left), 0
        self._ended: set[str] = set()
        self._began = time.monotonic()

    @property
    def exhausted(self) -> bool:
        return not self.left

    def next_trial(self) -> Assignment | None:
        if not self.left:
            return None
        name = next(iter(self.left))
        place = self.folder / name
        settings = {**self.left.pop(name).settings, **self.engine}
        settings |= {"run.output": str(place.parent), "run.name": place.name, "run.resume": "auto"}
        # an infinite budget, so that no round is reported
        return Assignment(name, [settings], "train_loss", "rounds", math.inf)

    def report(self, key: str, message: Message) -> bool:
        if isinstance(message, RunEnd):
            # a run that was lost after its end reports it again
            self._ended.add(key)
            ended = len(self._ended)
            left = clock((time.monotonic() - self._began) / ended * (self.total - ended))
            accuracy = message.row.get("test_accuracy", math.nan)
            self.say(f"{ended}/{self.total} {key}: {message.status}, accuracy {accuracy:.4f}  {left} left")
        elif isinstance(message, TrialEnd) and message.error is not None:
            self.trial_failed(key, message.error)
        return False

    def trial_lost(self, key: str, error: str) -> None:
        self.say(f"{key}: {error}; it continues from its last checkpoint")

    def trial_failed(self, key: str, error: str) -> None:
        self.failures += 1
        self.say(f"{key} failed: {last_line(error)}")


def make_runs(planned: Sequence[Planned], folder: Path, say: Say) -> tuple[int, bool]:
    """Makes those of the planned runs that have not ended. Returns how many failed, and whether the user stopped them.

    Runs on the same data are made side by side, as many as fit on the cluster. A run that was stopped goes on from its
    last checkpoint. Raises :class:`UserError` before the first run if the data of any run can't be read.
    """
    groups: dict[str, list[Planned]] = {}
    for run in planned:
        if not is_finished(folder / run.folder):
            groups.setdefault(_data_of(run), []).append(run)
    if not groups:
        return 0, False
    if len(groups) > 1:
        say("looking for the data of all runs ...")
        for group in groups.values():
            _read_source(group[0])
    failures = 0
    first = load(next(iter(groups.values()))[0].settings)
    with RayStart(first.engine, say, at_once=True) as start, interruptible(say, "stopping the runs") as stopping:
        started_here = start.ready()
        for group in groups.values():
            failed, stopped = _make(group, folder, say, started_here, stopping)
            failures += failed
            if stopped:
                return failures, True
    return failures, False


def _data_of(run: Planned) -> str:
    """Returns what runs have in common whose data are read once for all of them."""
    keys = sorted(key for key in run.settings if key.startswith(("data.", "task.")) and key != "data.seed")
    own = ("data.partition.", "data.clients", "data.samples_per_client", "data.public_", "data.augment")
    return repr([(key, run.settings[key]) for key in keys if not key.startswith(own)])


def _read_source(run: Planned) -> Source:
    from fedray.data.sources.source import source_of

    config = load(run.settings)
    return source_of(config.data, config.task)


def _make(group: Sequence[Planned], folder: Path, say: Say, started_here: bool, stopping: Any) -> tuple[int, bool]:
    from fedray.experiment.custom import CustomObjects
    from fedray.tuning.resources import bundles_of, count_concurrent_trials, engine_of_trials
    from fedray.tuning.runner import Interrupted, run_trials

    settings = group[0].settings
    config = load(settings)
    own = CustomObjects(_read_source(group[0]), preloaded=True)
    of_engine = {key: value for key, value in settings.items() if key.startswith("engine.")}
    engine = engine_of_trials(config.engine, of_engine, None)
    complete = load({**settings, **engine}).engine
    bundles = bundles_of(complete)
    concurrent, _ = count_concurrent_trials(bundles, None, started_here)
    source = PlannedRuns(group, folder, engine, say)
    say(f"{config.data.source}: {source.total} runs, {concurrent} at once -> {folder}")
    try:
        run_trials(source, bundles, concurrent, own, complete.start_timeout, stopping)
    except Interrupted:
        return source.failures, True
    return source.failures, False
