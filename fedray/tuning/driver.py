"""Sweeps from start to end: :func:`tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.api import handed_over
from fedray.config import load
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import UserError
from fedray.experiment.first_checks import check_first
from fedray.tuning.spec import SweepSpec, check_together, read_sweeps
from fedray.tuning.view import View
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    import pandas as pd

    from fedray.algorithms import Algorithm
    from fedray.experiment.experiment import Own
    from fedray.tuning.sweep import Sweep
    from fedray.tuning.trial_source import TrialSource


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep, which is read from its folder. ``interrupted`` says that the user stopped it before its
    end."""

    folder: Path
    interrupted: bool = False

    @property
    def trials(self) -> pd.DataFrame:
        """A table with a row for each trial: what was sampled, and what it reached.

        :func:`fedray.tuning.report.trial_table` describes its columns.
        """
        from fedray.tuning.report import trial_table

        return trial_table(self.folder)

    @property
    def best(self) -> list[Path]:
        """The configuration files of the best trials, for :func:`fedray.simulate`.

        With one objective there is one file. With several there is one for each trial on the Pareto front. The list is
        empty if no trial has completed with finite values.
        """
        return sorted(self.folder.glob("best*.yaml"))


def tune(
    space: str | Path | Mapping[str, Any],
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
    callbacks: Sequence[Any] = (),
    retry_failed: bool = False,
    verbose: bool = False,
    view: View | None = None,
) -> list[SweepResult]:
    """Searches hyper-parameters, or continues a search that was stopped or killed.

    ``space`` is a space file, the name of one that comes with fedray, or a mapping like a space file. ``overrides`` are
    texts ``key=value`` that replace keys of the base configuration or of ``tune.*``. ``data`` to ``algorithm`` are as
    in :func:`fedray.simulate`; a module as ``model`` starts the runs of all seeds (``tune.seeds``) from its own
    weights, and a class starts each from weights that are drawn with its seed. ``callbacks`` are shown every run of
    every trial, as in :func:`fedray.simulate`; each process of a trial has its own copy of them. ``retry_failed`` runs
    trials that failed once more. ``verbose`` shows what the command ``fedray tune`` shows. ``view`` replaces the object
    that shows it.

    Returns a result for each environment of the space file, or a single one if it has none. Raises
    :class:`fedray.UserError` for what can't be searched as asked.
    """
    view = view or View(quiet=not verbose, warn=PythonWarnings())
    named, algorithm = handed_over(algorithm)
    specs = read_sweeps(space, [*overrides, *named])
    check_together(specs)
    objects = {"data": data, "model": model, "loss": loss, "metrics": metrics, "transform": transform}
    objects["algorithm"] = algorithm
    check_first(load(specs[0].base), [name for name, each in objects.items() if each is not None])
    with start_ray(specs, view) as start:
        own = load_own(specs[0], data, test, client_column, label_column, model, loss, metrics, transform, algorithm)
        own = replace(own, callbacks=tuple(callbacks))
        return run_sweeps(specs, own, start, view, retry_failed)


def start_ray(specs: Sequence[SweepSpec], view: View) -> RayStart:
    """Returns a connection to Ray for the sweeps.

    It is made at once if any of the sweeps is new, and otherwise only when a trial is left to run. Lines about it are
    shown in ``view``.
    """
    is_new = any(not spec.folder.exists() for spec in specs)
    return RayStart(load(specs[0].base).engine, view.say, at_once=is_new)


def load_own(
    spec: SweepSpec,
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    transform: Any = None,
    algorithm: type[Algorithm] | None = None,
) -> Own:
    """Returns what all trials are made from: the user's own objects and the data set, which is loaded once for all.

    Raises :class:`UserError` if ``test`` comes without ``data``, or if the data can't be loaded.
    """
    from fedray.data.sources.own import own_source
    from fedray.data.sources.source import source_of
    from fedray.experiment.experiment import Own

    config = load(spec.base)
    of_task = config.task.kind, config.task.ignore_index
    if data is not None:
        source = own_source(
            data, test, client_column, label_column, config.data.normalization, *of_task, config.data.access,
            config.data.image_size,
        )  # fmt: skip
    elif test is not None:
        raise UserError("tune(test=...) needs data=... too")
    else:
        source = source_of(config.data, config.task)
    return Own(source, model, loss, metrics or {}, transform, algorithm, preloaded=data is None)


