"""Runs an experiment from Python: :func:`simulate`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import Config, load, run_name
from fedray.engine.callbacks import Callbacks, RunStart
from fedray.engine.interrupting import interruptible
from fedray.engine.ray.start import RayStart
from fedray.errors import RayNotStarted, UserError
from fedray.experiment.first_checks import check_first
from fedray.tracking.progress import Display, number_text
from fedray.tracking.result import RunResult
from fedray.util.loading import collector_paused
from fedray.util.uris import below, is_uri
from fedray.warning import WARNING, PythonWarnings

if TYPE_CHECKING:
    from torch import nn

    from fedray.algorithms import Algorithm
    from fedray.core.task import Loss
    from fedray.core.transform import Transform
    from fedray.engine.callbacks import Callback, Report
    from fedray.engine.local_engine import LocalEngine
    from fedray.engine.ray.engine import RayEngine
    from fedray.experiment.custom import CustomObjects
    from fedray.experiment.experiment import Experiment
    from fedray.experiment.placement import Device, Surroundings
    from fedray.remote.mirror import Mirror


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
    callbacks: Sequence[Callback | Callable[[Report], Any]] = (),
    overrides: Iterable[str] = (),
    verbose: bool = False,
    display: Display | None = None,
) -> RunResult:
    """Runs a federated learning experiment and returns its result.

    ``config`` describes the experiment. Most other arguments are objects that replace one of its keys: "for
    ``data.source``" below means that the argument is used instead of the key ``data.source``.

    Args:
        config: The configuration: a mapping (nested, or with dotted keys such as ``"train.lr"``), the path of a YAML
            file, a :class:`Config`, or None for the defaults.
        data: The data set, for ``data.source``: a torch ``Dataset`` of (x, y), arrays ``(x, y)`` or ``(x, y, client)``,
            a DataFrame or Hugging Face ``Dataset``, a list of Datasets or of arrays (x, y) with one for each client, or
            a :class:`fedray.data.Source`. Labels are whole numbers from 0, or names (texts, booleans, pandas'
            categories), to which fedray gives such numbers. If the data say to which client each sample belongs, these
            are the clients of the run, unless ``data.partition.kind`` says otherwise. Clients may have any names. A
            Dataset whose items are random, such as augmented images, is read item by item (see ``data.access``).
        test: The test set, in the same form. It must be None if ``data`` is a Source, which contains it.
        client_column: If the data are a table, such as a DataFrame, the name of the column that says to which client
            each sample belongs. The default is the column ``client``, if the table has one.
        label_column: If the data are a table, the name of the column that holds the targets.
        model: For ``model.name``: a class or function that makes a module from ``input_shape`` and ``classes``, with
            initial weights drawn from ``run.seed``; or a module, whose weights are the same for every seed. Parameters
            whose ``requires_grad`` is false are not trained. If that is so for all parameters of a normalisation layer,
            its running statistics do not change either.
        loss: For ``task.loss``: ``loss(logits [b, classes], targets [b]) -> [b]``, or a loss of torch.
        metrics: Functions like ``loss``, by name, in addition to those of ``task.metrics``. The mean of each over the
            test set is the column ``test_<name>``.
        transform: For ``data.transform``: ``transform(x [b, ...])`` changes the inputs of a client's mini-batch at
            random and returns them in the same shape and type, as the transforms of ``torchvision.transforms.v2`` do.
            It gets inputs as they are stored, before they are scaled, and is used in training only.
        algorithm: For ``algorithm.name``: a subclass of :class:`fedray.algorithms.Algorithm`, which may be defined in a
            notebook. Its hyper-parameters are the keys ``algorithm.*``.
        callbacks: Functions that get a :class:`fedray.Report` after every round, and objects with the methods of
            :class:`fedray.Callback`, in addition to those of ``run.callbacks``. They are called in this process. The
            next round waits for them, and the run ends if one returns true.
        overrides: Texts ``key=value``, such as ``train.lr=0.1``, that replace keys of ``config``.
        verbose: Whether to show what ``fedray run`` shows: what is run, its progress and how it ended.
        display: The object that shows these lines. It gets them even if ``verbose`` is false. Without ``display`` and
            ``verbose`` only warnings are shown, as Python warnings (:class:`fedray.FedrayWarning`).

    Returns:
        The result of the run, which is read from its folder: status, summary, tables and the trained model.

    Raises:
        UserError: The run is not possible as it was asked for.
        ClientError: Code that runs at the clients (model, loss, algorithm) failed.

    Example:
        result = fedray.simulate({"algorithm.name": "fedavg", "run.rounds": 3}, data=(x, y), test=(x_test, y_test))
        print(result.summary["final"])
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
    """Makes the configuration name the algorithm that a user passed to :func:`simulate` or :func:`fedray.tune` as a
    class, ``algorithm``. It is None if the user passed none.

    Returns:
        Two values. The first is a list with an override of the configuration, ``algorithm.name=...``, or an empty list
        if ``algorithm`` is None. The second is the class if it is user-defined, and otherwise None: a class that comes
        with fedray is found by its name.

    Raises:
        UserError: ``algorithm`` is not a subclass of :class:`Algorithm`.
    """
    if algorithm is None:
        return [], None
    # imported here because it loads torch, which should happen while Ray starts
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
    """Collects the objects that a user passed to :func:`simulate` in one :class:`CustomObjects`, with which the
    experiment is then made.

    The arguments after ``settings``, the configuration, are those of :func:`simulate`. ``data`` and ``test`` become one
    :class:`Source`, which is read and scaled as ``settings`` says. Objects that were not passed are None in the result,
    or an empty dict for ``metrics``.
    """
    from fedray.experiment.custom import CustomObjects

    source = None
    if data is not None:
        from fedray.data.sources.user_data import user_source

        task = settings.task
        source = user_source(
            data, test, client_column, label_column, settings.data.normalization, task.kind, task.ignore_index,
            settings.data.access, settings.data.image_size,
        )  # fmt: skip
    return CustomObjects(source, model, loss, metrics or {}, transform, algorithm)


