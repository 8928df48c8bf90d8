"""Makes digests of what a result depends on beside its configuration.

That is the data, the model, its initial weights, the loss, the metrics and the user's code. The folder of a run or
of a sweep keeps the digests, so that it is never continued with anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedray.core.vectors import tensors_of
from fedray.usercode.digests import code_digest


def inputs_of(data: Mapping[str, str], model: Any, initial: nn.Module, code: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digests of what a run depends on, each under the name that a message gives it.

    ``data`` are those of the data set (:func:`fedray.data.storage.contents.data_digests`). ``model`` is the class or
    function that makes the model, or the module that the user handed over. ``initial`` is the model with its initial
    weights. ``code`` are the other classes and functions, under the names for messages.
    """
    found = dict(data)
    # the weights count in "initialisation of the model"
    weights = tensors_of(model).values() if isinstance(model, nn.Module) else ()
    found["code of the model"] = code_digest(model, apart_from=list(weights))
    found["initialisation of the model"] = _of_tensors(tensors_of(initial))
    return found | {name: code_digest(thing) for name, thing in code.items()}


def _of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
