"""Finds out what to evaluate: the model's file, and the configuration of the model and the data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedray.config import Config, assign, expand, flat, load
from fedray.errors import UserError
from fedray.remote.fetching import as_path
from fedray.tracking.folder import INPUTS, LOCAL, PERSONAL, UNRECORDED
from fedray.tracking.records import check_file

KEYS = (
    "data.", "task.", "model.", "train.precision", "run.seed",
    "engine.device", "engine.threads", "engine.portable_bits", "engine.channels_last",
)  # fmt: skip
"""The keys on which an evaluation depends, or the sections that hold them. ``run.seed`` is one of them because it
determines the clients' test shares."""

KEYS_IN_WORDS = (
    "data.*, task.*, model.*, train.precision, run.seed, and engine.device, threads, portable_bits and channels_last"
)

WEIGHTS = ("model.weights", "model.init")
"""The keys about initial weights, which do not matter for the weights in the file."""

OF_NO_CLIENT = (
    "warning: this is the global model, with initial values in its private layers, so that it is no client's model: "
    "evaluate RUN/personal/client-0.safetensors (run.personal_models_of saves it; result.client_model(0) in Python), "
    "or score personal models in the run itself (run.eval_clients=all)"
)


@dataclass(frozen=True)
class Request:
    """What is to be evaluated: the model in ``file``, with the configuration ``config``. ``notes`` are lines to be
    shown to the user.

    ``inputs`` has digests (sha256) of the data, the model and the code of the run that wrote ``file``, by names such as
    ``training data`` (:mod:`fedray.experiment.inputs`). The dict is empty if the digests are unknown, or if the
    evaluation has other data than the run. ``class_names`` are the names of the classes in that run, and empty if they
    are unknown.
    """

    file: Path
    config: Config
    notes: Sequence[str]
    inputs: Mapping[str, str]
    class_names: Sequence[str]

    def effective(self, resolved: Config) -> dict[str, Any]:
        """Returns the settings in the configuration ``resolved`` on which the results of an evaluation depend, by
        dotted key."""
        return {key: x for key, x in flat(resolved.model_dump(mode="json")).items() if key.startswith(KEYS)}


def request_of(
    target: str | Path, base: str | Path | None, overrides: Iterable[str], objects: Sequence[str], split: str
) -> Request:
    """Finds out what to evaluate from the arguments of :func:`fedray.evaluate`.

    Args:
        target: a run folder, whose final model is evaluated, or a file with a model; also as a URI.
        base: the file with the configuration; None for the one in the folder of the model's run.
        overrides: ``key=value`` texts that change the configuration.
        objects: the names of the arguments ``data``, ``model``, ``loss`` and ``metrics`` that the user passes from
            Python.
        split: ``test``, ``train`` or ``validation``.

    Raises:
        UserError: there is no such model, or the configuration lacks something.
    """
    path = as_path(target)
    if not path.exists():
        raise UserError(f"there is no run folder or file {target}")
    file = path / "model.safetensors" if path.is_dir() else path
    # a client's model of a round is in RUN/local/ROUND
    run = file.parents[2] if file.parent.parent.name == LOCAL else file.parent
    if file.parent.name == PERSONAL and file.name != "model.safetensors":
        run = file.parents[1]
    recorded = run / "config.yaml"
    if path.is_dir() and not recorded.exists():
        raise UserError(f"{target} is not the folder of a run: it has no config.yaml")
    if not file.exists():
        raise UserError(f"{target} has no model.safetensors, because the run has not ended")
    check_file(file.parent, file.name)
    values: dict[str, Any] = {}
    if base is not None:
        values = _read(base)
    elif recorded.exists():
        values = {**UNRECORDED, **_read(recorded)}
    asked = _asked(overrides, objects)
    settings, notes = _settings(values, asked, objects)
    config = _load(settings, split)
    if "data" not in objects and "data.source" not in settings:
        raise UserError(f"{target}: say on which data, for example data.source=mnist")
    if "model" not in objects and "model.name" not in settings:
        raise UserError(f"{target}: say which model it is, for example model.name=lenet5")
    inputs, summary = ({}, {}) if base is not None else _inputs_and_summary(run)
    if "private_parameters" in summary and file.parent == run:
        notes.append(OF_NO_CLIENT)
    same = values.get("data.source") == config.data.source and "data" not in objects
    # other samples were asked for, but not another scaling of them, nor other code
    kept = {name: digest for name, digest in inputs.items() if same or name in ("normalisation", "code of the model")}
    return Request(file, config, notes, kept, summary.get("class_names") or [])


