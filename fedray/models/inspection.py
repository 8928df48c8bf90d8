"""Finds out by trial passes what the engine must know about a model before training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedray.core.copying import require_no_views
from fedray.core.linear import is_adapter
from fedray.core.norms import TRACKING_NORMS, unit_vectors
from fedray.core.numbers import SINGLE
from fedray.core.places import Places, with_parameters_of
from fedray.core.private import layers_with_parameters, private_names
from fedray.core.vectors import Layout
from fedray.errors import UserError
from fedray.gradients.known_code import global_hooks
from fedray.gradients.passes import predicting_head
from fedray.models.adapters import DRAWN
from fedray.models.behaviour import Behaviour, behaviour_of, first_of, without_traces
from fedray.models.flops import count_forward_pass, forward_flops
from fedray.usercode.importing import as_user_error

TYPES = {
    *SINGLE, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float64, torch.complex64,
}  # fmt: skip
"""The types that a model's buffers may have."""


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know about a model before training.

    * ``parameters``: the number of trainable parameters.
    * ``buffers``: the number of entries in floating-point buffers that forward passes change. The others do not travel.
    * ``flops``: the FLOPs of one sample's forward pass in training mode, without the predictor (a second network that
      some heads have).
    * ``prediction_flops``: the FLOPs of the predictor, 0 if there is none.
    * ``behaviour``: which tensors forward passes change, and from which generators they draw random numbers
      (:class:`~fedray.models.behaviour.Behaviour`).
    * ``draws``: whether the forward pass draws random numbers at all, as dropout does.
    * ``late_buffers``: the names of the buffers that the module makes in its first forward pass, and not in its
      constructor.
    * ``uncounted``: the layers, as ``name (Class)``, whose FLOPs could not be counted.
    * ``warnings``: lines for the user about the model.
    * ``features``, ``outputs``: how many numbers go into and out of the Linear layer that is called last, 0 if there is
      none.
    * ``last_called``: the name of the layer with parameters that is called last; None if the layer that was registered
      last is not called, as where a forward pass uses its weights directly.
    * ``private_parameters``, ``private_buffers``: how many of the parameters and buffers are private, and never sent.
    """

    parameters: int
    buffers: int
    flops: float
    behaviour: Behaviour = field(default_factory=Behaviour)
    prediction_flops: float = 0.0
    uncounted: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    late_buffers: tuple[str, ...] = ()
    features: int = 0
    outputs: int = 0
    last_called: str | None = None
    private_parameters: int = 0
    private_buffers: int = 0

    @property
    def has_private_layers(self) -> bool:
        """Whether a part of the model stays at each client, so that the global model has its initial values there."""
        return bool(self.private_parameters or self.private_buffers)

    @property
    def draws(self) -> bool:
        return bool(self.behaviour.draws)

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the model: ``warnings``, and one about layers whose FLOPs could not be counted."""
        if not self.uncounted:
            return list(self.warnings)
        return [
            *self.warnings,
            f"warning: FLOPs of the model's {first_of(self.uncounted)} are not counted: costs and "
            "engine.vectorize=auto take them for zero",
        ]


def with_private(facts: ModelFacts, module: nn.Module, patterns: Sequence[str]) -> tuple[ModelFacts, list[str]]:
    """Returns the facts about a model whose layers ``patterns`` are private, and lines for the user about them. Raises
    :class:`UserError` if the model has no such layers."""
    layout = Layout(module, facts.behaviour.changing)
    names = private_names(module, layout, patterns)
    parameters = sum(slot.size for slot in layout.slots if slot.name in names)
    buffers = sum(b.numel() for name, b in module.named_buffers() if name in names and b.is_floating_point())
    line = (
        f"private layers: {parameters:,} of {facts.parameters:,} parameters stay at each client"
        if names
        else f"warning: private layers: the model has none that {', '.join(patterns)} stands for, so nothing is private"
    )
    return replace(facts, private_parameters=parameters, private_buffers=buffers), [line]


def inspect_model(module: nn.Module, example: Any, name: str) -> ModelFacts:
    """Finds out what the engine must know about ``module`` before training: numbers of parameters, FLOPs, and what its
    forward passes change or draw. For this it runs the module on the inputs ``example [b, ...]``, where b is at least
    2, because some normalisation layers need two samples.

    The parameters are converted to float32; apart from that the module's tensors are left as they were. ``name`` is the
    model's name in messages. Raises :class:`UserError` if the model has nothing to train, can't be trained, or fails.
    """
    prepare(module, name)
    with without_traces(module):
        with as_user_error(f"model {name} failed in training mode"):
            module.train()
            with _calls(module) as called:
                _, count = count_forward_pass(module, example)
        head = predicting_head(module)
        predicted = 0.0 if head is None else forward_flops(head.predictor, torch.zeros(2, head.classifier.in_features))
    behaviour, tensors = behaviour_of(module, example, name), Places(module).tensors
    linear = [layer for layer in called.values() if isinstance(layer, nn.Linear)]
    registered = [name for name, _ in layers_with_parameters(module) if not is_adapter(name)][-1:]
    return ModelFacts(
        parameters=Layout(module).parameters,
        buffers=sum(b.numel() for n, b in tensors.items() if n in behaviour.changing and b.is_floating_point()),
        flops=count.flops,
        behaviour=behaviour,
        prediction_flops=predicted,
        uncounted=count.uncounted,
        warnings=tuple(_warnings(module, name, behaviour)),
        features=linear[-1].in_features if linear else 0,
        outputs=linear[-1].out_features if linear else 0,
        last_called=[*called][-1] if called.keys() & {*registered} else None,
    )


