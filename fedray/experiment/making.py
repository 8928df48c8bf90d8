"""Makes the model of an experiment: by name, from the user's class, or as a copy of the user's module.

It also puts a head in the place of the model's last layer, and loads initial weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedray.config import ModelConfig, unknown_key
from fedray.core import seeds
from fedray.core.copying import Portable, require_copyable
from fedray.core.places import Places
from fedray.core.seeds import Purpose
from fedray.core.structure import arguments, map_leaves
from fedray.errors import UserError, first_sentence, near_miss
from fedray.models import build, find_model, options_of
from fedray.models.channels_last import convert
from fedray.models.heads import Head, add_head, find_head
from fedray.models.norms import replace_norms
from fedray.models.soundness import require_trainable_kind
from fedray.usercode.importing import as_user_error


class Maker(Protocol):
    """A function that makes the model with its initial weights. With a client's number, it draws other weights for that
    client."""

    @property
    def code(self) -> Sequence[Any]:
        """The classes and functions, which may be the user's own, that make the model."""

    def __call__(self, client: int | None = None) -> nn.Module: ...


def maker_of(section: ModelConfig, given: Any, example: Any, classes: int, head: str, seed: int) -> tuple[str, Maker]:
    """Returns the name of the model, and the function that makes it.

    The initial weights are drawn from ``seed`` (``run.seed``). ``given`` is the class or module that the user handed
    over instead of a name, or None. ``example`` are the inputs of some samples, ``[b, ...]``. Raises
    :class:`UserError` for an unknown model, head or option.
    """
    options = dict(section.model_extra or {})
    shape = map_leaves(lambda x: tuple(x.shape[1:]), example)
    make: Maker
    if isinstance(given, nn.Module):
        if options:
            raise UserError(f"model.{next(iter(options))}: the model was given as an object, which takes no options")
        require_trainable_kind(given, "model=...")
        require_copyable(given)
        name, make = type(given).__name__, CopyMaker(Portable(given), seed)
    else:
        chosen = find_model(section.name) if given is None else given
        name = section.name if given is None else getattr(chosen, "__name__", "model")
        known = options_of(chosen)
        unknown = [key for key in options if key not in known]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise UserError(f"{name}: " + unknown_key(unknown[0], known, "model."))
        make = SeededMaker(chosen, name, shape, classes, options, seed)
    make = ReadyMaker(make, name, example, seed)
    if section.norm is not None:
        make = NormMaker(make, name, section.norm, section.norm_groups)
    found = find_head(head)
    if found is not None:
        make = HeadMaker(make, name, found, head, section.proj_dim, example, seed)
    if section.init == "zeros":
        make = ZerosMaker(make)
    return name, make if section.weights is None else WeightsMaker(make, Path(section.weights), classes)


@dataclass(frozen=True)
class CopyMaker:
    """A maker that copies a module that the user handed over.

    For a client, the layers that are trained and have a method ``reset_parameters`` draw their weights anew.
    """

    original: Portable
    seed: int

    @property
    def code(self) -> Sequence[Any]:
        return list({type(layer) for layer in self.original.module.modules()})

    def __call__(self, client: int | None = None) -> nn.Module:
        with as_user_error("model=... can't be copied"):
            module = self.original.copy()
        if client is not None:
            with seeds.every_rng(self.seed, Purpose.CLIENT_INIT, client):
                for layer in module.modules():
                    reset = getattr(layer, "reset_parameters", None)
                    own = list(layer.parameters(recurse=False))
                    if callable(reset) and (not own or any(p.requires_grad for p in own)):
                        reset()
        return module


@dataclass(frozen=True)
class SeededMaker:
    """A maker that calls the model's class. The initial weights depend only on the seed, and on the client if there is
    one."""

    model: Callable[..., nn.Module]
    name: str
    shape: Any
    classes: int
    options: Mapping[str, Any]
    seed: int

    @property
    def code(self) -> Sequence[Any]:
        return [self.model]

    def __call__(self, client: int | None = None) -> nn.Module:
        where = (Purpose.INIT,) if client is None else (Purpose.CLIENT_INIT, client)
        with seeds.every_rng(self.seed, *where):
            return build(self.model, self.name, self.shape, self.classes, self.options)


