"""Finds out what is to be evaluated: the model's file, and the configuration of the model and the data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedray.config import Config, assign, expand, flat, load
from fedray.errors import UserError
from fedray.tracking.folder import INPUTS, UNRECORDED
from fedray.tracking.records import check_file

KEYS = (
    "data.", "task.", "model.", "train.precision", "run.seed",
    "engine.device", "engine.threads", "engine.portable_bits", "engine.channels_last",
)  # fmt: skip
"""The keys on which an evaluation depends, or the sections that hold them; by ``run.seed`` clients get their shares of
the test set."""

KEYS_IN_WORDS = (
    "data.*, task.*, model.*, train.precision, run.seed, and engine.device, threads, portable_bits and channels_last"
)

WEIGHTS = ("model.weights", "model.init")
"""The keys about the weights with which training begins; they say nothing about those in the file."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated: the model in ``file`` by the configuration ``config``. ``notes`` are lines for the user.

    ``inputs`` are the digests of what the file's run was made of (:mod:`fedray.experiment.inputs`), and ``class_names``
    what its data call the classes, as far as that is known and the source is the same.
    """

    file: Path
    config: Config
    notes: Sequence[str]
    inputs: Mapping[str, str]
    class_names: Sequence[str]

    def effective(self, resolved: Config) -> dict[str, Any]:
        """Returns the settings on which the result depends, by dotted key, of the ``resolved`` configuration."""
        return {key: x for key, x in flat(resolved.model_dump(mode="json")).items() if key.startswith(KEYS)}


def request_of(
    target: str | Path, base: str | Path | None, overrides: Iterable[str], objects: Sequence[str], split: str
) -> Request:
    """Returns what ``target`` asks for: a run's folder, whose final model is meant, or a file with a model.

    The configuration is that of the file's run, if it lies in a run's folder; or it is the file ``base``. ``overrides``
    are ``key=value`` texts on top of it. ``objects`` names what was handed over from Python: data, model, loss,
    metrics. Raises :class:`UserError` if there is no such model, or the configuration says too little.
    """
    path = Path(target)
    if not path.exists():
        raise UserError(f"there is no run folder or file {target}")
    file = path / "model.safetensors" if path.is_dir() else path
    recorded = file.parent / "config.yaml"
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
    inputs, names = ({}, []) if base is not None else _inputs_and_classes(file.parent)
    same = values.get("data.source") == config.data.source and "data" not in objects
    return Request(file, config, notes, inputs if same else {}, names)


def _read(path: str | Path) -> dict[str, Any]:
    return flat(load(path).model_dump(mode="json", exclude_unset=True))


def _inputs_and_classes(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the inputs of the run in ``folder``, and the names of its classes; nothing if it is no run's folder."""
    found = []
    for path in (folder / INPUTS, folder / "summary.json"):
        if not path.exists():
            return {}, []
        try:
            found.append(dict(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{path} is damaged") from None
    return found[0], found[1].get("class_names") or []


def _settings(
    values: dict[str, Any], asked: dict[str, Any], objects: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of the evaluation by dotted key, and lines for the user.

    ``values`` are the recorded configuration, ``asked`` what the user sets instead, and ``objects`` as above.
    """
    notes = []
    kept = {key: value for key, value in values.items() if key.startswith(KEYS) and key not in WEIGHTS}
    recorded = set(values.get("run.given") or ())
    missing = recorded & {"data", "model", "loss", "metrics"} - set(objects)
    source = "from Python" if "data" in objects else asked.get("data.source")
    if source not in (None, "from Python" if "data" in recorded else values.get("data.source")):
        missing -= {"data"}
        # the model depends on how large images are
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
    """Returns what ``overrides`` set, by dotted key. Raises :class:`UserError` for keys that mean nothing here."""
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
    """Returns the configuration with these settings, and with nothing that a training needs."""
    fixed = {"algorithm.name": "fedavg", "engine.kind": "local", "engine.vectorize": False}
    fixed |= {"train.upload": [], "run.callbacks": []}
    fixed |= {"run.eval_clients": "all"} if split == "test" else {}
    return load(expand({**settings, **fixed}))
