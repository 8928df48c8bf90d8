"""Makes many runs whose settings are known in advance, side by side on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedray.config import flat, load
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import UserError, last_line
from fedray.loggers import prepare
from fedray.system.devices import MAY_NAME_FILES, with_absolute_paths
from fedray.tracking.folder import is_finished, keys_that_differ, read_config
from fedray.tuning.trial import Assignment, Line, Message, Round, RunEnd
from fedray.util.uris import below, is_uri

if TYPE_CHECKING:
    from fedray.experiment.custom import CustomObjects


@dataclass(frozen=True)
class Planned:
    """A run that is to be made: its folder below that of all runs, and its settings by dotted key."""

    folder: str
    settings: Mapping[str, Any]


class Watcher(Protocol):
    """Shows the user how runs go on."""

    def say(self, line: str) -> None:
        """Shows a line."""

    def began(self, runs: Sequence[str]) -> None:
        """Called before the runs of these names begin."""

    def round(self, run: str, row: Mapping[str, Any]) -> None:
        """Called now and then with the last row of metrics.csv of a run."""

    def ended(self, run: str, how: str, row: Mapping[str, Any]) -> None:
        """Called when a run has ended. ``how`` is ``completed``, ``diverged``, ``ended by a callback`` or
        ``failed: ...``."""

    def stop(self) -> None:
        """Called after the last run."""


class PlannedRuns:
    """A source (:class:`~fedray.tuning.trial_source.TrialSource`) of planned runs.

    ``place`` is the folder of all runs, or its URI. ``engine`` is what the cluster adds to their settings. The
    attribute ``failures`` maps the names of runs that failed to the errors.
    """

    def __init__(self, planned: Sequence[Planned], place: str | Path, engine: Mapping[str, Any], view: Watcher) -> None:
        self.place, self.engine, self.view = place, engine, view
        self.left = {run.folder: run for run in planned}
        self.failures: dict[str, str] = {}
        self._said: set[str] = set()

    @property
    def exhausted(self) -> bool:
        return not self.left

    def next_trial(self) -> Assignment | None:
        if not self.left:
            return None
        name = next(iter(self.left))
        settings = {**self.left.pop(name).settings, **self.engine}
        parent, _, own = name.rpartition("/")
        output = str(self.place)
        if parent:
            output = below(output, parent) if is_uri(output) else str(Path(output) / parent)
        settings |= {"run.output": output, "run.name": own}
        settings = {"run.resume": "auto", "run.group": Path(output_name(self.place)).name, **settings}
        return Assignment(name, [settings], "train_loss", "rounds", load(settings).rounds, alone=True)

    def report(self, key: str, message: Message) -> bool:
        if isinstance(message, Round):
            self.view.round(key, message.row)
        elif isinstance(message, Line):
            # runs that differ in little have the same warnings
            if message.text not in self._said:
                self._said.add(message.text)
                self.view.say(message.of(key))
        elif isinstance(message, RunEnd):
            how = "ended by a callback" if message.status == "interrupted" else message.status
            self.view.ended(key, how, message.row)
        elif message.error is not None:
            self.trial_failed(key, message.error)
        return False

    def trial_lost(self, key: str, error: str) -> None:
        self.view.say(f"{key}: {error}; it continues from its last checkpoint")

    def trial_failed(self, key: str, error: str) -> None:
        self.failures[key] = last_line(error)
        self.view.ended(key, f"failed: {last_line(error)}", {})


@dataclass(frozen=True)
class Made:
    """What :func:`make_runs` has done: the errors of the runs that failed, by name, and whether the user has stopped
    it."""

    failures: Mapping[str, str]
    interrupted: bool


def output_name(place: str | Path) -> str:
    """Returns the path of a folder or of a URI, without the options of a URI."""
    return str(place).partition("?")[0]


def unfinished(planned: Sequence[Planned], folder: Path) -> list[Planned]:
    """Returns those of the planned runs that have not ended in ``folder``.

    Raises :class:`UserError` if a run has ended there that was made with other settings.
    """
    left = []
    for run in planned:
        path = folder / run.folder
        if not is_finished(path) or load(run.settings).rounds > flat(read_config(path)).get("run.rounds", math.inf):
            left.append(run)
        elif changed := _changed(path, run.settings):
            raise UserError(
                f"the run in {path} has ended, and was made with other settings ({'; '.join(changed[:4])}): "
                "move it away, or choose another folder for all runs"
            )
    return left


def _changed(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns how the run in the folder ``path`` differs from ``settings``: ``train.lr was 0.1, and is 0.2 now``. A
    value that is found from others (null or ``auto``, or iterations, of which rounds are made) is not compared."""
    config, found = load(settings), read_config(path)
    wanted = config.model_dump(mode="json")
    wanted["system"] |= {key: with_absolute_paths(wanted["system"][key]) for key in MAY_NAME_FILES}
    old, new = flat(found), flat(wanted) | {"run.rounds": config.rounds}
    known = [key for key in settings if old.get(key) not in (None, "auto") and new.get(key) not in (None, "auto")]
    told = [key for key in keys_that_differ(found, wanted) if key in known]
    # with more rounds it goes on
    told += ["run.rounds"] if config.rounds < old.get("run.rounds", 0) else []
    return [f"{key} was {old[key]}, and is {new[key]} now" for key in told]


