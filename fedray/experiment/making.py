"""Makes the model of an experiment from its name, from the user's class, or as a copy of the user's module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedray.config import ModelConfig, unknown_key
from fedray.core import seeds
from fedray.core.copying import Portable, require_copyable
from fedray.core.seeds import Purpose
from fedray.core.structure import arguments, map_leaves
from fedray.errors import UserError
from fedray.experiment.weights import load_weights
from fedray.models import build, find_model, options_of
from fedray.models.adapters import TRANSFORMERS
from fedray.models.adapting import adapt
from fedray.models.channels_last import convert
from fedray.models.heads import Head, add_head, find_head
from fedray.models.norms import replace_norms
from fedray.models.soundness import require_trainable_kind
from fedray.usercode.importing import as_user_error
from fedray.util.files import in_home


def model_maker(
    section: ModelConfig,
    custom: Callable[..., nn.Module] | nn.Module | None,
    example: Any,
    classes: int,
    head: str,
    seed: int,
) -> ModelMaker:
    """Returns the function that makes the model of a run, without calling it.

    The initial weights are drawn from ``seed`` (``run.seed``). ``section`` is the section ``model`` of the
    configuration. ``custom`` is the class or module that the user passed from Python, or None if ``model.name`` names
    the model. ``example`` are the inputs of some samples, ``[b, ...]``, ``classes`` is the number of classes, and
    ``head`` is the name of the model's head (its last layers). Raises :class:`UserError` for an unknown model, head or
    option.
    """
    if custom is None and section.name.startswith(TRANSFORMERS):
        folder = in_home(section.name.removeprefix(TRANSFORMERS))
        if folder.is_dir():
            # other processes may have other working directories
            section = section.model_copy(update={"name": f"{TRANSFORMERS}{folder.absolute()}"})
    options = list(section.model_extra or {})
    origin: Callable[..., nn.Module] | Portable
    if isinstance(custom, nn.Module):
        if options:
            raise UserError(f"model.{options[0]}: the model was given as an object, which takes no options")
        require_trainable_kind(custom, "model=...")
        require_copyable(custom)
        name, origin = type(custom).__name__, Portable(custom)
    else:
        origin = find_model(section.name) if custom is None else custom
        name = section.name if custom is None else getattr(custom, "__name__", "model")
        known = options_of(origin)
        unknown = [key for key in options if key not in known]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise UserError(f"{name}: " + unknown_key(unknown[0], known, "model."))
    return ModelMaker(name, origin, section, example, classes, find_head(head), head, seed)


@dataclass(frozen=True)
class ModelMaker:
    """A function that makes the model of a run with its initial weights, which are the same in every process.

    The weights depend only on ``seed``. If the function is called with a client's number, it draws other weights, which
    also depend on the client. ``origin`` is a class or function that makes a module, or a module that is copied.
    ``section`` is the section ``model`` of the configuration, and ``example [b, ...]`` are the inputs of some samples.
    ``head`` is the class of the head that replaces the model's last layer, or None. ``channels_last`` sets the layout
    of 2-d convolutions; None leaves the layout as it was made.
    """

    name: str
    origin: Callable[..., nn.Module] | Portable
    section: ModelConfig
    example: Any
    classes: int
    head: type[Head] | None
    head_name: str
    seed: int
    channels_last: bool | None = None

    def __call__(self, client: int | None = None) -> nn.Module:
        section = self.section
        origin = self.origin
        module = self._copied(origin, client) if isinstance(origin, Portable) else self._built(origin, client)
        self._initialise_lazy_layers(module, client)
        if section.norm is not None:
            replace_norms(module, section.norm, section.norm_groups, self.name)
        if self.head is not None:
            self._add_head(module, self.head, client)
        if section.init == "zeros":
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
        if section.weights is not None and client is None:
            load_weights(module, Path(section.weights), self.classes)
        if section.peft.kind != "none" or section.trainable is not None:
            with self._drawing(client, 2):
                adapt(module, section.peft, section.trainable)
        if self.channels_last is not None:
            convert(module, self.channels_last)
        return module

    @property
    def code(self) -> Sequence[Any]:
        """The classes and functions whose code makes the model. If they are the user's, Ray's processes must be sent
        their code."""
        origin = self.origin
        made_by = {type(layer) for layer in origin.module.modules()} if isinstance(origin, Portable) else {origin}
        return [*made_by, *([] if self.head is None else [self.head])]

    def notes(self) -> list[str]:
        """Returns warnings for the user about ``model.weights``, the file from which initial weights are loaded. The
        list is empty if there is no such file.

        The warnings name tensors of the model that the file lacks, and tensors of the file that are not used.
        """
        path, notes = self.section.weights, []
        if path is None:
            return []
        without = replace(self, section=self.section.model_copy(update={"weights": None}))
        found = load_weights(without(), Path(path), self.classes)
        if found.kept:
            notes.append(
                f"warning: model.weights: {', '.join(found.kept)} begin as model.init says, because {path} has none "
                f"for {self.classes} classes or for this head"
            )
        if found.unused:
            notes.append(
                f"warning: model.weights: {len(found.unused)} tensors of {path} are not used, because model.norm or "
                f"model.head replaced their layers; the first is {found.unused[0]}"
            )
        return notes

    def _built(self, model: Callable[..., nn.Module], client: int | None) -> nn.Module:
        shape = map_leaves(lambda x: tuple(x.shape[1:]), self.example)
        with self._drawing(client):
            return build(model, self.name, shape, self.classes, self.section.model_extra or {})

    def _copied(self, original: Portable, client: int | None) -> nn.Module:
        """Returns a copy of the user's module.

        If ``client`` is not None, the layers that are trained and have a method ``reset_parameters`` draw new weights.
        """
        with as_user_error("model=... can't be copied"):
            module = original.copy()
        if client is not None:
            with self._drawing(client):
                for layer in module.modules():
                    reset = getattr(layer, "reset_parameters", None)
                    direct = list(layer.parameters(recurse=False))
                    if callable(reset) and (not direct or any(p.requires_grad for p in direct)):
                        reset()
        return module

    def _initialise_lazy_layers(self, module: nn.Module, client: int | None) -> None:
        """Gives lazy layers (such as ``nn.LazyLinear``) their weights, by a forward pass of the example inputs."""
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            args, named = arguments(self.example)
            module.eval()
            lazy = as_user_error(f"model {self.name} has lazy layers, and can't take inputs of the data")
            with lazy, self._drawing(client, 1), torch.no_grad():
                module(*args, **named)
            module.train()

    def _add_head(self, module: nn.Module, head: type[Head], client: int | None) -> None:
        name, width = self.head_name, self.section.proj_dim
        draws = seeds.every_rng(self.seed, Purpose.HEAD_INIT, *(() if client is None else (client + 1,)))
        with draws, as_user_error(f"model.head={name}, model.proj_dim={width}: the head can't be made"):
            add_head(module, head, name, width, self.name, self.example)

    def _drawing(self, client: int | None, *further: int) -> AbstractContextManager[None]:
        where = (Purpose.INIT,) if client is None else (Purpose.CLIENT_INIT, client)
        return seeds.every_rng(self.seed, *where, *further)
