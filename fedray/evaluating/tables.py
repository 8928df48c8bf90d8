"""The results of an evaluation: numbers about the model, each class, and each client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedray.core.task import Task
from fedray.evaluating.features import Features


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The results of evaluating a saved model on some samples, the ``split``: test, train or validation.

    * ``file``: the model's file, and ``model_sha256`` its digest; ``source``: the name of the data set.
    * ``settings``: the configuration of data, task and model, by dotted key.
    * ``samples``: the number of samples; ``metrics``: the loss and the task's metrics, by name.
    * ``main``: the name of the main metric; ``mode``: whether larger (max) or smaller (min) values of it are better.
    * ``classes``: a row for each class: ``class``, ``name``, ``samples`` (tokens, for the task ``tokens``),
      ``predicted`` (the number of samples that are predicted to be in the class), ``correct``, ``accuracy`` (the share
      of its samples that are predicted correctly, also called recall), ``precision`` (the share of correct ones among
      those predicted to be in it) and ``f1``. None if samples have no classes.
    * ``confusion``: a row for each pair of a class ``target`` and a class ``predicted`` that occurs, with the number of
      samples in ``count``. None if samples have no classes.
    * ``clients``: a row for each client that has samples: ``client``, ``client_name`` if the data name clients,
      ``samples``, ``loss``, and the metrics. None for the split ``validation``, which belongs to no client.
    * ``features``: the representations of some samples (the inputs of the model's last Linear layer), None unless
      requested.

    Example:
        print(found.metrics["accuracy"])
        worst = found.classes.sort_values("accuracy").head()
    """

    file: Path
    model_sha256: str
    source: str
    split: str
    samples: int
    metrics: Mapping[str, float]
    main: str
    mode: str
    settings: Mapping[str, Any]
    classes: pd.DataFrame | None
    confusion: pd.DataFrame | None
    clients: pd.DataFrame | None
    features: Features | None = None

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"Evaluation({str(self.file)!r} on {self.source}, {self.split}, {self.samples:,} samples: {found})"

    @property
    def folder(self) -> Path:
        """The folder beside the model's file in which ``fedray evaluate`` creates a folder for the results of
        each evaluation.

        It is ``evaluations`` for the file ``model.safetensors``, and ``NAME-evaluations`` for other names.
        """
        return self.file.parent / ("evaluations" if self.file.stem == "model" else f"{self.file.stem}-evaluations")

    def confusion_matrix(self) -> pd.DataFrame:
        """Returns the confusion matrix: a DataFrame with a row for each target class and a column for each
        predicted class.

        The entries are numbers of samples, and rows and columns have the names of the classes.
        """
        assert self.classes is not None
        assert self.confusion is not None
        names = self.classes["name"]
        counts = np.zeros((len(names), len(names)), np.int64)
        counts[self.confusion["target"], self.confusion["predicted"]] = self.confusion["count"]
        return pd.DataFrame(counts, index=pd.Index(names, name="target"), columns=pd.Index(names, name="predicted"))


def confusion_of(targets: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> pd.DataFrame:
    """Counts how often each pair of a target class and a predicted class occurs.

    ``targets [n]`` and ``predicted [n]`` are the classes of n samples, numbers below ``classes``. Returns a DataFrame
    with the columns ``target``, ``predicted`` and ``count``, and a row for each pair that occurs.
    """
    codes, counts = np.unique(targets * classes + predicted, return_counts=True)
    return pd.DataFrame({"target": codes // classes, "predicted": codes % classes, "count": counts})


def table_of_classes(confusion: pd.DataFrame, classes: int, names: Sequence[str] | None) -> pd.DataFrame:
    """Returns a table with a row for each class: how many samples it has and how many are predicted correctly.

    The columns are ``class``, ``name``, ``samples``, ``predicted``, ``correct``, ``accuracy``, ``precision`` and ``f1``
    (:attr:`Evaluation.classes`). Quotients with a denominator of 0 are NaN. ``confusion`` has the numbers of samples
    for pairs of a target class and a predicted class (:func:`confusion_of`), and ``classes`` is the number of classes.
    ``names`` are the names of the classes; if it is None, their numbers are used.
    """
    samples, predicted = (
        np.bincount(confusion[column], confusion["count"], minlength=classes).astype(np.int64)
        for column in ("target", "predicted")
    )
    right = confusion[confusion["target"] == confusion["predicted"]]
    correct = np.bincount(right["target"], right["count"], minlength=classes).astype(np.int64)
    with np.errstate(invalid="ignore"):
        found = {"accuracy": correct / samples, "precision": correct / predicted}
        found["f1"] = 2 * correct / (samples + predicted)
    return pd.DataFrame(
        {
            "class": range(classes), "name": list(names) if names else [str(each) for each in range(classes)],
            "samples": samples, "predicted": predicted, "correct": correct, **found,
        }
    )  # fmt: skip


def value_over(task: Task, name: str, sums: NDArray[np.float64]) -> float:
    """Returns the value over n samples of the metric ``name`` of a task, such as the accuracy.

    ``sums [n, 2]`` has a numerator and a denominator for each sample (:meth:`Task.sums`), which are added up over the
    samples.
    """
    return task.value(name, math.fsum(sums[:, 0]), math.fsum(sums[:, 1]))
