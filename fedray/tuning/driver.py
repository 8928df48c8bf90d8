"""Runs sweeps from start to end: :func:`tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.api import custom_objects, handed_over, names_of
from fedray.config import load
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import UserError
from fedray.experiment.first_checks import check_first
from fedray.loggers import prepare
from fedray.remote.fetching import as_path
from fedray.tuning.spec import SweepSpec, check_together, merge_settings, read_sweeps
from fedray.tuning.view import View
from fedray.util.arguments import callbacks_of, override_texts
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    import pandas as pd

    from fedray.algorithms import Algorithm
    from fedray.experiment.custom import CustomObjects
    from fedray.remote.mirror import Mirror
    from fedray.tuning.sweep import Sweep
    from fedray.tuning.trial_source import TrialSource


@dataclass(frozen=True)
class SweepResult:
    """What :func:`tune` returns for each sweep (a search over hyper-parameters): where its results are, and how it
    ended.

    ``folder`` is the sweep's folder on this machine. ``uri`` is the URI to which the sweep's results are sent if
    ``tune.output`` is a URI, and otherwise None. ``interrupted`` is true if the user stopped the sweep before its end.
    The properties ``trials`` (a table of all trials) and ``best`` (the configuration files of the best trials) are read
    anew whenever they are used.

    Example::

        (result,) = fedray.tune("fedprox", ["tune.trials=20", "data.source=sample"])
        print(result.trials, result.best)
    """

    folder: Path
    interrupted: bool = False
    uri: str | None = None

    def __fspath__(self) -> str:
        """The path or the URI of the sweep, so that a result can be handed over in its place."""
        return self.uri or str(self.folder)

    @property
    def trials(self) -> pd.DataFrame:
        """A table with a row for each trial: its number, its state (such as complete or pruned), its sampled values and
        its results.

        :func:`fedray.tuning.report.trial_table` describes all columns.
        """
        from fedray.tuning.report import trial_table

        return trial_table(as_path(self.uri or self.folder))

    @property
    def best(self) -> list[Path]:
        """The configuration files of the best trials, which :func:`fedray.simulate` can run.

        With one objective there is one file, with several objectives one for each trial on the Pareto front. The list
        is empty if no trial has completed with finite values.
        """
        return sorted(self.folder.glob("best*.yaml"))


def tune(
    space: str | PathLike[str] | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    transform: Any = None,
    algorithm: type[Algorithm] | None = None,
    upload: Sequence[Any] | None = None,
    sampling: Any = None,
    aggregation: Any = None,
    attack: Any = None,
    callbacks: Sequence[Any] = (),
    retry_failed: bool = False,
    verbose: bool = False,
    view: View | None = None,
) -> list[SweepResult]:
    """Searches hyper-parameters, or continues a search that was stopped or killed.

    Args:
        space: Says what is searched: the path of a space file (a YAML file that describes a search), the name of a
            space file that comes with fedray, or a mapping with the content of such a file.
        overrides: Texts ``key=value`` that replace keys of the base configuration or of ``tune.*``. A searched key that
            is set here is not searched.
        data, test: The training and the test set, in any form that :func:`fedray.simulate` accepts. Without ``data``
            the data set is the one that ``data.source`` names.
        client_column, label_column: If the data are a table, the columns with the clients and with the targets.
        model: A class or function that makes the model, with other initial weights for each seed (``tune.seeds``); or a
            module, whose weights are the initial weights for all seeds.
        loss, metrics, transform, algorithm, upload, sampling, aggregation, attack: As in :func:`fedray.simulate`.
        callbacks: Callbacks for every run of every trial, as in :func:`fedray.simulate`. Each process that runs trials
            has its own copy of them.
        retry_failed: Whether trials that failed in an earlier call run once more.
        verbose: Whether to show what the command ``fedray tune`` shows.
        view: The object that shows the progress, instead of the one that ``verbose`` selects.

    Returns:
        A result for each environment of the space file (a combination of values for which a separate search is made),
        or a single one if it has no environments.

    Raises:
        fedray.UserError: The search is not possible as it was asked for.

    Example::

        space = {"train.lr": {"loguniform": [0.01, 1]}}
        (result,) = fedray.tune({"base": {"data.source": "sample"}, "spaces": {"wide": space}}, ["tune.trials=20"])
    """
    view = view or View(quiet=not verbose, warn=PythonWarnings())
    callbacks = callbacks_of(callbacks)
    objects = {"model": model, "loss": loss, "metrics": metrics, "transform": transform, "algorithm": algorithm}
    objects |= {"upload": upload, "sampling": sampling, "aggregation": aggregation, "attack": attack}
    named, objects = handed_over(data, objects)
    specs = read_sweeps(space, [*override_texts(overrides), *named])
    check_together(specs)
    check_first(load(specs[0].base), names_of(data, objects))
    with start_ray(specs, view) as start:
        custom = load_custom(specs[0], data, test, client_column, label_column, **objects)
        custom = replace(custom, callbacks=tuple(callbacks))
        return run_sweeps(specs, custom, start, view, retry_failed)


def start_ray(specs: Sequence[SweepSpec], view: View) -> RayStart:
    """Returns the connection to the Ray cluster that runs the trials of the sweeps ``specs``, for use in a ``with``
    statement. ``view`` shows lines about Ray to the user.

    If one of the sweeps has no folder yet, the connection is made right away. Otherwise it is made only when a trial
    has to run, which may never happen because all sweeps are finished.
    """
    is_new = any(not spec.folder.exists() for spec in specs)
    return RayStart(load(specs[0].base).engine, view.say, at_once=is_new)


def load_custom(
    spec: SweepSpec,
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    **objects: Any,
) -> CustomObjects:
    """Loads the data set once for all trials of a call of :func:`tune`. Returns it together with the other objects that
    the user passed from Python.

    The data set is ``data`` and ``test``, or, if ``data`` is None, the source that the configuration of ``spec`` names.
    In a table, ``client_column`` and ``label_column`` are the columns with the clients and with the targets.
    ``objects`` are the arguments of :func:`tune` from ``model`` to ``attack``, by name.
    Raises :class:`UserError` if there is ``test`` without ``data``, or if the data can't be loaded.
    """
    from fedray.data.sources.source import source_of

    if data is None and test is not None:
        raise UserError("tune(test=...) needs data=... too")
    config = load(spec.base)
    custom = custom_objects(config, data, test, client_column, label_column, **objects)
    return custom if data is not None else replace(custom, source=source_of(config.data, config.task), preloaded=True)


def run_sweeps(
    specs: Sequence[SweepSpec],
    custom: CustomObjects,
    start: RayStart,
    view: View,
    retry_failed: bool = False,
    further_sources: Callable[[Sequence[Sweep]], Sequence[TrialSource]] = lambda sweeps: (),
) -> list[SweepResult]:
    """Runs several sweeps to their end, and returns a result for each of ``specs``, in the same order. The sweeps must
    have the same data and the same settings ``engine.*``. :func:`tune` calls this, and so does a suite, which compares
    algorithms.

    ``custom`` has the data set and the user's objects, which all trials use. ``start`` is the connection to Ray. If a
    trial has to run, this function first waits until the connection is made. ``view`` shows the progress. With
    ``retry_failed``, trials that failed in an earlier call run once more.

    ``further_sources`` is called once, before any trial runs, with a list that has a
    :class:`~fedray.tuning.sweep.Sweep` for each of ``specs``. It returns objects that supply trials to be run in
    addition to those of the sweeps. A suite uses this to run the best trial of each sweep on seeds that no trial has
    used.
    """
    from fedray.tuning.opening import open_sweep
    from fedray.tuning.outputs import mirrored_sweep
    from fedray.tuning.trial_source import CombinedTrialSource

    with contextlib.ExitStack() as stack:
        mirrors = [stack.enter_context(mirrored_sweep(spec, view.say)) for spec in specs if spec.uri is not None]
        sweeps = [stack.enter_context(open_sweep(spec, custom, view.say)) for spec in specs]
        for sweep in sweeps:
            sweep.view = view
            if retry_failed and (again := sweep.study.retry_failed()):
                view.say(f"{sweep.name}: {again} failed trial{'s are' if again > 1 else ' is'} tried again")
            if sweep.finished:
                view.say(f"{sweep.name} is finished already: {len(sweep.study.trials)} trials -> {sweep.folder}")
        source = CombinedTrialSource([*sweeps, *further_sources(sweeps)])
        interrupted = not source.exhausted and _run(sweeps, source, custom, start, view, mirrors)
        for sweep in sweeps:
            sweep.write_best()
            if failed := len(sweep.study.failed):
                many = "s" if failed > 1 else ""
                view.say(f"{sweep.name}: {failed} trial{many} failed; to try again: --retry-failed")
        return [SweepResult(sweep.folder, interrupted, sweep.spec.uri) for sweep in sweeps]


def sizes_of_trials(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yields the settings whose memory has to be measured: the base of ``sweep``, and the ends of what it searches. An
    algorithm's rates are left out, as they do not change how much memory a trial takes."""
    yield dict(sweep.base)
    for values in sweep.spec.space.extremes(sweep.study.base):
        *_, key = values
        if not (key.startswith("algorithm.") and isinstance(values[key], float)):
            yield merge_settings(sweep.base, values)