@contextlib.contextmanager
def _calls(module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """A context that notes by their names which layers of ``module`` with parameters of their own are called, in the
    order of their last calls. The narrow ones that the library peft has put beside another layer are left out."""
    called: dict[str, nn.Module] = {}

    def note(name: str, layer: nn.Module, inputs: Any) -> None:
        called.pop(name, None)
        called[name] = owners[name]

    layers = [(name, layer) for name, layer in layers_with_parameters(module) if not is_adapter(name)]
    owners = {name: module.get_submodule(name) for name, _ in layers}
    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def prepare(module: nn.Module, name: str) -> list[str]:
    """Prepares ``module`` for training: checks that fedray can handle its parameters and buffers, and converts its
    parameters to float32, in place. Returns a list with a warning for the user if some had other types, and otherwise
    an empty list. ``name`` is the model's name in messages.

    Raises :class:`UserError` if there is nothing to train, or if a parameter or buffer is of a kind that fedray can't
    handle, such as complex parameters or sparse buffers.
    """
    parameters = dict(module.named_parameters())
    if not any(parameter.requires_grad and parameter.numel() for parameter in parameters.values()):
        raise UserError(f"model {name} has no trainable parameters")
    for key, parameter in parameters.items():
        if parameter.is_complex():
            raise UserError(
                f"model {name}: its parameter {key} is of complex numbers; keep it as real ones "
                "(nn.Parameter(torch.view_as_real(...))), and use torch.view_as_complex(...) in the forward pass"
            )
        if parameter.layout is not torch.strided or type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__ if parameter.layout is torch.strided else str(parameter.layout)
            raise UserError(f"model {name}: its parameter {key} is not a plain dense tensor, but {kind}")
    for key, buffer in module.named_buffers():
        if buffer.dtype not in TYPES:
            raise UserError(f"model {name}: its buffer {key} is of {buffer.dtype}, which rows and files can't hold")
        if buffer.layout is not torch.strided:
            raise UserError(
                f"model {name}: its buffer {key} is sparse, which files of models can't hold: if it never changes, "
                f"keep it in an attribute that is no buffer (self.{key.rpartition('.')[2]} = ...)"
            )
    require_no_views(module, f"model {name}")
    _require_all_given(module, name)
    others = {str(p.dtype).removeprefix("torch.") for p in parameters.values() if p.dtype != torch.float32}
    with_parameters_of(module, torch.float32)
    if not others:
        return []
    return [
        f"warning: model {name} has parameters of {' and '.join(sorted(others))}, which are trained as float32 "
        "(train.precision sets how gradients are computed)"
    ]


def _require_all_given(module: nn.Module, name: str) -> None:
    """Checks that the module's own parameters() gives all parameters that fedray trains. A module may define it anew,
    so that optimizers train a part of the module only. Raises :class:`UserError` if not."""
    given = {id(parameter) for parameter in module.parameters()}
    left_out = [k for k, each in Places(module).parameters.items() if each.requires_grad and id(each) not in given]
    if left_out:
        raise UserError(
            f"model {name}: its parameters() leaves out {first_of(left_out)}, which fedray would train too: freeze "
            "what is not to be trained (parameter.requires_grad_(False)), or name what is in model.trainable"
        )


def _warnings(module: nn.Module, name: str, behaviour: Behaviour) -> Iterator[str]:
    """Yields warnings for the user about weights that were not read, hooks that other processes do not have, and
    buffers whose means over clients may be meaningless."""
    if drawn := getattr(module, DRAWN, ()):
        yield (
            f"warning: model {name}: {first_of(drawn)} were not among its weights and are drawn at random, as for a "
            "new task; if only a part is trained, name them in model.trainable"
        )
    if global_hooks():
        yield (
            "warning: this process has hooks that torch calls for every module; other processes, such as Ray's client "
            "actors, do not have them"
        )
    usual = unit_vectors(module)
    for prefix, layer in module.named_modules():
        if isinstance(layer, TRACKING_NORMS):
            usual |= {f"{prefix}.{key}".lstrip(".") for key, _ in layer.named_buffers(recurse=False)}
    tensors = Places(module).tensors.items()
    for kind, meaning in ((True, "the mean of the clients'"), (False, "that of the first client of the cohort")):
        odd = [
            key for key, buffer in tensors
            if key in behaviour.changing - usual and (buffer.is_floating_point() or buffer.is_complex()) == kind
        ]  # fmt: skip
        if odd:
            yield (
                f"warning: the forward pass of model {name} changes {first_of(odd)}: after a round the server has "
                f"{meaning}"
            )
