"""Finds out what is to be evaluated: the model's file, and the configuration of the model and the data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedray.config import Config, assign, expand, flat, load
from fedray.errors import UserError
from fedray.tracking.folder import INPUTS

TAKEN = ("data.", "task.", "model.", "engine.device", "engine.threads", "engine.portable_bits", "train.precision")
"""The keys on which an evaluation depends, or the sections that hold them. ``run.seed`` is another, by which clients
get their shares of the test set."""

OF_THEM = "data.*, task.*, model.*, train.precision, run.seed, and engine.device, threads and portable_bits"

OF_THE_MODEL = ("data.image_size",)
"""The keys about the data that stay those of the run if the source is another, because the model depends on them."""


@dataclass(frozen=True)
class Request:
    """What is to be evaluated: the model in ``file`` by the configuration ``config``. ``notes`` are lines for the user.

    ``inputs`` are the digests of what the file's run was made of (:mod:`fedray.inputs`), and ``class_names`` what its
    data call the classes, as far as that is known and the source is the same.
    """

    file: Path
    config: Config
    notes: Sequence[str]
    inputs: Mapping[str, str]
    class_names: Sequence[str]

    def effective(self, resolved: Config) -> dict[str, Any]:
        """Returns the settings on which the result depends, by dotted key, of the ``resolved`` configuration."""
        values = flat(resolved.model_dump(mode="json"))
        return {key: value for key, value in values.items() if key.startswith(TAKEN) or key == "run.seed"}


def request_of(
    target: str | Path, base: str | Path | None, overrides: Iterable[str], given: Sequence[str], split: str
) -> Request:
    """Returns what ``target`` asks for: a run's folder, whose final model is meant, or a file with a model.

    The configuration is that of the file's run, if it lies in a run's folder; or it is the file ``base``. ``overrides``
    are ``key=value`` texts on top of it. ``given`` names the objects that were handed over from Python. Raises
    :class:`UserError` if there is no such model, or the configuration says too little.
    """
    path, overrides = Path(target), list(overrides)
    if not path.exists():
        raise UserError(f"there is no run folder or file {target}")
    file = path / "model.safetensors" if path.is_dir() else path
    recorded = file.parent / "config.yaml"
    if path.is_dir() and not recorded.exists():
        raise UserError(f"{target} is not the folder of a run: it has no config.yaml")
    if not file.exists():
        raise UserError(f"{target} has no model.safetensors, because the run has not ended")
    values: dict[str, Any] = {}
    if base is not None or recorded.exists():
        values = flat(load(recorded if base is None else base).model_dump(mode="json", exclude_unset=True))
    settings, notes = _settings(values, overrides, given)
    config = _load(settings, split)
    if "data" not in given and "data.source" not in settings:
        raise UserError(f"{target}: say on which data, for example data.source=mnist")
    if "model" not in given and "model.name" not in settings:
        raise UserError(f"{target}: say which model it is, for example model.name=lenet5")
    inputs, names = ({}, []) if base is not None else _recorded(file.parent)
    same = values.get("data.source") == config.data.source and "data" not in given
    return Request(file, config, notes, inputs if same else {}, names)


def _recorded(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the inputs of the run in ``folder``, and the names of its classes; nothing if it is no run's folder."""
    found = [json.loads((folder / name).read_text()) for name in (INPUTS, "summary.json") if (folder / name).exists()]
    if len(found) < 2:
        return {}, []
    return found[0], found[1].get("class_names") or []


def _settings(
    values: dict[str, Any], overrides: Sequence[str], given: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of the evaluation by dotted key, and lines for the user."""
    notes = []
    asked: dict[str, Any] = {}
    for override in overrides:
        assign(asked, override)
    asked = flat(asked)
    if "data" in given and "data.source" in asked:
        raise UserError("data.source: the data were handed over")
    for key in asked:
        if key in ("model.init", "model.weights"):
            raise UserError(f"{key}: the weights are those of the file that is evaluated")
        if not key.startswith(TAKEN) and key != "run.seed":
            raise UserError(f"{key}: an evaluation trains nothing; it takes {OF_THEM}")
    kept = {key: value for key, value in values.items() if key.startswith(TAKEN) or key == "run.seed"}
    recorded = set(values.get("run.given") or ())
    from_python = recorded - {"transform"} - set(given)
    source, own = asked.get("data.source"), "data" in recorded
    if ("data" in given and not own) or (source is not None and (own or source != kept.get("data.source"))):
        from_python -= {"data"}
        left_out = [key for key in kept if key.startswith("data.") and key not in OF_THE_MODEL]
        if left_out:
            notes.append(
                f"data.source={source or 'your own'} is not that of the run, so that no data.* of the run are used"
            )
        kept = {key: value for key, value in kept.items() if key not in left_out}
    if "model.name" in asked:
        from_python -= {"model"}
    if from_python & {"data", "model"}:
        missing = " and ".join(f"{name}=" for name in sorted(from_python & {"data", "model"}))
        raise UserError(f"the run got {missing} from Python: use fedray.evaluate(RUN, {missing}...)")
    if from_python:
        notes.append(f"the run got its {' and '.join(sorted(from_python))} from Python; here they are the task's own")
        kept = {key: value for key, value in kept.items() if key not in ("task.metric", "task.mode")}
    # the weights with which training began
    kept = {key: value for key, value in kept.items() if key not in ("model.weights", "model.init")}
    return {**kept, **asked}, notes


def _load(settings: dict[str, Any], split: str) -> Config:
    """Returns the configuration with these settings, and with nothing that a training needs."""
    fixed = {"algorithm.name": "fedavg", "engine.kind": "local", "engine.vectorize": False}
    fixed |= {"run.eval_clients": "all"} if split == "test" else {}
    return load(expand({**settings, **fixed}))
