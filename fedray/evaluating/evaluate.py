"""Runs a saved model over the samples of a data set, and collects the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from fedray.api import custom_objects
from fedray.core.samples import Samples
from fedray.core.seeds import SERVER
from fedray.core.task import Task
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.evaluation.accuracies import EVAL_BLOCK
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.engine.process import computing_process, require_device
from fedray.engine.state.checkpoint import flat_sha256
from fedray.engine.state.states import StateFolder
from fedray.errors import UserError, near_miss
from fedray.evaluating import SPLITS
from fedray.evaluating.features import features_of
from fedray.evaluating.request import Request, request_of
from fedray.evaluating.tables import Evaluation, confusion_of, table_of_classes, value_over
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.experiment.weights import OtherShape, load_weights
from fedray.util.arguments import check_objects, override_texts, place_of
from fedray.warning import PythonWarnings

if TYPE_CHECKING:
    from torch import nn

    from fedray.core.task import Loss


DATA_INPUTS = ("training data", "test data", "normalisation", "names of classes and clients", "code of the model")
"""The inputs of a run (:mod:`fedray.experiment.inputs`) that change the results of an evaluation."""

LISTED = 8
"""The largest number of classes that a message names."""


def evaluate(
    target: str | PathLike[str],
    base: str | Path | None = None,
    *,
    split: str = "test",
    data: Any = None,
    test: Any = None,
    client_column: str | None = None,
    label_column: str = "label",
    model: nn.Module | Callable[..., nn.Module] | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Loss] | None = None,
    overrides: Iterable[str] = (),
    features: int = 0,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Evaluates a saved model: its loss and metrics, also for each class and each client, and the confusion matrix.

    The model is run as at the end of a round, in the same batches, so that the numbers are the same as in the run::

        found = fedray.evaluate("runs/fedavg-mnist", split="train")
        print(found.metrics["accuracy"], found.classes, found.confusion_matrix())

    Args:
        target: a run folder, whose final model is evaluated, or its result; or a file with a model (safetensors, or pt
            with a ``state_dict``). A file in a run folder is evaluated with the configuration of the run.
        base: a YAML file that describes the model and the data, for a model that is not in a run folder.
        split: the samples: ``test``, ``train`` (those that clients hold) or ``validation``.
        data, test: the training and the test set, in the forms that :func:`fedray.simulate` takes, such as arrays
            ``(x, y)``; None for the data set of the configuration.
        client_column, label_column: the columns of ``data``, if that is a table, that hold the clients and the targets.
        model: a module, or a class or function that makes one, as for :func:`fedray.simulate`.
        loss, metrics: a function ``loss(outputs, targets)``, and a dict of such functions by the names of metrics,
            which are computed in addition to the task's metrics.
        overrides: ``key=value`` texts that change the configuration, such as ``data.source=emnist``. If the source is
            changed, no other setting in ``data`` is taken from the run, except ``data.image_size``.
        features: the number of samples whose representations (the inputs of the model's last Linear layer) are
            returned as well. ``run.seed`` determines which samples are drawn.
        say: ``say(line)`` shows a line to the user. Without it, only warnings are shown, as warnings of Python
            (:class:`fedray.FedrayWarning`).

    Raises:
        UserError: there is no such model, or it does not fit the data.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}{near_miss(split, SPLITS)}; there are {', '.join(SPLITS)}")
    objects = {"data": data, "model": model, "loss": loss, "metrics": metrics}
    check_objects(data, loss, metrics)
    if isinstance(features, bool) or not isinstance(features, Integral) or features < 0:
        raise UserError(f"--features must be a whole number of at least 0, not {features!r}")
    handed_over = [name for name, each in objects.items() if each is not None]
    request = request_of(place_of(target), base, override_texts(overrides), handed_over, split)
    own = custom_objects(
        request.config, data, test, client_column, label_column, model=model, loss=loss, metrics=metrics
    )
    experiment, federated = resolve(request.config, own)
    return _evaluate(request, experiment, federated, own, split, int(features), say or PythonWarnings())


def _evaluate(
    request: Request,
    experiment: Experiment,
    data: FederatedData,
    own: CustomObjects,
    split: str,
    features: int,
    say: Callable[[str], None],
) -> Evaluation:
    engine, task = experiment.config.engine, experiment.task
    source = own.source.name if own.source is not None else experiment.config.data.source
    with computing_process(engine.threads, engine.portable_bits, experiment.precision):
        require_device(experiment.device, experiment.precision)
        clients = Clients(experiment, data, StateFolder(Path()), experiment.device)
        _load_model(clients, request, source)
        sha = flat_sha256(clients.network.layout.named(clients.network.loaded()))
        samples, indices, shares = _samples_of(split, clients)
        if not len(indices):
            hint = ": data.validation_samples sets some aside" if split == "validation" else ""
            raise UserError(f"{source} has no {split} samples{hint}")
        begins = f"evaluating {request.file} on {len(indices):,} {split} samples of {source} ..."
        for line in (*data.warnings, *request.notes, *_differences(request, experiment.inputs), begins):
            say(line)
        sums, found = _run(clients, samples, indices)
        represented = features_of(clients, samples, indices, features) if features else None
    classes, confusion = None, None
    if found is not None:
        confusion = confusion_of(*found)
        names = data.class_names if task.kind == "classification" else None
        classes = table_of_classes(confusion, found[-1], names)
    return Evaluation(
        file=request.file,
        model_sha256=sha,
        source=source,
        split=split,
        samples=len(indices),
        metrics={name: value_over(task, name, each) for name, each in sums.items()},
        main=task.main,
        mode=task.mode,
        settings=request.effective(experiment.config),
        classes=classes,
        confusion=confusion,
        clients=None if shares is None else _table_of_clients(task, data, sums, shares),
        features=represented,
    )


def _load_model(clients: Clients, request: Request, source: str) -> None:
    """Loads the model in the file that is evaluated into the network.

    Raises :class:`UserError` if the model does not fit the data.
    """
    data = clients.data
    names = data.class_names
    if request.class_names and names and tuple(request.class_names) != names:
        raise UserError(
            f"the model's classes are {_listed(request.class_names)}, but those of {source} are {_listed(names)}"
        )
    try:
        load_weights(clients.network.module, request.file, None, "evaluate")
    except OtherShape as other:
        if other.outputs is None:
            raise UserError(f"{other}; the samples of {source} have shape {_shapes(data.input_shape)}") from None
        what = "classes" if data.task in ("classification", "tokens") else "outputs"
        raise UserError(
            f"the model in {request.file} has {other.outputs} {what}, but the targets of {source} have {data.classes}"
        ) from None


def _shapes(shape: Any) -> str:
    """Returns the shape of one sample's inputs, or several shapes, as text for a message: ``[1, 28, 28]``."""
    if isinstance(shape, Mapping):
        return ", ".join(f"{_shapes(part)} ({name})" for name, part in shape.items())
    several = isinstance(shape, tuple) and any(isinstance(part, (tuple, Mapping)) for part in shape)
    return ", ".join(map(_shapes, shape)) if several else str(list(shape))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _differences(request: Request, inputs: Mapping[str, str]) -> list[str]:
    """Returns a list with a warning if the model's run had other data, normalisation or code than the evaluation.

    The list is empty if nothing differs.
    """
    parts = [name for name in DATA_INPUTS if request.inputs.get(name) not in (None, inputs.get(name))]
    return [f"warning: not as in the run: {', '.join(parts)}"] if parts else []


