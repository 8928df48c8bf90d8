"""Replaces the parameters and buffers of a module by other tensors, also where layers share them.

A layer may be used twice, and two layers may share a parameter. Such a tensor has several names and several *places*:
entries in the dicts of layers. fedray uses its first name, which is the one in ``named_parameters()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedray.errors import UserError

Place = tuple[dict[str, Any], str]
"""Where a layer keeps a tensor: the layer's dict of parameters or buffers, and the tensor's key in that dict."""


class Places:
    """Finds the parameters and buffers of ``module`` by name, and replaces them by other tensors, also where several
    layers share a tensor.

    A tensor that several layers share has several names. The first of these, which is the one in
    ``named_parameters()``, stands for the tensor. ``parameters`` and ``buffers`` map first names to tensors, and
    ``aliases`` maps every other name to the first name of its tensor. ``not_saved`` has the first names of buffers that
    ``state_dict()`` leaves out (``persistent=False``).
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.not_saved: set[str] = set()
        self._places: dict[str, list[Place]] = {}
        first: dict[int, str] = {}
        seen: set[tuple[int, str]] = set()
        layers = list(module.named_modules(remove_duplicate=False))
        # a parameter that is a buffer too is a parameter
        for kind, found in (("_parameters", self.parameters), ("_buffers", self.buffers)):
            for prefix, layer in layers:
                held: dict[str, Any] = getattr(layer, kind)
                for key, tensor in held.items():
                    if tensor is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    canonical = first.setdefault(id(tensor), name)
                    if canonical == name:
                        found[name] = tensor
                    else:
                        self.aliases[name] = canonical
                    if (id(held), key) not in seen:
                        seen.add((id(held), key))
                        self._places.setdefault(canonical, []).append((held, key))
                    if kind == "_buffers" and key in layer._non_persistent_buffers_set:
                        self.not_saved.add(canonical)

    @property
    def shared(self) -> set[str]:
        """The first names of the tensors that two layers share. A layer with two names shares nothing."""
        return {name for name, places in self._places.items() if len(places) > 1}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The module's parameters and buffers by name. A tensor that several layers share is in the dict once, under
        the first of its names."""
        return {**self.parameters, **self.buffers}

    def now(self, name: str) -> Any:
        """Returns the tensor that the module has now as its parameter or buffer ``name`` (its first name).

        This is not the tensor in :attr:`tensors`, which was found when this object was made, if the layer's attribute
        has been assigned to since, for example by a forward pass. It may even be None.
        """
        held, key = self._places[name][0]
        return held.get(key)

    def put(self, name: str, tensor: Tensor) -> None:
        """Replaces the parameter or buffer ``name`` of the module by ``tensor``, in every layer that uses it."""
        for held, key in self._places[name]:
            held[key] = tensor

    @contextlib.contextmanager
    def holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """A context in which the module uses ``tensors`` (by name) in place of its parameters and buffers of the same
        names, for a forward pass with another model's numbers. Afterwards the module has its former tensors again.

        If a forward pass assigns a new tensor to a buffer, as ``self.count = self.count + 1`` does, the dict
        ``tensors`` holds the new tensor afterwards. If it assigns a new tensor to a parameter, :class:`UserError` is
        raised.
        """
        before = [(place, place[0][place[1]]) for name in tensors for place in self._places[name]]
        try:
            for name, tensor in tensors.items():
                self.put(name, tensor)
            yield
            if not self.are_held(tensors):
                trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
                self.require(trained)
                tensors.update({name: self.now(name) for name in tensors if name not in trained})
        finally:
            for (held, key), tensor in before:
                held[key] = tensor

    def are_held(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns whether the module still uses ``tensors`` (by name), that is, whether no forward pass has put other
        tensors in their places."""
        return all(held.get(key) is tensor for name, tensor in tensors.items() for held, key in self._places[name])

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises :class:`UserError` if a forward pass has put another tensor in the place of a parameter, because the
        parameter would then not be trained. ``tensors`` maps names to the tensors that the module had before the pass.
        Only the parameters among them are checked."""
        for name in self.parameters:
            if name in tensors and any(held.get(key) is not tensors[name] for held, key in self._places[name]):
                raise UserError(
                    f"the forward pass of the model puts another tensor in the place of its parameter {name}, which "
                    "would not be trained: let it write into the parameter (self.weight.data.copy_(...)), or compute "
                    "with a tensor of another name"
                )

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copies ``values`` into the module's tensors of the same names. A tensor that several layers share has several
        names; any of them may be used."""
        tensors = self.tensors
        with torch.no_grad():
            for name, value in values.items():
                tensor = tensors[self.aliases.get(name, name)]
                if 0 in tensor.stride():
                    # an expanded tensor can't be written into
                    tensor.data = value.to(tensor)
                else:
                    tensor.copy_(value)


def for_user(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Loads ``tensors``, by name, into ``module``, and returns it as a user expects a module: in evaluation mode, and
    laid out in memory as torch makes modules, whatever layout is fastest in training. (With another layout, functions
    such as ``parameters_to_vector`` fail.) Parameters are float32, as they were trained."""
    places = Places(with_parameters_of(module, torch.float32))
    places.load(tensors)
    for tensor in places.tensors.values():
        if tensor.dim() in (4, 5):
            tensor.data = tensor.data.contiguous()
    module.eval()
    return module


def shared_memory(module: nn.Module) -> tuple[str, str] | None:
    """Returns the names of two parameters or buffers of ``module`` that are different tensors in the same memory, or
    None if there are none.

    fedray can't train a module with such tensors: they would be trained separately, although a change of one of them
    changes the other.
    """
    pieces: list[tuple[int, int, int, str]] = []
    for name, tensor in Places(module).tensors.items():
        if not is_lazy(tensor) and tensor.numel() and tensor.layout is torch.strided and tensor.device.type != "meta":
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            pieces.append((tensor.untyped_storage().data_ptr(), start, start + extent * tensor.element_size(), name))
    pieces.sort()
    for (storage, _, stop, one), (other_storage, start, _, other) in pairwise(pieces):
        if storage == other_storage and start < stop:
            return one, other
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same shape, type and values. Unlike in ``torch.equal``, a NaN equals another
    NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def with_parameters_of(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Converts the floating-point parameters of ``module`` to ``dtype``, in place, and returns the module.

    Floating-point buffers of a layer are converted too if they had the same type as the layer's parameters. Complex
    parameters are not converted.
    """
    for layer in module.modules():
        parameters = [p for p in layer._parameters.values() if p is not None and p.is_floating_point()]
        former = {parameter.dtype for parameter in parameters} - {dtype}
        for tensor in (*parameters, *(b for b in layer._buffers.values() if b is not None and b.dtype in former)):
            tensor.data = tensor.data.to(dtype)
    return module


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of ``module`` that are not trained (``requires_grad`` is false) as a dict by name."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of ``module`` as a dict by name. A tensor that several layers share is in it
    once, under the first of its names."""
    return Places(module).tensors
