"""Sweeps from start to end: :func:`tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import load
from fedray.engine.ray_start import RayStart
from fedray.errors import UserError
from fedray.simulation import interruptible
from fedray.tuning.spec import SweepSpec, check_together, read_sweeps
from fedray.tuning.view import View

if TYPE_CHECKING:
    import pandas as pd

    from fedray.experiment import Own
    from fedray.tuning.runner import Desk
    from fedray.tuning.sweep import Sweep


@dataclass(frozen=True)
class SweepResult:
    """A sweep, read from its folder. ``interrupted``: whether it was stopped before its end."""

    folder: Path
    interrupted: bool = False

    @property
    def trials(self) -> pd.DataFrame:
        """A row per trial: what was sampled, what was reached."""
        from fedray.tuning.report import trial_table

        return trial_table(self.folder)

    @property
    def best(self) -> list[Path]:
        """The configuration of the best trial, as a file for :func:`fedray.simulate`; of several objectives, one for
        each trial of the Pareto front."""
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
    retry_failed: bool = False,
    verbose: bool = False,
    view: View | None = None,
) -> list[SweepResult]:
    """Search a space, or go on with a search that was stopped or killed; one result for each environment.

    ``space``: a space file, the name of one that comes with fedray, or a mapping like one; ``overrides``: ``key=value``
    texts on top, for the base configuration or ``tune.*``. ``data`` to ``metrics`` are as in :func:`fedray.simulate`: a
    module as ``model`` starts all seeds (``tune.seeds``) from its own weights, a class from weights drawn from each.
    ``retry_failed``: trials that failed are tried once more. ``verbose`` shows what ``fedray tune`` shows; ``view``
    is shown it in any case, and may do otherwise with it.

    Raises :class:`fedray.UserError` for what can't be searched as asked.
    """
    view = view or View(quiet=not verbose)
    specs = read_sweeps(space, overrides)
    check_together(specs)
    with started(specs, view) as start:
        own = own_of(specs[0], data, test, client_column, label_column, model, loss, metrics)
        return run_sweeps(specs, own, start, view, retry_failed)


def started(specs: Sequence[SweepSpec], view: View) -> RayStart:
    """Ray, at once if any of the sweeps is new: the others may be finished."""
    fresh = any(not spec.folder.exists() for spec in specs)
    return RayStart(load(specs[0].base).engine, view.say, at_once=fresh)


def own_of(
    spec: SweepSpec,
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> Own:
    """What all trials are made from: the data set, loaded once, and the user's own objects."""
    from fedray.data.own import own_source
    from fedray.data.source import load_source
    from fedray.experiment import Own

    if data is not None:
        source = own_source(data, test, client_column, label_column, load(spec.base).data.normalization)
    elif test is not None:
        raise UserError("tune(test=...) needs data=... too")
    else:
        config = load(spec.base).data
        source = load_source(config.source, config.root, config.normalization)
    return Own(source, model, loss, metrics or {}, preloaded=data is None)


def run_sweeps(
    specs: Sequence[SweepSpec],
    own: Own,
    start: RayStart,
    view: View,
    retry_failed: bool = False,
    then: Callable[[Sequence[Sweep]], Sequence[Desk]] = lambda sweeps: (),
) -> list[SweepResult]:
    """Run sweeps of the same data and engine to their end, and the desks that ``then`` makes of them beside them."""
    from fedray.tuning.sweep import opened_sweep

    with contextlib.ExitStack() as stack:
        sweeps = [stack.enter_context(opened_sweep(spec, own, view.say)) for spec in specs]
        for sweep in sweeps:
            sweep.show = view
            if retry_failed and (again := sweep.study.retry_failed()):
                view.say(f"{sweep.name}: {again} failed trial{'s are' if again > 1 else ' is'} tried again")
            if sweep.finished:
                view.say(f"{sweep.name} is finished already: {len(sweep.study.trials)} trials -> {sweep.folder}")
        desks = [*sweeps, *then(sweeps)]
        unfinished = not all(desk.exhausted for desk in desks)
        interrupted = unfinished and _run(sweeps, desks, own, start, view)
        for sweep in sweeps:
            sweep.write_best()
            if failed := len(sweep.study.failed):
                view.say(
                    f"{sweep.name}: {failed} trial{'s' if failed > 1 else ''} failed; to try again: --retry-failed"
                )
        return [SweepResult(sweep.folder, interrupted) for sweep in sweeps]


def _run(sweeps: Sequence[Sweep], desks: Sequence[Desk], own: Own, start: RayStart, view: View) -> bool:
    """Run what is left; whether the user stopped it."""
    started_here = start.ready()
    from fedray.engine.ray_engine import ship_own_code
    from fedray.tuning.resources import at_once, bundles_of, engine_of_trials, unused_gpus
    from fedray.tuning.runner import Interrupted, run_trials
    from fedray.tuning.several import Several

    asked = sweeps[0].spec.tune.concurrency
    limit = None if asked == "auto" else asked
    engine_asked = load(sweeps[0].base).engine
    settings = engine_of_trials(engine_asked, sweeps[0].base, limit)
    engine = load({**sweeps[0].base, **settings}).engine
    bundles = bundles_of(engine)
    concurrency, fewer = at_once(bundles, limit, started_here)
    for line in (fewer, unused_gpus(engine_asked, start.gpus())):
        if line:
            view.say(line)
    for sweep in sweeps:
        sweep.engine = settings
        if not sweep.finished:
            for line in (*sweep.notes, sweep.introduction(concurrency)):
                view.say(line)
    ship_own_code([thing for thing in (own.model, own.loss, *own.metrics.values()) if thing is not None])
    with interruptible(view.say, "stopping the trials after this round") as stopping:
        view.start(sweeps)
        try:
            run_trials(Several(desks), bundles, concurrency, own, engine.start_timeout, stopping)
        except Interrupted:
            return True
        finally:
            view.stop()
    return False