def make_runs(
    planned: Sequence[Planned],
    place: str | Path,
    view: Watcher,
    custom: Callable[[Mapping[str, Any]], CustomObjects] | None = None,
    most: int | None = None,
) -> Made:
    """Makes the planned runs in ``place``, a folder or its URI. Runs on the same data are made side by side, as many as
    fit on the cluster, and no more than ``most``. A run that was stopped goes on from its last checkpoint.

    ``custom`` returns what the user has passed for runs with some settings, with the data; unless given, the data are
    those that the settings name. Raises :class:`UserError` before the first run if the data of any run can't be read.
    """
    groups: dict[str, list[Planned]] = {}
    for run in planned:
        groups.setdefault(_data_of(run), []).append(run)
    if not groups:
        return Made({}, False)
    custom = custom or named_data
    if len(groups) > 1:
        view.say("looking for the data of all runs ...")
        for group in groups.values():
            custom(group[0].settings)
    failures: dict[str, str] = {}
    first = load(planned[0].settings)
    with RayStart(first.engine, view.say, at_once=True) as start:
        # before interruptible, because Ray's own handler of SIGTERM writes lines about the signal
        start.ready()
        prepare(first.run.loggers, first.run.group or Path(output_name(place)).name)
        view.began([run.folder for run in planned])
        try:
            with interruptible(view.say, "stopping the runs after this round") as stopping:
                stopped = any(
                    _make(group, place, view, custom(group[0].settings), start, most, stopping, failures)
                    for group in groups.values()
                )
        finally:
            view.stop()
    return Made(failures, stopped)


def named_data(settings: Mapping[str, Any]) -> CustomObjects:
    """Returns the data that ``settings`` name, read once for several runs."""
    from fedray.data.sources.source import source_of
    from fedray.experiment.custom import CustomObjects

    config = load(settings)
    return CustomObjects(source_of(config.data, config.task), preloaded=True)


def _data_of(run: Planned) -> str:
    """Returns what runs have in common that share data which are read once, and the processes that make them."""
    keys = sorted(key for key in run.settings if key.startswith(("data.", "task.", "engine.")) and key != "data.seed")
    own = ("data.partition.", "data.clients", "data.samples_per_client", "data.public_", "data.augment")
    return repr([(key, run.settings[key]) for key in keys if not key.startswith(own)])


def _make(
    group: Sequence[Planned],
    place: str | Path,
    view: Watcher,
    custom: CustomObjects,
    start: RayStart,
    most: int | None,
    stopping: Any,
    failures: dict[str, str],
) -> bool:
    """Makes the runs of a group, and adds those that failed to ``failures``. Returns whether the user stopped them."""
    from fedray.tuning.resources import placed
    from fedray.tuning.runner import Interrupted, run_trials

    folders = [] if is_uri(str(place)) else [Path(place) / run.folder for run in group]
    where = placed([run.settings for run in group], folders, custom, start, most, view.say)
    source = PlannedRuns(group, place, where.settings, view)
    many = "s" if len(group) > 1 else ""
    view.say(f"{load(group[0].settings).data.source}: {len(group)} run{many}, {where.concurrent} at once -> {place}")
    try:
        run_trials(source, where.bundles, where.concurrent, custom, where.start_timeout, stopping)
    except Interrupted:
        return True
    finally:
        failures |= source.failures
    return False