@dataclass(frozen=True)
class AroundMaker:
    """What makers have in common that change what another one has made."""

    make: Maker

    @property
    def code(self) -> Sequence[Any]:
        return self.make.code


@dataclass(frozen=True)
class ReadyMaker(AroundMaker):
    """A maker of a model whose lazy layers (``nn.LazyLinear``) have weights, from a pass over ``example [b, ...]``."""

    name: str
    example: Any
    seed: int

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            args, named = arguments(self.example)
            where = (Purpose.INIT, 1) if client is None else (Purpose.CLIENT_INIT, client, 1)
            module.eval()
            lazy = as_user_error(f"model {self.name} has lazy layers, and can't take inputs of the data")
            with lazy, seeds.every_rng(self.seed, *where), torch.no_grad():
                module(*args, **named)
            module.train()
        return module


@dataclass(frozen=True)
class NormMaker(AroundMaker):
    """A maker of a model with other normalisation layers than its own, which draws as many random numbers."""

    name: str
    norm: str
    groups: int

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        replace_norms(module, self.norm, self.groups, self.name)
        return module


@dataclass(frozen=True)
class HeadMaker:
    """A maker of a model with a head, whose initial weights, too, depend only on the seed and the client."""

    make: Maker
    name: str
    head: type[Head]
    kind: str
    width: int
    example: Any
    seed: int

    @property
    def code(self) -> Sequence[Any]:
        return [*self.make.code, self.head]

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        draws = seeds.every_rng(self.seed, Purpose.HEAD_INIT, *(() if client is None else (client + 1,)))
        with draws, as_user_error(f"model.head={self.kind}, model.proj_dim={self.width}: the head can't be made"):
            add_head(module, self.head, self.kind, self.width, self.name, self.example)
        return module


@dataclass(frozen=True)
class ZerosMaker(AroundMaker):
    """A maker of a model all of whose parameters are 0."""

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        return module


@dataclass(frozen=True)
class WeightsMaker(AroundMaker):
    """A maker of a model whose weights are loaded from a file; those for single clients are drawn all the same."""

    path: Path
    classes: int

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        if client is None:
            load_weights(module, self.path, self.classes)
        return module

    def notes(self) -> list[str]:
        """Returns lines for the user about tensors that are not loaded from the file."""
        found, notes = load_weights(self.make(), self.path, self.classes), []
        if found.kept:
            notes.append(
                f"warning: model.weights: {', '.join(found.kept)} begin as model.init says, because {self.path} has "
                f"none for {self.classes} classes or for this head"
            )
        if found.unused:
            notes.append(
                f"warning: model.weights: {len(found.unused)} tensors of {self.path} are not used, because model.norm "
                f"or model.head replaced their layers; the first is {found.unused[0]}"
            )
        return notes


@dataclass(frozen=True)
class LayoutMaker(AroundMaker):
    """A maker of a model whose 2-d convolutions have the channels-last layout, or the contiguous one."""

    channels_last: bool

    def __call__(self, client: int | None = None) -> nn.Module:
        module = self.make(client)
        convert(module, self.channels_last)
        return module


class OtherShape(UserError):
    """Raised for a file of weights with a tensor of another shape than the model's. ``outputs`` are those of the model
    in the file, if it is the tensor of the last layer that has another number of them; otherwise None."""

    def __init__(self, message: str, outputs: int | None) -> None:
        super().__init__(message)
        self.outputs = outputs


class Loaded(NamedTuple):
    """What was not loaded of a file of weights: the model's tensors that ``kept`` the weights that were drawn, and the
    file's that are ``unused``."""

    kept: list[str]
    unused: list[str]