def run_sweeps(
    specs: Sequence[SweepSpec],
    own: Own,
    start: RayStart,
    view: View,
    retry_failed: bool = False,
    further_sources: Callable[[Sequence[Sweep]], Sequence[TrialSource]] = lambda sweeps: (),
) -> list[SweepResult]:
    """Runs sweeps that have the same data and engine to their end, and returns a result for each.

    All trials are made from ``own``. ``start`` is the connection to Ray, which is waited for when the first trial must
    run. ``view`` shows the progress. ``retry_failed`` runs the trials that failed in an earlier call once more.

    ``further_sources`` is called with the opened sweeps, and returns further sources of trials, which run beside those
    of the sweeps. A suite uses it to run the winner of each sweep on fresh seeds.
    """
    from fedray.tuning.opening import open_sweep
    from fedray.tuning.trial_source import CombinedTrialSource

    with contextlib.ExitStack() as stack:
        sweeps = [stack.enter_context(open_sweep(spec, own, view.say)) for spec in specs]
        for sweep in sweeps:
            sweep.observer = view
            if retry_failed and (again := sweep.study.retry_failed()):
                view.say(f"{sweep.name}: {again} failed trial{'s are' if again > 1 else ' is'} tried again")
            if sweep.finished:
                view.say(f"{sweep.name} is finished already: {len(sweep.study.trials)} trials -> {sweep.folder}")
        source = CombinedTrialSource([*sweeps, *further_sources(sweeps)])
        interrupted = not source.exhausted and _run(sweeps, source, own, start, view)
        for sweep in sweeps:
            sweep.write_best()
            if failed := len(sweep.study.failed):
                view.say(
                    f"{sweep.name}: {failed} trial{'s' if failed > 1 else ''} failed; to try again: --retry-failed"
                )
        return [SweepResult(sweep.folder, interrupted) for sweep in sweeps]


def _run(sweeps: Sequence[Sweep], source: TrialSource, own: Own, start: RayStart, view: View) -> bool:
    """Runs the trials of ``source``, which are those of ``sweeps`` and others. Returns whether the user stopped
    them."""
    started_here = start.ready()
    from fedray.core.transform import SeededTransform
    from fedray.engine.ray.engine import ship_user_code
    from fedray.tuning.resources import bundles_of, count_concurrent_trials, engine_of_trials, unused_gpus
    from fedray.tuning.runner import Interrupted, run_trials

    asked = sweeps[0].spec.tune.max_concurrent_trials
    limit = None if asked == "auto" else asked
    engine_asked = load(sweeps[0].base).engine
    settings = engine_of_trials(engine_asked, sweeps[0].base, limit)
    engine = load({**sweeps[0].base, **settings}).engine
    bundles = bundles_of(engine)
    concurrent, fewer = count_concurrent_trials(bundles, limit, started_here)
    for line in (fewer, unused_gpus(engine_asked, start.gpus())):
        if line:
            view.say(line)
    for sweep in sweeps:
        sweep.engine = settings
        if not sweep.finished:
            for line in (*sweep.notes, sweep.introduction(concurrent)):
                view.say(line)
    changes = () if own.transform is None else SeededTransform(own.transform).code
    own_objects = (own.model, own.loss, own.algorithm, *changes, *own.metrics.values(), *own.callbacks)
    ship_user_code([thing for thing in own_objects if thing is not None])
    with interruptible(view.say, "stopping the trials after this round") as stopping:
        view.start(sweeps)
        try:
            run_trials(source, bundles, concurrent, own, engine.start_timeout, stopping)
        except Interrupted:
            return True
        finally:
            view.stop()
    return False