def _run(
    sweeps: Sequence[Sweep],
    source: TrialSource,
    custom: CustomObjects,
    start: RayStart,
    view: View,
    mirrors: Sequence[Mirror],
) -> bool:
    """Runs the trials of ``source``, which combines the trials of ``sweeps`` and of further sources, such as a suite's
    final runs. They stop if one of ``mirrors`` fails.

    Returns whether the user interrupted the trials.
    """
    start.ready()
    from fedray.tuning.resources import placed
    from fedray.tuning.runner import Interrupted, run_trials

    asked = sweeps[0].spec.tune.max_concurrent_trials
    runs = (folder for sweep in sweeps for folder in sorted(sweep.folder.glob("trials/*/*")))
    bases = [settings for sweep in sweeps for settings in sizes_of_trials(sweep)]
    where = placed(bases, runs, custom, start, None if asked == "auto" else asked, view.say)
    for sweep in sweeps:
        sweep.engine = where.settings
        prepare(load(sweep.base).run.loggers, sweep.name)
        if not sweep.finished:
            for line in (*sweep.notes, sweep.introduction(where.concurrent)):
                view.say(line)
    with interruptible(view.say, "stopping the trials after this round") as stopping:
        for mirror in mirrors:
            mirror.on_failure(stopping)
        view.start(sweeps)
        try:
            run_trials(source, where.bundles, where.concurrent, custom, where.start_timeout, stopping)
        except Interrupted:
            return True
        finally:
            view.stop()
    return False