def _read(path: str | Path) -> dict[str, Any]:
    return flat(load(path).model_dump(mode="json", exclude_unset=True))


def _inputs_and_summary(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the digests of the inputs of the run in ``folder``, and the run's summary.

    Both are empty if there is no run in the folder.
    """
    found = []
    for path in (folder / INPUTS, folder / "summary.json"):
        if not path.exists():
            return {}, {}
        try:
            found.append(dict(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{path} is damaged") from None
    return found[0], found[1]


def _settings(
    values: dict[str, Any], asked: dict[str, Any], objects: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of the evaluation by dotted key, and lines for the user.

    ``values`` is the run's configuration, ``asked`` has the settings that the user changes, and ``objects`` are the
    names of the objects that the user passes from Python.
    """
    notes = []
    kept = {key: value for key, value in values.items() if key.startswith(KEYS) and key not in WEIGHTS}
    recorded = set(values.get("run.given") or ())
    missing = recorded & {"data", "model", "loss", "metrics"} - set(objects)
    source = "from Python" if "data" in objects else asked.get("data.source")
    if source not in (None, "from Python" if "data" in recorded else values.get("data.source")):
        missing -= {"data"}
        # the model depends on the size of images
        of_data = {key for key in kept if key.startswith("data.") and key != "data.image_size"}
        kept = {key: value for key, value in kept.items() if key not in of_data}
        if of_data:
            source = asked.get("data.source", "your own")
            notes.append(f"data.source={source} is not that of the run, so that no data.* of the run are used")
    if "model.name" in asked:
        missing -= {"model"}
        kept.pop("engine.channels_last", None)
    if needed := sorted(missing & {"data", "model"}):
        names = " and ".join(f"{name}=" for name in needed)
        raise UserError(f"the run got {names} from Python: use fedray.evaluate(RUN, {names}...)")
    if missing:
        names = " and ".join(sorted(missing))
        notes.append(f"warning: the run got its {names} from Python; here they are the task's own")
        kept = {key: value for key, value in kept.items() if key not in ("task.metric", "task.mode")}
    return {**kept, **asked}, notes


def _asked(overrides: Iterable[str], objects: Sequence[str]) -> dict[str, Any]:
    """Returns the settings in ``overrides``, which are ``key=value`` texts, by dotted key.

    Raises :class:`UserError` for keys that don't affect an evaluation.
    """
    asked: dict[str, Any] = {}
    for override in overrides:
        assign(asked, override)
    asked = flat(asked)
    if "data" in objects and "data.source" in asked:
        raise UserError("data.source: the data were handed over")
    for key in asked:
        if key in WEIGHTS:
            raise UserError(f"{key}: the weights are those of the file that is evaluated")
        if not key.startswith(KEYS):
            raise UserError(f"{key}: an evaluation trains nothing; it takes {KEYS_IN_WORDS}")
    return asked


def _load(settings: dict[str, Any], split: str) -> Config:
    """Returns a configuration with the values of ``settings``, in which everything that only training needs has a
    fixed value."""
    fixed = {"algorithm.name": "fedavg", "engine.kind": "local", "engine.vectorize": False}
    fixed |= {"train.upload": [], "train.sampling": "uniform", "run.callbacks": []}
    fixed |= {"run.eval_clients": "all"} if split == "test" else {}
    return load(expand({**settings, **fixed}))