def run_experiment(
    settings: Config,
    custom: Callable[[], CustomObjects],
    callbacks: Sequence[Callback | Callable[[Report], Any]] = (),
    display: Display | None = None,
    tidy: Callable[[RunResult], None] = lambda result: None,
) -> RunResult:
    """Runs an experiment and returns its result. :func:`simulate` calls it after it has checked its arguments, and a
    sweep (a search over hyper-parameters) calls it for each of its runs.

    If Ray can't be started and the user did not ask for it explicitly, the run goes on without Ray.

    Args:
        settings: The configuration of the run.
        custom: A function without arguments that returns the objects that the user passed from Python. It is called
            while Ray starts, because reading the data, importing torch and starting Ray take seconds each.
        callbacks: Callbacks in addition to those that ``run.callbacks`` names.
        display: The object that shows the progress; None shows nothing.
        tidy: A function that gets the result at the end and may remove files of the run that are not needed any more.
            If ``run.output`` is a URI, this happens before the last files are sent there.
    """
    display, watching = display or Display(quiet=True), Callbacks(settings.run.callbacks, callbacks)
    with _mirrored(settings, display.say) as mirror:
        try:
            result = _run_with_ray(settings, custom, watching, display, mirror)
        except RayNotStarted as error:
            if settings.engine.asks_for_ray:
                raise RayNotStarted(f"{error}; engine.kind=local needs no Ray, and computes the same bits") from None
            display.say(f"{error}; going on without Ray, as with engine.kind=local: the bits are the same")
            local = settings.engine.model_copy(update={"kind": "local"})
            result = _run_with_ray(settings.model_copy(update={"engine": local}), custom, watching, display, mirror)
        tidy(result)
        display.say(_line_about_end(result))
    return result


def _mirrored(settings: Config, say: Callable[[str], None]) -> AbstractContextManager[Mirror | None]:
    """Returns a context that copies the run folder to ``run.output`` while it changes, if that is a URI. The context's
    value is the :class:`Mirror` that copies, or None if ``run.output`` is a folder."""
    run, name = settings.run, run_name(settings, settings.data.source)
    if not is_uri(run.output):
        return contextlib.nullcontext()
    from fedray.remote.mirror import mirrored

    return mirrored(below(run.output, name), run.place / name, run.output_timeout, say, anew=run.resume is False)


def _run_with_ray(
    settings: Config,
    custom: Callable[[], CustomObjects],
    callbacks: Callbacks,
    display: Display,
    mirror: Mirror | None,
) -> RunResult:
    """Runs an experiment and returns its result. Connects to Ray first if the experiment runs on Ray.

    Raises :class:`RayNotStarted` if Ray can't be started. The run has changed nothing by then.
    """
    with RayStart(settings.engine, display.say, at_once=_will_run_on_ray(settings)) as start:
        experiment, engine = _prepared(settings, custom, display, start)
        return _run(experiment, engine, start, callbacks, display, mirror)


