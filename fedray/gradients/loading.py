"""Loads models, which are rows of numbers, into the user's module, and takes back what its passes have changed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from fedray.core.places import Places, frozen, same_bits, with_parameters_of
from fedray.core.vectors import Layout, Model
from fedray.errors import UserError

COPIED = 200_000
"""The largest number of parameters for which a model is copied into the module when it is loaded. For a larger model,
the module's parameters become views into the model's row, which takes microseconds for each tensor."""


class Loading:
    """The user's module, whose parameters are views into a row of numbers, so that loading a model takes one copy, or
    none.

    ``changing`` are the names of the buffers that forward passes change; None means that all may be changed. ``writes``
    says whether a forward pass may write into parameters, as ``nn.Embedding(max_norm=...)`` does. What a pass changes
    stays in the client's model in training; in evaluation it is undone before the next pass. ``dtype`` is the type of
    the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        changing: Collection[str] | None,
        writes: bool,
        dtype: torch.dtype,
    ) -> None:
        self.module = with_parameters_of(module.to(device=device), dtype)
        self.layout = Layout(self.module, changing)
        self.device = torch.device(device)
        self.writes = writes
        self.dtype = dtype
        self.places = Places(self.module)
        self._trainable = [self.places.parameters[slot.name] for slot in self.layout.slots]
        tensors = self.places.tensors
        self._buffers = {slot.name: tensors[slot.name] for block in self.layout.blocks for slot in block.slots}
        self._pristine = {name: b.clone() for name, b in self.layout.constants.items()} if writes else {}
        self._is_copied = self.layout.width <= COPIED
        self._bind(self.loaded().parameters)

    def loaded(self) -> Model:
        """Returns a copy of the model that is loaded in the module, as a single :class:`Model` on the network's device.
        Before anything is loaded, it is the module's initial model."""
        return self.layout.model(self.layout.pack(self.module, self.dtype).row.to(self.device))

    def load(self, model: Model, owned: bool = False) -> None:
        """Loads the parameters and buffers of a single ``model`` into the module, for the forward passes that follow.
        Passes that write into parameters may change ``model`` itself only if it is ``owned``."""
        if self._is_copied:
            if self.writes and self._are_elsewhere():
                self._bind(self._bound)
            self._bound.copy_(model.parameters)
        elif self.writes and not owned:
            self._bind(model.parameters.clone())
        else:
            self._bind(model.parameters.contiguous())
        if self._buffers:
            if self.writes and not self.places.are_held(self._buffers):
                for name, tensor in self._buffers.items():
                    self.places.put(name, tensor)
            for name, value in self.layout.split_buffers(model.buffers).items():
                self._buffers[name].copy_(value)

    def unload(self) -> None:
        """Ends the use of the model that was loaded last, so that the memory of its row can be freed: the module's
        parameters are no longer views into it. It is called after a stack.

        Raises :class:`UserError` if user-defined code has changed a buffer that it left unchanged when the model was
        tried before the first round.
        """
        for name, value in self._pristine.items():
            now = self.places.now(name)
            if not isinstance(now, Tensor) or not same_bits(now, value):
                raise UserError(
                    f"the forward pass of the model has changed its buffer {name}, but did not when it was tried "
                    "before the first round: let it write into the buffer in every pass (self.x.copy_(self.x)), "
                    "so that the buffer is known to change"
                )
        if not self._is_copied:
            self._bind(torch.zeros(1, device=self.device, dtype=self.dtype).expand(self.layout.width))

    def saved(self, model: Model) -> dict[str, Tensor]:
        """Returns the tensors of a single ``model`` as a dict by name, as they are saved in files: everything in the
        module's ``state_dict()``, and the buffers outside it that forward passes change. A tensor that several layers
        share is in the dict under each of its names."""
        places, layout = self.places, self.layout
        named = {**frozen(self.module), **layout.named(model)}
        named = {name: t for name, t in named.items() if name not in places.not_saved or name not in layout.constants}
        others = {name: named[first].clone() for name, first in places.aliases.items() if first in named}
        return named | others

    def _bind(self, parameters: Tensor) -> None:
        """Makes the module's trainable parameters views into the vector ``parameters [width]``, so that they have its
        values."""
        self._bound = parameters
        for slot, tensor in zip(self.layout.slots, self._trainable, strict=True):
            tensor.data = slot.view(parameters)
        self._addresses = [tensor.data_ptr() for tensor in self._trainable] if self.writes else []

    def _store(self, model: Model) -> None:
        """Copies what the forward pass may have changed in the module into ``model``: its buffers, and its parameters
        if it ``writes``."""
        if self._buffers:
            is_held = not self.writes or self.places.are_held(self._buffers)
            self.layout.write_buffers(model.buffers, self._buffers if is_held else self._present_buffers())
        if not self.writes:
            return
        if not self.places.are_held(self.places.parameters):
            self.places.require(self.places.parameters)
        if self._are_elsewhere():
            for slot, parameter in zip(self.layout.slots, self._trainable, strict=True):
                place = slot.view(self._bound)
                place.copy_(parameter.detach())
                parameter.data = place
        if self._is_copied:
            model.parameters.copy_(self._bound)

    def _are_elsewhere(self) -> bool:
        """Returns whether user-defined code has taken parameters out of the row of the loaded model, by
        ``parameter.data = ...``."""
        return [parameter.data_ptr() for parameter in self._trainable] != self._addresses

    def _present_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that forward passes change, as they currently are in the module, as a dict by name.
        Raises :class:`UserError` if a forward pass has changed the shape of one."""
        found = {name: self.places.now(name) for name in self._buffers}
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.shape != self._buffers[name].shape:
                now = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UserError(
                    f"the forward pass changes the shape of the model's buffer {name} from "
                    f"{list(self._buffers[name].shape)} to {now}: it must stay, as clients' buffers are averaged"
                )
        return {name: tensor.detach() for name, tensor in found.items()}