def load_weights(module: nn.Module, path: Path, classes: int | None, key: str = "model.weights") -> Loaded:
    """Loads initial weights into ``module`` from a safetensors or pt file, and returns the names of the tensors that
    were not loaded.

    The model keeps those of its head, if the file has none of them, and those of a classifier of ``classes`` outputs,
    if that of the file has another number. The file may have further tensors of layers that were replaced
    (``model.norm``, ``model.head``). With ``classes`` None there are none of both: the file must have exactly the
    model's tensors. Raises :class:`UserError` if the file can't be read, has any other tensor, or lacks one of the
    right name, shape (:class:`OtherShape`), type and finite numbers; ``key`` says in messages where the file was named.
    """
    try:
        tensors = _tensors_in(path)
    except OSError as error:
        raise UserError(f"{key}: can't read {path}: {error.strerror or error}") from None
    except Exception as error:
        form = "a safetensors file" if path.suffix == SAFE else "what torch.save(model.state_dict(), ...) writes"
        raise UserError(f"{key}: {path} is damaged, or is not {form} ({first_sentence(error)})") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{key}: {path} must hold tensors by name, as torch.save(model.state_dict(), ...) does")
    places = Places(module)
    own = places.tensors
    tensors = _by_first_name(tensors, places, path, key)
    wanted = {name: tensor.shape for name, tensor in own.items() if name in tensors or name not in places.not_saved}
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
        if _kind(tensors[name]) != _kind(own[name]):
            raise UserError(
                f"{key}: {name} in {path} is of {tensors[name].dtype}, but of {own[name].dtype} in the model"
            )
        # a buffer may be a mask
        if name in places.parameters and not torch.isfinite(tensors[name].to(own[name].dtype)).all():
            raise UserError(f"{key}: {name} in {path} has numbers that are not finite")
    further = [name for name in tensors if name not in own]
    unused = [] if classes is None else [name for name in further if _is_replaced(name, module, heads)]
    for name in further:
        if name not in unused:
            raise UserError(f"{key}: {path} has a tensor {name!r}, which the model does not have")
    places.load({name: tensors[name] for name in wanted})
    return Loaded(kept, unused)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _by_first_name(tensors: Mapping[str, Tensor], places: Places, path: Path, key: str) -> dict[str, Tensor]:
    """Returns the tensors of a file by the first names of the module's. Raises :class:`UserError` if a tensor that the
    module has under several names is there with different values."""
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = places.aliases.get(name, name)
        if first in found and not torch.equal(found[first], tensor):
            raise UserError(f"{key}: {names[first]} and {name} differ in {path}, but are one tensor in the model")
        found[first], names[first] = tensor, name
    return found


SAFE = ".safetensors"


def _tensors_in(path: Path) -> Any:
    """Returns what a file of weights holds. It may be anything that can be read without running code."""
    if path.suffix == SAFE:
        return load_file(path)
    with warnings.catch_warnings():
        # about the age of the format; what matters is whether the file can be read
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def _is_replaced(name: str, module: nn.Module, heads: Sequence[str]) -> bool:
    """Returns whether a tensor of this name may be of a layer in whose place ``module`` has one of the ``heads``, or
    another normalisation layer or none."""
    if name.startswith(tuple(heads)):
        return True
    layers = dict(module.named_modules(remove_duplicate=False))
    return isinstance(layers.get(name.rpartition(".")[0]), (nn.Identity, nn.GroupNorm))


def _other_outputs(module: nn.Module, tensors: Mapping[str, Tensor]) -> int | None:
    """Returns the number of outputs of the last Linear layer in a file, if that of ``module`` has another number."""
    names = _classifier(module)
    if not names or names[0] not in tensors or tensors[names[0]].dim() != 2:
        return None
    outputs = len(tensors[names[0]])
    return None if outputs == len(Places(module).tensors[names[0]]) else outputs


def _classifier(module: nn.Module, classes: int | None = None) -> list[str]:
    """Returns the names of the tensors of the model's last Linear layer, the weight first, if it has ``classes``
    outputs; None stands for any number of them."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or classes not in (None, layers[-1][1].out_features):
        return []
    return [f"{layers[-1][0]}.{name}".lstrip(".") for name, _ in layers[-1][1].named_parameters()]


def _other_length(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Returns whether a tensor differs from ``shape`` in its first axis alone."""
    return tensor.dim() == len(shape) and tensor.shape[1:] == tuple(shape[1:]) and tensor.shape[0] != shape[0]
