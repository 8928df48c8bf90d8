"""Makes digests of everything that a result depends on besides its configuration.

These are the data, the model, its initial weights, the loss, the metrics and the user's code. The folder of a run or of
a sweep keeps the digests, so that it is never continued with anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedray.core.places import tensors_of
from fedray.core.upload import UploadStep
from fedray.experiment.custom import CustomObjects
from fedray.experiment.data import DataStage
from fedray.experiment.model import ModelStage
from fedray.experiment.robust import Robust
from fedray.experiment.training import TrainingStage
from fedray.models import find_model
from fedray.selection import SELECTIONS, Selection
from fedray.usercode.digests import code_digest


def inputs_of(
    custom: CustomObjects,
    selection: Selection,
    upload: tuple[UploadStep, ...],
    robust: Robust | None,
    data: DataStage,
    training: TrainingStage,
    model: ModelStage,
    initial: nn.Module,
) -> dict[str, str]:
    """Returns the digests (sha256) of everything that the result of a run depends on besides its configuration. A run
    is only resumed if none of them has changed.

    The keys of the dict are the names that messages use, such as ``training data`` or ``code of the model``. ``custom``
    has the user's objects, ``selection`` chooses the clients of a round, ``upload`` has the steps that are applied to
    clients' uploads, and ``robust`` the rule and the attack, if there are any. ``data``, ``training`` and ``model`` are
    what the stages of these names have decided.
    ``initial`` is the model with its initial weights.
    """
    code: dict[str, Any] = {"code of the algorithm": type(training.algorithm)}
    code |= {f"metric {name}": model.task.metrics[name].values for name in custom.metrics}
    if custom.loss is not None:
        code["loss"] = custom.loss
    if training.transform is not None:
        code[f"code of {training.transform.name}"] = training.transform.function
    code |= {f"step {number} of train.upload": step for number, step in enumerate(upload, 1)}
    code |= robust.user_code if robust is not None else {}
    if type(selection) not in SELECTIONS.values():
        code["code of train.sampling"] = selection
    # their options are not in the configuration, even if their class comes with fedray
    passed = ("code of train.sampling", "rule of train.aggregation", "attack")
    things = (custom.sampling, custom.aggregation, custom.attack)
    code |= {name: thing for name, thing in zip(passed, things, strict=True) if thing is not None}
    if model.make.head is not None:
        code["code of the head"] = model.make.head
    made_by = find_model(model.name) if custom.model is None else custom.model
    # the weights of a custom module count in "initialisation of the model"
    weights = tensors_of(made_by).values() if isinstance(made_by, nn.Module) else ()
    configuration: Any = getattr(initial, "config", None)
    if callable(getattr(configuration, "to_dict", None)):
        code["configuration of the model"] = _facts_of(configuration.to_dict())
    return {
        **data.digests,
        "code of the model": code_digest(made_by, apart_from=list(weights)),
        "initialisation of the model": _of_tensors(tensors_of(initial)),
        **{name: code_digest(thing) for name, thing in code.items()},
    }


def _facts_of(configuration: Mapping[str, Any]) -> str:
    """Returns what a model of transformers computes by, as text: its configuration without the place and the version
    that wrote it."""
    others = ("_name_or_path", "transformers_version")
    return json.dumps({k: v for k, v in configuration.items() if k not in others}, sort_keys=True, default=str)


def _of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
