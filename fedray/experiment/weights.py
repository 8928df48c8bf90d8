"""Loads the weights of a model from a file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedray.core.places import Places
from fedray.errors import UserError, first_sentence, near_miss
from fedray.models.heads import Head

SAFETENSORS = ".safetensors"


class OtherShape(UserError):
    """Raised if a tensor in a file of weights has another shape than in the model.

    ``outputs`` is the number of outputs of the last Linear layer in the file if it differs from the model's, and
    otherwise None.
    """

    def __init__(self, message: str, outputs: int | None) -> None:
        super().__init__(message)
        self.outputs = outputs


class Loaded(NamedTuple):
    """The names of the tensors that were not loaded from a file of weights.

    ``kept`` are tensors of the model that kept their initial values, and ``unused`` are tensors of the file.
    """

    kept: list[str]
    unused: list[str]


def load_weights(module: nn.Module, path: Path, classes: int | None, key: str = "model.weights") -> Loaded:
    """Loads the weights in a safetensors or pt file into ``module``. Returns the names of the tensors that were not
    loaded.

    If ``classes`` is None, the file must have exactly the model's tensors. If it is the number of classes, there are
    three exceptions, for transfer learning. The model's head keeps its weights if the file has none for it. The last
    Linear layer keeps its weights if it has ``classes`` outputs and the file has another number. The file may also have
    tensors of layers that ``model.norm`` or ``model.head`` replaced, which are not used.

    Raises :class:`UserError` if the file can't be read, or a tensor is missing, unknown, or has another shape
    (:class:`OtherShape`), another type or numbers that are not finite. In messages ``key`` is the key that names the
    file.
    """
    try:
        tensors = _tensors_in(path)
    except OSError as error:
        raise UserError(f"{key}: can't read {path}: {error.strerror or error}") from None
    except Exception as error:
        form = "a safetensors file" if path.suffix == SAFETENSORS else "what torch.save(model.state_dict(), ...) writes"
        raise UserError(f"{key}: {path} is damaged, or is not {form} ({first_sentence(error)})") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{key}: {path} must hold tensors by name, as torch.save(model.state_dict(), ...) does")
    return load_tensors(module, tensors, str(path), classes, key)


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], path: str, classes: int | None, key: str) -> Loaded:
    """Loads ``tensors``, by name, into ``module``, and does what :func:`load_weights` says. In messages ``path`` is
    where they come from."""
    places = Places(module)
    here = places.tensors
    tensors = _by_first_name(tensors, places, path, key)
    wanted = {name: tensor.shape for name, tensor in here.items() if name in tensors or name not in places.not_saved}
    heads = [f"{name}." for name, m in module.named_modules() if isinstance(m, Head)]
    of_head = [name for name in wanted if name.startswith(tuple(heads))]
    kept = [] if classes is None or tensors.keys() & set(of_head) else of_head
    last = [] if classes is None else [places.aliases.get(name, name) for name in _classifier(module, classes)]
    kept += [name for name in last if name in tensors and _other_length(tensors[name], wanted[name])]
    wanted = {name: shape for name, shape in wanted.items() if name not in kept}
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(f"{key}: {path} has no tensor {name!r}{near_miss(name, tensors)}")
        if tensors[name].shape != shape:
            line = f"{key}: {name} is {list(tensors[name].shape)} in {path}, but {list(shape)} in the model"
            raise OtherShape(line, _other_outputs(module, tensors))
        if _kind(tensors[name]) != _kind(here[name]):
            raise UserError(
                f"{key}: {name} in {path} is of {tensors[name].dtype}, but of {here[name].dtype} in the model"
            )
        # a buffer may be a mask
        if name in places.parameters and not torch.isfinite(tensors[name].to(here[name].dtype)).all():
            raise UserError(f"{key}: {name} in {path} has numbers that are not finite")
    further = [name for name in tensors if name not in here]
    unused = [] if classes is None else [name for name in further if _is_replaced(name, module, heads)]
    for name in further:
        if name not in unused:
            raise UserError(f"{key}: {path} has a tensor {name!r}, which the model does not have")
    places.load({name: tensors[name] for name in wanted})
    return Loaded(kept, unused)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _by_first_name(tensors: Mapping[str, Tensor], places: Places, path: str, key: str) -> dict[str, Tensor]:
    """Returns the tensors of a file by name. Of several names that the module has for one tensor, the first one
    is used.

    Raises :class:`UserError` if the file has different values for these names.
    """
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = places.aliases.get(name, name)
        if first in found and not torch.equal(found[first], tensor):
            raise UserError(f"{key}: {names[first]} and {name} differ in {path}, but are one tensor in the model")
        found[first], names[first] = tensor, name
    return found


def _tensors_in(path: Path) -> Any:
    """Returns the content of a file of weights, which may be of any type that torch loads without running code."""
    if path.suffix == SAFETENSORS:
        return load_file(path)
    with warnings.catch_warnings():
        # warnings about an old format do not matter as long as the file can be read
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def _is_replaced(name: str, module: nn.Module, heads: Sequence[str]) -> bool:
    """Returns whether the tensor ``name`` of a file may belong to a layer that ``model.head`` or ``model.norm``
    has replaced.

    In ``module`` there is one of the ``heads``, another normalisation layer, or no layer in its place.
    """
    if name.startswith(tuple(heads)):
        return True
    layers = dict(module.named_modules(remove_duplicate=False))
    return isinstance(layers.get(name.rpartition(".")[0]), (nn.Identity, nn.GroupNorm))


def _other_outputs(module: nn.Module, tensors: Mapping[str, Tensor]) -> int | None:
    """Returns the number of outputs that the model's last Linear layer has in a file, or None if it is that
    of ``module``."""
    names = _classifier(module)
    if not names or names[0] not in tensors or tensors[names[0]].dim() != 2:
        return None
    outputs = len(tensors[names[0]])
    return None if outputs == len(Places(module).tensors[names[0]]) else outputs


def _classifier(module: nn.Module, classes: int | None = None) -> list[str]:
    """Returns the names of the tensors of the model's last Linear layer, the weight first.

    The list is empty if the layer does not have ``classes`` outputs, unless ``classes`` is None.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or classes not in (None, layers[-1][1].out_features):
        return []
    return [f"{layers[-1][0]}.{name}".lstrip(".") for name, _ in layers[-1][1].named_parameters()]


def _other_length(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Returns whether a tensor's shape differs from ``shape`` only in the first axis."""
    return tensor.dim() == len(shape) and tensor.shape[1:] == tuple(shape[1:]) and tensor.shape[0] != shape[0]
