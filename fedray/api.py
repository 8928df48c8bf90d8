"""Runs an experiment from Python: :func:`simulate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import Config, load, run_name
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import RayNotStarted, UserError
from fedray.experiment.first_checks import check_first
from fedray.tracking.progress import Display, figure
from fedray.util.loading import collector_paused
from fedray.warning import WARNING, PythonWarnings

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedray.algorithms import Algorithm
    from fedray.core.task import Loss
    from fedray.core.transform import Transform
    from fedray.engine.local_engine import LocalEngine
    from fedray.engine.ray.engine import RayEngine
    from fedray.engine.run import Report
    from fedray.experiment.custom import CustomObjects
    from fedray.experiment.experiment import Experiment
    from fedray.experiment.placement import Device, Surroundings

    Callback = Callable[[Report], Any]


@dataclass(frozen=True)
class RunResult:
    """The result of a run that has ended, whether it was completed, diverged or was interrupted (``status``).

    ``folder`` is the run's folder, from which everything is read. ``module`` is called without arguments, and makes the
    model with its initial weights. The other results are properties: ``status``, ``summary``, ``metrics``, ``clients``,
    ``evaluation`` and ``profile``. :meth:`model` returns the model that was trained.
    """

    folder: Path
    module: Callable[[], nn.Module]

    @property
    def status(self) -> str:
        """How the run ended: ``completed``, ``diverged`` or ``interrupted``. It is ``summary["status"]``."""
        return str(self.summary["status"])

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, whose keys :data:`fedray.tracking.columns.SUMMARY` explains."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def metrics(self) -> pd.DataFrame:
        """The table metrics.csv, with a row for each round (:data:`fedray.tracking.columns.METRICS`)."""
        from fedray.tracking.folder import read_metrics

        return read_metrics(self.folder)

    @property
    def clients(self) -> pd.DataFrame:
        """The table clients.parquet, with a row for each round and client of its cohort."""
        return _rows_of_clients(self.folder / "clients.parquet")

    @property
    def evaluation(self) -> pd.DataFrame:
        """The table evaluation.parquet, with a row for each evaluated round and client scored on its own test share.

        Raises :class:`UserError` if ``has_evaluation`` is false.
        """
        if not self.has_evaluation:
            raise UserError(f"{self.folder} has no scores of single clients: run.eval_clients=all asks for them")
        return _rows_of_clients(self._evaluation)

    @property
    def has_evaluation(self) -> bool:
        """Whether single clients were scored: that needs personal models, ``run.finetune_steps`` or
        ``run.eval_clients``."""
        return any(self._evaluation.glob("part-*.parquet"))

    @property
    def _evaluation(self) -> Path:
        return self.folder / "evaluation.parquet"

    @property
    def profile(self) -> pd.DataFrame:
        """The table profile.csv: the seconds of each round by purpose.

        Only a run with ``engine.profile`` has it; FileNotFoundError is raised for others.
        """
        import pandas as pd

        return pd.read_csv(self.folder / "profile.csv")

    def model(self) -> nn.Module:
        """Returns the final model, in evaluation mode. Raises :class:`UserError` if its file is damaged."""
        from safetensors.torch import load_file

        from fedray.core.places import Places
        from fedray.core.torch_state import neutral
        from fedray.tracking.records import check_file

        check_file(self.folder, "model.safetensors")
        with neutral():
            module = self.module()
            Places(module).load(load_file(self.folder / "model.safetensors"))
        module.eval()
        return module


def _rows_of_clients(path: Path) -> pd.DataFrame:
    import pandas as pd

    rows: pd.DataFrame = pd.read_parquet(path).sort_values(["round", "client"], ignore_index=True)
    return rows


def simulate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: nn.Module | Callable[..., nn.Module] | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Loss] | None = None,
    transform: Transform | None = None,
    algorithm: type[Algorithm] | None = None,
    callbacks: Sequence[Callback] = (),
    overrides: Iterable[str] = (),
    verbose: bool = False,
    display: Display | None = None,
) -> RunResult:
    """Runs a federated learning experiment.

    Nothing but ``config`` is needed. The other arguments are custom objects, which replace what it names::

        result = fedray.simulate({"algorithm.name": "fedavg", "data.source": "mnist"}, overrides=["run.rounds=20"])
        print(result.metrics["test_accuracy"].max())

    Args:
        config: a mapping (nested or with dotted keys), a YAML file, or nothing for the defaults.
        data: replaces ``data.source``. A torch ``Dataset`` of (x, y), arrays ``(x, y)`` or ``(x, y, client)``, a
            DataFrame or a Hugging Face ``Dataset``; a list of Datasets, or of arrays (x, y), has one for each client;
            or a :class:`fedray.data.Source`, without ``test``. Labels are whole numbers from 0, or names (texts,
            booleans, pandas' categories), which are numbered and kept. Clients that come with the samples, under any
            names, are the clients of the run unless ``data.partition.kind`` says otherwise. A Dataset whose items are
            random is read item by item (see ``data.access``).
        test: the test samples, in one of the forms of ``data``.
        client_column: the column of a table that says whose each sample is; ``client``, if there is one, unless given.
        label_column: the column of a table that holds the labels.
        model: replaces ``model.name``. A class or function that makes a module from ``input_shape`` and ``classes``,
            with initial weights drawn from ``run.seed``; or a module, whose weights are the same for every seed.
            Parameters without ``requires_grad`` are not trained, and normalisation layers that have no other
            parameters keep their running statistics.
        loss: ``loss(logits [b, classes], targets [b]) -> [b]``, one number for each sample.
        metrics: functions of the same form, by name. The mean over the test set is the column ``test_<name>``.
        transform: replaces ``data.transform``. ``transform(x [b, ...])`` returns the inputs of a client's mini-batch
            changed at random, in the same shape and type, as transforms of ``torchvision.transforms.v2`` do. It gets
            inputs as they are stored, before they are scaled, and is used in training only.
        algorithm: replaces ``algorithm.name``. A subclass of :class:`fedray.algorithms.Algorithm`, which may be
            defined anywhere, in a notebook too. Its hyper-parameters are the keys ``algorithm.*``.
        callbacks: called in this process after every round with a :class:`fedray.Report`. The next round waits for
            them, and a callback that returns true ends the run.
        overrides: ``key=value`` texts on top of ``config``.
        verbose: show what ``fedray run`` shows: what is run, its progress and its end.
        display: gets the same lines, whether ``verbose`` is set or not. Without both, lines that are warnings are
            those of Python (:class:`fedray.FedrayWarning`): decisions that change the result, what was asked for and
            is not done, and that the run diverged.

    Returns:
        The run's folder and what is in it: metrics, summary, model.

    Raises:
        UserError: something can't be run as it was asked for.
        ClientError: the code of a client (model, loss, algorithm) failed.
    """
    named, algorithm = handed_over(algorithm)
    settings = _settings(config, [*overrides, *named])
    if data is None and test is not None:
        raise UserError("simulate(test=...) needs data=... too")
    objects = {"data": data, "model": model, "loss": loss, "metrics": metrics, "transform": transform}
    objects["algorithm"] = algorithm
    check_first(settings, [name for name, each in objects.items() if each is not None])
    custom = partial(
        custom_objects, settings, data, test, client_column, label_column, model, loss, metrics, transform, algorithm
    )
    return run_experiment(settings, custom, callbacks, display or Display(quiet=not verbose, warn=PythonWarnings()))


def _settings(config: Config | Mapping[str, Any] | str | Path | None, overrides: list[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides and config.for_algorithm:
        raise UserError(
            f"{overrides[-1]}: the configuration was loaded for algorithm.name={config.algorithm.name}, with what "
            "for_algorithm says of it: hand over the file or the mapping that it was loaded from"
        )
    return load(config.model_dump(mode="json", exclude_unset=True), overrides) if overrides else config


def handed_over(algorithm: Any) -> tuple[list[str], type[Algorithm] | None]:
    """Returns the text ``key=value`` that names an algorithm, and its class unless fedray finds it by that name.

    Raises :class:`UserError` if ``algorithm`` is not the class of one.
    """
    if algorithm is None:
        return [], None
    # it imports torch, and Ray is started meanwhile where nothing is handed over
    from fedray.algorithms import is_known, name_of

    return [f"algorithm.name={json.dumps(name_of(algorithm))}"], None if is_known(algorithm) else algorithm


def custom_objects(
    settings: Config,
    data: Any,
    test: Any,
    client_column: str | None,
    label_column: str,
    model: nn.Module | Callable[..., nn.Module] | None,
    loss: Loss | None,
    metrics: Mapping[str, Loss] | None,
    transform: Transform | None = None,
    algorithm: type[Algorithm] | None = None,
) -> CustomObjects:
    """Returns the objects that were handed over from Python. The arguments are those of :func:`simulate`."""
    from fedray.experiment.custom import CustomObjects

    source = None
    if data is not None:
        from fedray.data.sources.own import own_source

        task = settings.task
        source = own_source(
            data, test, client_column, label_column, settings.data.normalization, task.kind, task.ignore_index,
            settings.data.access, settings.data.image_size,
        )  # fmt: skip
    return CustomObjects(source, model, loss, metrics or {}, transform, algorithm)


def run_experiment(
    settings: Config,
    custom: Callable[[], CustomObjects],
    callbacks: Sequence[Callback] = (),
    display: Display | None = None,
) -> RunResult:
    """Runs an experiment as :func:`simulate` does, with the objects that ``custom()`` returns.

    ``custom`` is called, and torch imported, while Ray starts, because each of these takes seconds.
    """
    display = display or Display(quiet=True)
    try:
        result = _run_with_ray(settings, custom, callbacks, display)
    except RayNotStarted as error:
        if settings.engine.asks_for_ray:
            raise RayNotStarted(f"{error}; engine.kind=local needs no Ray, and computes the same bits") from None
        display.say(f"{error}; going on without Ray, as with engine.kind=local: the bits are the same")
        local = settings.engine.model_copy(update={"kind": "local"})
        result = _run_with_ray(settings.model_copy(update={"engine": local}), custom, callbacks, display)
    display.say(_line_about_end(result))
    return result


def _run_with_ray(
    settings: Config, custom: Callable[[], CustomObjects], callbacks: Sequence[Callback], display: Display
) -> RunResult:
    """Runs an experiment with a connection to Ray, if that is its engine. Raises :class:`RayNotStarted`, before the run
    has changed anything, if Ray can't be started."""
    with RayStart(settings.engine, display.say, at_once=_will_run_on_ray(settings)) as start:
        experiment, engine = _prepared(settings, custom, display, start)
        return _run(experiment, engine, start, callbacks, display)


def _prepared(
    settings: Config, custom: Callable[[], CustomObjects], display: Display, start: RayStart
) -> tuple[Experiment, LocalEngine | RayEngine]:
    """Returns the experiment, and the engine that runs it. Nothing but the engine holds the data, so that it can let go
    of them."""
    with collector_paused():
        from fedray.core.torch_state import neutral
        from fedray.experiment.resolve import resolve

    with neutral(), display.reading() as map_all:
        experiment, data = resolve(settings, custom(), _surroundings(settings, start), map_all)
    if experiment.config.engine.kind == "local":
        from fedray.engine.local_engine import LocalEngine

        return experiment, LocalEngine(experiment, data)
    from fedray.engine.ray.engine import RayEngine

    return experiment, RayEngine(experiment, data, start)


def _line_about_end(result: RunResult) -> str:
    """Returns the line that is shown at the end of a run."""
    summary = result.summary
    name, final, best = (summary[key] for key in ("metric", "final", "best"))
    diverged = summary["status"] == "diverged"
    return (
        f"{WARNING if diverged else ''}{summary['status']} after {summary['rounds']} round"
        + ("" if summary["rounds"] == 1 else "s")
        + (": the loss or the model is not finite any more" if diverged else "")
        + (f" ({summary['stopped_by']})" if summary.get("stopped_by") else "")
        + (f", {name.replace('_', ' ')} {figure(final)} (best {figure(best)})" if final is not None else "")
        + f", model sha256 {summary['model_sha256'][:16]} -> {result.folder}"
    )


def _will_run_on_ray(settings: Config) -> bool:
    """Returns whether Ray should be started at once. A run that is finished does not need it."""
    finished = Path(settings.run.output) / run_name(settings, settings.data.source) / "summary.json"
    return settings.engine.kind == "ray" and (settings.run.resume is False or not finished.exists())


def _surroundings(settings: Config, start: RayStart) -> Surroundings:
    """Returns what the run finds on this machine, or on the Ray cluster."""
    from fedray.experiment.placement import Surroundings, missing_compiler
    from fedray.tracking.folder import decided_in

    def begun(folder: Path) -> dict[str, bool]:
        return {} if settings.run.resume is False else decided_in(folder)

    def missing(folder: Path, device: Device) -> str | None:
        if settings.run.resume is not False and (folder / "summary.json").exists():
            # the run is finished, so that nothing will be compiled
            return None

        def check() -> str | None:
            return missing_compiler(device)

        return check() if settings.engine.kind == "local" else start.missing(check)

    return Surroundings(partial(_auto_device, settings, start), begun, missing)


def _auto_device(settings: Config, start: RayStart, folder: Path) -> Device:
    """Returns the device that ``engine.device: auto`` stands for.

    A run that has begun in ``folder`` continues on the device on which it began, because another one computes other
    bits. A new run uses a GPU if this machine, or the Ray cluster, has any.
    """
    from fedray.experiment.placement import device_here, device_of_cluster
    from fedray.tracking.folder import device_of

    begun = device_of(folder) if settings.run.resume is not False else None
    if begun is not None:
        return begun
    if settings.engine.kind == "local":
        return device_here(folder)
    return device_of_cluster(start.gpus(), is_this_machine=start.ready())


def _run(
    experiment: Experiment,
    engine: LocalEngine | RayEngine,
    start: RayStart,
    callbacks: Sequence[Callback],
    display: Display,
) -> RunResult:
    from fedray.engine.driver import Driver
    from fedray.tracking.folder import RunFolder

    folder = RunFolder(experiment.config, experiment.inputs, experiment.defaults)
    result = RunResult(folder.path, experiment.module)
    found = folder.look()
    if found.status != "finished" and experiment.config.engine.kind == "ray":
        start.ready()
    for line in experiment.notes:
        display.say(line)
    if found.status == "finished":
        display.say(f"{folder.path} is finished already")
        return result
    display.say(
        f"{experiment.config.algorithm.name} on {experiment.config.data.source}: {engine.data.clients} clients, "
        f"cohorts of {experiment.cohort_size}, {experiment.facts.parameters:,} parameters, {experiment.rounds} rounds "
        f"-> {folder.path}"
    )

    def on_round(report: Report) -> bool:
        return any([bool(callback(report)) for callback in callbacks])

    with interruptible(display.say, "stopping after this round") as stopping:
        driver = Driver(
            say=display.say,
            started=lambda done: display.start(experiment.rounds, done, experiment.task.main),
            show=lambda report: display.round(report.metrics),
            on_round=on_round if callbacks else None,
            stopping=stopping,
        )
        try:
            engine.run(driver)
        finally:
            display.stop()
    return result
