"""Finds out whether clients can be trained in one batched stack, by training a small stack in both ways."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.loop_network import LoopNetwork
from fedray.core.network import Network
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.stack_network import StackNetwork
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.errors import first_sentence
from fedray.models.behaviour import behaviour_of

CLIENTS = 4
"""The clients of the trial. One has a whole batch, the others have smaller ones that are padded.

Their sizes are no multiples of usual numbers, because some models (ghost batch normalisation) mix only the samples
within groups of, say, 16.
"""

KINDS: tuple[type[Network], ...] = (StackNetwork, LoopNetwork)

LARGEST = 256
"""The number of samples in the largest batch that is tried."""

TOLERANCE = 1e-3
"""The largest difference of two gradients, relative to their length, that counts as rounding.

Rounding of float32 may take a ReLU's input to the other side of zero, which changes gradients by 1e-4, and in deep
networks by more. So they are compared in float64, of which the same can hardly happen, and the answer is that of every
processor. Where samples depend on their neighbours, padding changes gradients by 1e-1.
"""


def samples_of_trial(batch_size: int) -> int:
    """Returns the number of samples that :func:`stacking_obstacle` needs to try batches of ``batch_size``.

    Larger batches than :data:`LARGEST` are not tried. Smaller ones would not be enough, because some models mix samples
    in large batches only.
    """
    return CLIENTS * min(batch_size, LARGEST)


def stacking_obstacle(module: nn.Module, task: Task, x: Any, y: Tensor) -> str | None:
    """Returns the reason why clients of ``module`` can't be trained in one batched stack, or None if they can.

    A stack pads the batches of smaller clients with samples whose losses are left out. That is right as long as no
    sample's logits depend on the other samples of its batch. So the gradients of a padded stack are compared with those
    of its clients one by one.

    ``x [n, ...]`` and ``y [n, ...]`` are samples of the data, because not every model takes random numbers as inputs; n
    is :func:`samples_of_trial`. It takes a second, because it imports torch's compiler.
    """
    if hooked := hooked_parameter(module):
        return hooked
    found = behaviour_of(module, map_leaves(lambda each: each[:2], x))
    if found.changing:
        return "its forward pass changes buffers, such as BatchNorm's running statistics"
    if found.written:
        return f"its forward pass writes into its parameter {found.written[0]}"
    clients, size = CLIENTS, len(y) // CLIENTS
    real = [size, *(max(1, each) for each in (size - 1, size * 2 // 3 - 1, size // 2 - 3))]
    inputs, targets = (map_leaves(lambda each: each.view(clients, size, *each.shape[1:]), part) for part in (x, y))
    batch = Batch(inputs, targets, 0, real)
    try:
        together, alone = _gradients(module, task, batch, torch.float32)
    except Exception as error:
        return f"torch.func.vmap fails, {type(error).__name__}: {first_sentence(error)}"
    # some modules convert to float32 themselves
    with contextlib.suppress(Exception):
        together, alone = _gradients(module, task, batch, torch.float64)
    if not torch.isfinite(alone).all():
        return "its gradients near the initial weights are not finite, so that a stack can't be compared with them"
    off = (together - alone).norm(dim=1) / alone.norm(dim=1).clamp(min=1e-12)
    if off.max() <= TOLERANCE:
        return None
    return (
        "its samples depend on the others of their batch, so that the padding of smaller clients' batches changes "
        f"gradients by up to {100 * float(off.max()):.3g} %"
    )


def _gradients(module: nn.Module, task: Task, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the gradients ``[C, width]`` of the clients of ``batch``, computed in ``dtype``: by a stack, and one by
    one."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    batch = Batch(map_leaves(cast, batch.x), cast(batch.y), batch.step, batch.counts)
    copies = (copied(module).to(dtype) for _ in range(2))
    stack, loop = (kind(each, task, changing=(), dtype=dtype) for kind, each in zip(KINDS, copies, strict=True))
    at = _models_near_the_initial_one(stack, len(batch.y))
    # the generator is restored even if a pass fails
    with torch_rng(0, Purpose.DROPOUT):
        together = stack.gradients(at, batch).value
        stack.forward(at, batch.x)
        return together, loop.gradients(at, batch).value


def hooked_parameter(module: nn.Module) -> str | None:
    """Says which parameter has a hook of its own, such as a mask for its gradient, if any has. A hook is not called
    where parameters are replaced by pieces of one vector."""
    hooked = (name for name, parameter in module.named_parameters() if parameter._backward_hooks)
    return next((f"its parameter {name} has a hook" for name in hooked), None)


def _models_near_the_initial_one(network: Network, clients: int) -> Model:
    """Returns the models of several clients on which a pass over all at once is compared with single passes.

    They are near the initial model and differ from each other. None of their weights is zero, because a layer of zeros
    would hide mistakes in the layers that feed it.
    """
    noise = stream(0, Purpose.INIT).standard_normal((2, clients, network.layout.width), dtype=np.float32)
    scale, shift = torch.from_numpy(noise).to(network.dtype)
    return network.layout.model(network.loaded().row * (1 + 0.1 * scale) + 0.02 * shift)
