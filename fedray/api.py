"""Runs an experiment from Python: :func:`simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.config import Config, load
from fedray.engine.callbacks import Callbacks
from fedray.errors import UserError
from fedray.experiment.first_checks import check_first
from fedray.stepping import Stepper
from fedray.tracking.progress import Display
from fedray.tracking.result import RunResult
from fedray.usercode.extensions import Entry, is_object, recorded_name
from fedray.util.arguments import as_text, check_objects, list_of, override_texts
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    from torch import nn

    from fedray.algorithms import Algorithm
    from fedray.core.task import Loss
    from fedray.core.transform import Transform
    from fedray.core.upload import UploadStep
    from fedray.engine.callbacks import Callback, Report
    from fedray.experiment.custom import CustomObjects
    from fedray.robust import Attack, Rule
    from fedray.selection import Selection

NAMED_BY = {"sampling": "train.sampling", "aggregation": "train.aggregation.kind", "attack": "attack.kind"}
"""The arguments of :func:`simulate` that are an object or its class, each with the key that records its name."""


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
    upload: Sequence[Entry | UploadStep | type[UploadStep] | Callable[..., Any]] | None = None,
    sampling: Selection | type[Selection] | None = None,
    aggregation: Rule | type[Rule] | None = None,
    attack: Attack | type[Attack] | None = None,
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
        upload: For ``train.upload``: a list of steps, such as ``[{"topk": 0.1}, Half()]``. A step is an entry as in the
            configuration, a :class:`fedray.UploadStep`, or a function of rows ``[C, parameters]`` and a
            :class:`fedray.UploadRows`. A class is made without arguments.
        sampling: For ``train.sampling``: a :class:`fedray.selection.Selection`, or its class.
        aggregation: For ``train.aggregation.kind``: a :class:`fedray.robust.Rule`, or its class, whose arguments are
            ``train.aggregation.options``.
        attack: For ``attack.kind``: a :class:`fedray.robust.Attack`, or its class, whose arguments are
            ``attack.options``. It needs ``attack.fraction``.
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
        ServerError: A rule of the algorithm at the server failed, such as ``server_update``.

    Example:
        result = fedray.simulate({"algorithm.name": "fedavg", "run.rounds": 3}, data=(x, y), test=(x_test, y_test))
        print(result.summary["final"])
    """
    settings, custom = checked(
        config, overrides, data, test, client_column, label_column,
        model=model, loss=loss, metrics=metrics, transform=transform, algorithm=algorithm,
        upload=upload, sampling=sampling, aggregation=aggregation, attack=attack,
    )  # fmt: skip
    return run_experiment(settings, custom, callbacks, display or Display(quiet=not verbose, warn=PythonWarnings()))


def checked(
    config: Config | Mapping[str, Any] | str | Path | None,
    overrides: Iterable[str],
    data: Any,
    test: Any,
    client_column: str | None,
    label_column: str,
    **objects: Any,
) -> tuple[Config, Callable[[], CustomObjects]]:
    """Checks the arguments of :func:`simulate`, of which ``objects`` are those from ``model`` to ``attack``, by name.
    Returns the configuration, and a function that collects the objects that the user passed. Raises
    :class:`UserError` if something is wrong that can be seen without the data."""
    named, objects = handed_over(data, objects)
    settings = _settings(config, [*override_texts(overrides), *named])
    if data is None and test is not None:
        raise UserError("test=... needs data=... too")
    check_first(settings, names_of(data, objects))
    return settings, partial(custom_objects, settings, data, test, client_column, label_column, **objects)


def _settings(config: Config | Mapping[str, Any] | str | Path | None, overrides: list[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides and config.for_algorithm:
        raise UserError(
            f"{overrides[-1]}: the configuration was loaded for algorithm.name={config.algorithm.name}, with what "
            "for_algorithm says of it: hand over the file or the mapping that it was loaded from"
        )
    return load(config.model_dump(mode="json", exclude_unset=True), overrides) if overrides else config


def handed_over(data: Any, objects: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Makes the configuration name the algorithm, the steps of uploads, the selection, the rule and the attack that a
    user passed to :func:`simulate` or :func:`fedray.tune`.

    Args:
        data: The argument of this name.
        objects: The arguments of :func:`simulate` from ``model`` to ``attack``, by name. Those that were not passed are
            None.

    Returns:
        Two values. The first is a list with overrides of the configuration, such as ``algorithm.name=...``. The second
        are the objects that the user passed. One for which its name says everything, such as a class of an algorithm
        that comes with fedray, is left out.

    Raises:
        UserError: An object is not what it is taken for.
    """
    objects = {name: each for name, each in objects.items() if each is not None}
    check_objects(data, objects.get("loss"), objects.get("metrics"))
    named: dict[str, Any] = {}
    if "algorithm" in objects:
        # imported here because it loads torch, which should happen while Ray starts
        from fedray.algorithms import is_known, name_of

        named["algorithm.name"] = name_of(objects["algorithm"])
        if is_known(objects["algorithm"]):
            del objects["algorithm"]
    if "upload" in objects:
        example = "upload= takes a list of steps, as in [{'clip': 1.0}, Half()]"
        steps = objects["upload"] = list_of(object, objects["upload"], example)
        named["train.upload"] = [recorded_name(step) if is_object(step) else step for step in steps]
        if not any(map(is_object, steps)):
            del objects["upload"]
    for name, key in NAMED_BY.items():
        if name in objects and not is_object(objects[name]):
            raise UserError(f"{name}= takes the object itself, not {objects[name]!r}: {key} names one")
        named |= {key: recorded_name(objects[name])} if name in objects else {}
    return [f"{key}={as_text(value, key)}" for key, value in named.items()], objects


def names_of(data: Any, objects: Mapping[str, Any]) -> list[str]:
    """Returns the names of what a user passed: ``data``, unless it is None, and ``objects``."""
    return [*([] if data is None else ["data"]), *objects]


def custom_objects(
    settings: Config, data: Any, test: Any, client_column: str | None, label_column: str, **objects: Any
) -> CustomObjects:
    """Collects the objects that a user passed to :func:`simulate` in one :class:`CustomObjects`, with which the
    experiment is then made.

    The arguments after ``settings``, the configuration, are those of :func:`simulate`. ``data`` and ``test`` become one
    :class:`Source`, which is read and scaled as ``settings`` says. Objects that were not passed are left out, or None.
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
    return CustomObjects(source, **{name: each for name, each in objects.items() if each is not None})


def run_experiment(
    settings: Config,
    custom: Callable[[], CustomObjects],
    callbacks: Sequence[Callback | Callable[[Report], Any]] = (),
    display: Display | None = None,
    tidy: Callable[[RunResult], None] = lambda result: None,
) -> RunResult:
    """Runs an experiment and returns its result. :func:`simulate` calls it after it has checked its arguments, and a
    sweep calls it for each of its runs.

    Args:
        settings: The configuration of the run.
        custom: A function without arguments that returns the objects that the user passed from Python. It is called
            while Ray starts, because reading the data, importing torch and starting Ray take seconds each.
        callbacks: Callbacks in addition to those that ``run.callbacks`` names.
        display: The object that shows the progress; None shows nothing.
        tidy: A function that gets the result at the end and may remove files of the run that are not needed any more.
            If ``run.output`` is a URI, this happens before the last files are sent there.
    """
    display = display or Display(quiet=True)
    stepper = Stepper(settings, custom, Callbacks.of(settings.run, callbacks, display.say), display, tidy=tidy)
    while stepper.step() is not None:
        pass
    assert stepper.result is not None
    return stepper.result