def _prepared(
    settings: Config, custom: Callable[[], CustomObjects], display: Display, start: RayStart
) -> tuple[Experiment, LocalEngine | RayEngine]:
    """Returns the experiment and the engine that runs it.

    The data are loaded here. Only the engine refers to them, so that it can free their memory.
    """
    with collector_paused():
        from fedray.core.torch_state import neutral
        from fedray.experiment.resolve import resolve

    with neutral(), display.reading() as map_all:
        experiment, data = resolve(settings, custom(), _surroundings(settings, start), map_all)
    if experiment.config.engine.kind != "ray":
        from fedray.engine.local_engine import LocalEngine

        return experiment, LocalEngine(experiment, data)
    from fedray.engine.ray.engine import RayEngine

    return experiment, RayEngine(experiment, data, start)


def _line_about_end(result: RunResult) -> str:
    """Returns the line that is shown at the end of a run: status, rounds, final and best metric, hash of the model,
    folder."""
    summary = result.summary
    name, final, best = (summary[key] for key in ("metric", "final", "best"))
    diverged = summary["status"] == "diverged"
    return (
        f"{WARNING if diverged else ''}{summary['status']} after {summary['rounds']} round"
        + ("" if summary["rounds"] == 1 else "s")
        + (": the loss or the model is not finite any more" if diverged else "")
        + (f" ({summary['stopped_by']})" if summary.get("stopped_by") else "")
        + (f", {name.replace('_', ' ')} {number_text(final)} (best {number_text(best)})" if final is not None else "")
        + f", model sha256 {summary['model_sha256'][:16]} -> {result.folder}"
    )


def _will_run_on_ray(settings: Config) -> bool:
    """Returns whether Ray should be started right away. A run that is finished already, or that uses another engine,
    needs no Ray."""
    finished = settings.run.place / run_name(settings, settings.data.source) / "summary.json"
    return settings.engine.kind == "ray" and (settings.run.resume is False or not finished.exists())


def _surroundings(settings: Config, start: RayStart) -> Surroundings:
    """Returns what this machine or the Ray cluster offers the run: the device for ``engine.device=auto``, what an
    earlier start of the run has decided, and whether a compiler is missing."""
    from fedray.experiment.placement import Surroundings, missing_compiler
    from fedray.tracking.failure import has_failed
    from fedray.tracking.folder import decided_in

    def begun(folder: Path) -> dict[str, bool]:
        return {} if settings.run.resume is False else decided_in(folder)

    def missing(folder: Path, device: Device) -> str | None:
        if settings.run.resume is not False and (folder / "summary.json").exists() and not has_failed(folder):
            # the run is finished, so that nothing will be compiled
            return None

        def check() -> str | None:
            return missing_compiler(device)

        return check() if settings.engine.kind != "ray" else start.missing(check)

    return Surroundings(partial(_auto_device, settings, start), begun, missing)


def _auto_device(settings: Config, start: RayStart, folder: Path) -> Device:
    """Returns the device, ``cpu`` or ``cuda``, that ``engine.device=auto`` stands for.

    A run that has begun in ``folder`` stays on its device, because another one would compute other bits. A new run uses
    a GPU if this machine or the Ray cluster has one.
    """
    from fedray.experiment.placement import device_here, device_of_cluster
    from fedray.tracking.folder import device_of

    begun = device_of(folder) if settings.run.resume is not False else None
    if begun is not None:
        return begun
    if settings.engine.kind != "ray":
        return device_here(folder)
    return device_of_cluster(start.gpus(), is_this_machine=start.ready())


def _run(
    experiment: Experiment,
    engine: LocalEngine | RayEngine,
    start: RayStart,
    callbacks: Callbacks,
    display: Display,
    mirror: Mirror | None,
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

    def started(done: int) -> None:
        display.start(experiment.rounds, done, experiment.task.main)
        callbacks.start(RunStart(folder.path, experiment.config, done, experiment.rounds))

    with interruptible(display.say, "stopping after this round") as stopping:
        if mirror is not None:
            mirror.on_failure(stopping)
        driver = Driver(
            say=display.say,
            started=started,
            show=lambda report: display.round(report.metrics),
            on_round=callbacks.round if callbacks.watch_rounds else None,
            stopping=stopping,
        )
        try:
            engine.run(driver)
        finally:
            display.stop()
    callbacks.end(result)
    return result
