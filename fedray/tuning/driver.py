"""Sweeps from start to end: :func:`tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import load
from fedray.engine.ray_start import RayStart
from fedray.simulation import interruptible
from fedray.tuning.spec import SweepSpec, read_sweeps
from fedray.tuning.view import View

if TYPE_CHECKING:
    import pandas as pd

    from fedray.resolve import Own
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
    client_column: str = "client",
    label_column: str = "label",
    model: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    view: View | None = None,
) -> list[SweepResult]:
    """Search a space, or go on with a search that was stopped or killed; one result for each environment.

    ``space``: a space file, the name of one that comes with fedray, or a mapping like one; ``overrides``: ``key=value``
    texts on top, for the base configuration or ``tune.*``. ``data`` to ``metrics`` are as in :func:`fedray.simulate`.
    ``retry_failed``: trials that failed are tried once more.

    Raises :class:`fedray.UserError` for what can't be searched as asked.
    """
    view = view or View(quiet=True)
    specs = read_sweeps(space, overrides)
    given = {"model": model, "loss": loss, "metrics": metrics}
    with RayStart(
        load(specs[0].base).engine, view.say, at_once=not all(spec.folder.exists() for spec in specs)
    ) as start:
        own = own_of(specs[0], data, test, client_column, label_column, given)
        return run_sweeps(specs, own, given, start, view, retry_failed)


def own_of(
    spec: SweepSpec, data: Any, test: Any, client_column: str, label_column: str, given: Mapping[str, Any]
) -> Own:
    """What all trials are made from: the data set, loaded once, and the user's own objects."""
    from fedray.data.own import own_source
    from fedray.data.source import load_source
    from fedray.resolve import Own

    if data is not None:
        source = own_source(data, test, client_column, label_column)
    else:
        config = load(spec.base)
        # what the config calls it is what a run of its own would call it
        source = replace(load_source(config.data.source, config.data.root), name=config.data.source)
    return Own(source, given["model"], given["loss"], given["metrics"] or {})


def run_sweeps(
    specs: Sequence[SweepSpec],
    own: Own,
    given: Mapping[str, Any],
    start: RayStart,
    view: View,
    retry_failed: bool = False,
) -> list[SweepResult]:
    """Run sweeps of the same data and engine to their end."""
    from fedray.tuning.sweep import opened_sweep

    with contextlib.ExitStack() as stack:
        sweeps = [stack.enter_context(opened_sweep(spec, own)) for spec in specs]
        for sweep in sweeps:
            sweep.show = view
            if retry_failed and (again := sweep.study.retry_failed()):
                view.say(f"{sweep.name}: {again} failed trial{'s are' if again > 1 else ' is'} tried again")
        unfinished = [sweep for sweep in sweeps if not sweep.finished]
        for sweep in sweeps:
            if sweep.finished:
                view.say(f"{sweep.name} is finished already: {len(sweep.study.trials)} trials -> {sweep.folder}")
        interrupted = bool(unfinished) and _run(unfinished, own, given, start, view)
        for sweep in sweeps:
            sweep.write_best()
        return [SweepResult(sweep.folder, interrupted and not sweep.finished) for sweep in sweeps]


def _run(sweeps: Sequence[Sweep], own: Own, given: Mapping[str, Any], start: RayStart, view: View) -> bool:
    """Run the trials that are left; whether the user stopped it."""
    started_here = start.ready()
    from fedray.engine.ray_engine import ship_own_code
    from fedray.engine.stored import store_source
    from fedray.tuning.resources import at_once, bundles_of, engine_of_trials
    from fedray.tuning.runner import Interrupted, run_trials
    from fedray.tuning.several import Several
    from fedray.tuning.study import ENDED

    asked = sweeps[0].spec.tune.concurrency
    limit = None if asked == "auto" else asked
    settings = engine_of_trials(load(sweeps[0].base).engine, sweeps[0].base, limit)
    for sweep in sweeps:
        sweep.engine = settings
    engine = load({**sweeps[0].base, **settings}).engine
    bundles = bundles_of(engine)
    concurrency, line = at_once(bundles, limit, started_here)
    if line:
        view.say(line)
    for sweep in sweeps:
        study = sweep.study
        done = study.count(*ENDED)
        view.say(
            f"{sweep.name}: {study.wanted(sweep.total)} trials of {sweep.spec.base.get('algorithm.name', 'pfedmo')}"
            + (f", {done} done before" if done > 0 else "")
            + f", {concurrency} at once, {sweep.spec.search} -> {sweep.folder}"
        )
    assert own.source is not None
    ship_own_code([thing for thing in (own.model, own.loss, *own.metrics.values()) if thing is not None])
    shared = {"source": store_source(own.source), **given}
    with interruptible(view.say, "stopping the trials after this round") as stopping:
        view.start(sweeps)
        try:
            run_trials(Several(sweeps), bundles, concurrency, shared, engine.start_timeout, stopping)
        except Interrupted:
            return True
        finally:
            view.stop()
    return False