def _samples_of(split: str, clients: Clients) -> tuple[Samples, NDArray[np.int64], list[NDArray[np.int64]] | None]:
    """Returns three things: the samples that contain the split's samples, the indices of the split's samples among
    them, and for each client the positions of its samples in these indices. The last is None for the validation set,
    which belongs to no client."""
    data = clients.data
    if split == "validation":
        return clients.train, data.validation, None
    if split == "test":
        shares = [data.client_test(client) for client in range(data.clients)]
        return clients.test, np.arange(len(data.y_test)), shares
    return clients.train, data.indices, np.split(np.arange(len(data.indices)), data.offsets[1:-1])


@torch.no_grad()
def _run(
    clients: Clients, samples: Samples, indices: NDArray[np.int64]
) -> tuple[dict[str, NDArray[np.float64]], tuple[NDArray[np.int64], NDArray[np.int64], int] | None]:
    """Runs the model over n samples, in the same batches and with the same random numbers as at the end of a round.

    Returns, by metric, two sums for each sample, ``[n, 2]``: a numerator and a denominator, from which the metric is
    computed. If there are classes, it also returns the targets, the predicted classes (of all samples, or of all tokens
    that count) and the number of classes, or else None.
    """
    evaluator, task = Evaluator(clients), clients.experiment.task
    sums = {name: np.ones((len(indices), 2)) for name in ("loss", *task.metrics)}
    pairs: list[torch.Tensor] = []
    number, model = clients.data.classes, clients.network.loaded()
    for start in range(0, len(indices), EVAL_BLOCK):
        block = slice(start, start + EVAL_BLOCK)
        with evaluator.draws(0, SERVER, start):
            for rows, outputs, y in evaluator.passes(model, samples, indices[block]):
                for name, each in sums.items():
                    total, count = task.sums(name, outputs, y)
                    each[block][rows, 0] = total.double().cpu().numpy()
                    if count is not None:
                        each[block][rows, 1] = count.double().cpu().numpy()
                if task.kind in ("classification", "tokens"):
                    number = max(number, outputs.shape[task.class_axis])
                    pair = torch.stack([y.reshape(-1), outputs.argmax(task.class_axis).reshape(-1)])
                    pairs.append((pair if task.ignored is None else pair[:, pair[0] != task.ignored]).cpu())
    if not pairs:
        return sums, None
    targets, predicted = torch.cat(pairs, 1).long().numpy()
    return sums, (targets, predicted, number)


def _table_of_clients(
    task: Task, data: FederatedData, sums: Mapping[str, NDArray[np.float64]], shares: list[NDArray[np.int64]]
) -> pd.DataFrame:
    """Returns the table :attr:`Evaluation.clients`, which has a row for each client with samples.

    ``sums`` are the two sums of each sample by metric, and ``shares`` has the positions of each client's samples in
    them.
    """
    ids = [client for client, share in enumerate(shares) if len(share)]
    columns: dict[str, Any] = {"client": ids, **data.names_of(ids), "samples": [len(shares[client]) for client in ids]}
    for name, each in sums.items():
        columns[name] = [value_over(task, name, each[shares[client]]) for client in ids]
    return pd.DataFrame(columns)
