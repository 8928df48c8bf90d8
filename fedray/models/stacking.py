"""Finds out whether clients can be trained in one batched stack, by training a small stack in both ways."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.errors import first_sentence
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.passes import ELSEWHERE
from fedray.gradients.stack import StackNetwork
from fedray.models.behaviour import behaviour_of

CLIENTS = 4
"""The number of clients in the trial. One has a full batch; the others have smaller ones that are padded.

Their sizes are no multiples of common numbers, because some models (ghost batch normalisation) mix only the samples
within groups of, say, 16.
"""

LARGEST = 256
"""The largest batch that is tried, in samples."""

TOLERANCE = 0.05
"""The largest difference between two gradients, relative to their length, that counts as rounding.

The trial is in float64, where rounding errors are about 1e-12. In modules that convert to float32 themselves, rounding
may move a ReLU's input across zero, which changes gradients by 1e-3. If a model depends on the number of samples,
padding changes its gradients by 1e-1; if it depends on the other samples themselves, no tolerance is needed
(:attr:`_Trial.mixes`).
"""


def samples_of_trial(batch_size: int) -> int:
    """Returns how many samples :func:`stacking_obstacle` needs to find out whether clients can be trained in stacks, if
    mini-batches have ``batch_size`` samples.

    The trial uses mini-batches of that size, but of at most :data:`LARGEST` samples. Smaller ones would not be enough,
    because some models mix samples only in large batches.
    """
    return CLIENTS * min(batch_size, LARGEST)


def stacking_obstacle(module: nn.Module, task: Task, x: Any, y: Tensor, device: str = "cpu") -> str | None:
    """Finds out whether clients can be trained in stacks, that is, several clients at once as one batched computation.
    Returns None if they can, and otherwise the reason why they can't, as text for messages.

    A stack pads the batches of smaller clients with samples whose losses are left out. That is correct as long as no
    sample's logits depend on the other samples of its batch. So the gradients of a padded stack are compared with the
    gradients of its clients one by one, and with those of a stack that has other samples as padding. The trial takes a
    second, because it imports torch's compiler.

    Args:
        module: The model.
        task: The task, whose loss is differentiated.
        x: Inputs ``[n, ...]`` of samples of the data, where n is the result of :func:`samples_of_trial`. They are real
            samples because not every model takes random numbers.
        y: Their targets ``[n, ...]``.
        device: ``cpu`` or ``cuda``. Layers are computed as stacks compute them there, even if this machine has no such
            device.
    """
    if hooked := hooked_parameter(module):
        return hooked
    found = behaviour_of(module, map_leaves(lambda each: each[:2], x))
    if found.changing:
        return "its forward pass changes buffers, such as BatchNorm's running statistics"
    if found.written:
        return f"its forward pass writes into its parameter {found.written[0]}"
    if found.elsewhere:
        return f"its forward pass takes its parameter {found.elsewhere} from {ELSEWHERE}"
    clients, size = CLIENTS, len(y) // CLIENTS
    real = [size, *(max(1, each) for each in (size - 1, size * 2 // 3 - 1, size // 2 - 3))]
    inputs, targets = (map_leaves(lambda each: each.view(clients, size, *each.shape[1:]), part) for part in (x, y))
    batch = Batch(inputs, targets, 0, real)
    try:
        trial = _trial(module, task, batch, torch.float32, device)
    except Exception as error:
        return f"torch.func.vmap fails, {type(error).__name__}: {first_sentence(error)}"
    # some modules convert to float32 themselves
    with contextlib.suppress(Exception):
        trial = _trial(module, task, batch, torch.float64, device)
    if not torch.isfinite(trial.alone).all():
        return "its gradients near the initial weights are not finite, so that a stack can't be compared with them"
    if not trial.mixes and trial.off <= TOLERANCE:
        return None
    return (
        "its samples depend on the others of their batch, so that the padding of smaller clients' batches changes "
        f"gradients by up to {100 * trial.off:.3g} %"
    )


class _Trial(NamedTuple):
    """The gradients ``[C, width]`` of C clients, computed in three ways: ``together`` in a stack (all clients at once),
    ``otherwise`` in a stack that is padded with other samples, and ``alone`` client by client."""

    together: Tensor
    otherwise: Tensor
    alone: Tensor

    @property
    def off(self) -> float:
        """The largest error of a client's gradient in a stack: the norm of its difference from the gradient that is
        computed for this client alone, divided by the norm of the latter gradient."""
        differences = [(each - self.alone).norm(dim=1) for each in (self.together, self.otherwise)]
        return float((torch.maximum(*differences) / self.alone.norm(dim=1).clamp(min=1e-12)).max())

    @property
    def mixes(self) -> bool:
        """Whether gradients in a stack differ in any bit if other samples serve as padding. That is so only if samples
        of a batch influence each other. Otherwise the operations are the same and the padding adds only zeros, so that
        even rounding errors are equal."""
        return not torch.equal(self.together, self.otherwise)


def _trial(module: nn.Module, task: Task, batch: Batch, dtype: torch.dtype, device: str) -> _Trial:
    """Returns the gradients of the clients of ``batch`` in a stack, in a stack with other padding, and one by one,
    computed in ``dtype``. Convolutions are computed as stacks compute them on ``device``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    batch = Batch(map_leaves(cast, batch.x), cast(batch.y), batch.step, batch.counts)
    options: dict[str, Any] = {"changing": (), "dtype": dtype, "overwrites": True}
    stack = StackNetwork(copied(module).to(dtype), task, windows=device == "cuda", **options)
    loop = LoopNetwork(copied(module).to(dtype), task, **options)
    at = _models_near_the_initial_one(stack, len(batch.y))
    # the generator is restored even if a pass fails
    with torch_rng(0, Purpose.DROPOUT):
        together = stack.gradients(at, batch).value
        stack.forward(at, batch.x)
        return _Trial(together, stack.gradients(at, _padded_otherwise(batch)).value, loop.gradients(at, batch).value)


def _padded_otherwise(batch: Batch) -> Batch:
    """Returns ``batch`` with the same real samples, but other samples of ``batch`` as padding."""
    assert batch.counts is not None
    real = torch.arange(batch.y.shape[1]) < torch.tensor(batch.counts)[:, None]

    def exchange(tensor: Tensor) -> Tensor:
        chosen = real.view(*real.shape, *(1,) * (tensor.dim() - 2))
        return torch.where(chosen, tensor, tensor.roll(1, 0).flip(1))

    return Batch(map_leaves(exchange, batch.x), exchange(batch.y), batch.step, batch.counts)


def hooked_parameter(module: nn.Module) -> str | None:
    """Returns a clause for messages that names a parameter of ``module`` with a hook, such as ``its parameter fc.weight
    has a hook``, or None if there is none. Such a module can be neither trained in stacks nor compiled: both compute
    with parts of one long vector in place of the module's parameters, so the parameters' hooks would not be called."""
    hooked = (name for name, parameter in module.named_parameters() if parameter._backward_hooks)
    return next((f"its parameter {name} has a hook" for name in hooked), None)


def _models_near_the_initial_one(network: Network, clients: int) -> Model:
    """Returns models of ``clients`` clients that differ a little from the initial model of ``network`` and from each
    other. They have no weights of zero, because a layer of zeros would hide mistakes in the layers before it."""
    noise = stream(0, Purpose.INIT).standard_normal((2, clients, network.layout.width), dtype=np.float32)
    scale, shift = torch.from_numpy(noise).to(network.dtype)
    return network.layout.model(network.loaded().row * (1 + 0.1 * scale) + 0.02 * shift)
