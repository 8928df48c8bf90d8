"""Whether clients can be trained in one batched stack: found by training a small one both ways."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.network import LoopNetwork, Loss, Network, StackNetwork
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.vectors import Layout, Model
from fedray.errors import first_sentence

CLIENTS = 4
"""Clients of the trial: one has a whole batch, the others less; the rest is padding. Where it begins is no multiple of
anything, as some models (ghost batch normalisation) mix the samples of groups of 16, say."""

LARGEST = 256
"""Samples of the largest batch that is tried."""

TOLERANCE = 1e-3
"""How far, relative to its length, a gradient may be off. Rounding may take a ReLU's input to the other side of zero,
which changes gradients by 1e-4; samples that see their neighbours change them by 1e-1."""


def samples_of_trial(batch_size: int) -> int:
    """How many samples :func:`stacking_obstacle` takes to try batches of ``batch_size``, or of :data:`LARGEST`: some
    models see the neighbours of a sample in large batches only."""
    return CLIENTS * min(batch_size, LARGEST)


def stacking_obstacle(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> str | None:
    """Why clients of ``module`` can't be trained in one batched stack, or None if they can.

    A stack pads the batches of smaller clients with samples whose losses are left out. That is right as long as no
    sample's logits depend on the others of its batch, so the gradients of a padded stack must be those of its clients
    one by one. ``x [n, ...]`` and ``y [n]`` are samples of the data, as inputs may be whole numbers (tokens); n is
    :func:`samples_of_trial`. Takes a second: it imports torch's compiler.
    """
    if Layout(module).buffers:
        return "it has buffers, such as BatchNorm's running statistics"
    clients, size = CLIENTS, len(x) // CLIENTS
    real = [size, *(max(1, each) for each in (size - 1, size * 2 // 3 - 1, size // 2 - 3))]
    batch = Batch(x.view(clients, size, *x.shape[1:]), y.view(clients, size), 0, real)
    stack, loop = (kind(copy.deepcopy(module), loss) for kind in (StackNetwork, LoopNetwork))
    at = _models_near_the_initial_one(stack, clients)
    # what a failing pass has drawn leaves no trace
    with torch_rng(0, Purpose.DROPOUT):
        try:
            together = stack.gradients(at, batch).value
            stack.forward(at, batch.x)
            alone = loop.gradients(at, batch).value
        except Exception as error:
            return f"torch.func.vmap fails, {type(error).__name__}: {first_sentence(error)}"
    if not torch.isfinite(alone).all():
        return "its gradients near the initial weights are not finite, so that a stack can't be compared with them"
    off = (together - alone).norm(dim=1) / alone.norm(dim=1).clamp(min=1e-12)
    if off.max() <= TOLERANCE:
        return None
    return (
        "its samples depend on the others of their batch, so that the padding of smaller clients' batches changes "
        f"gradients by up to {100 * float(off.max()):.3g} %"
    )


def _models_near_the_initial_one(network: Network, clients: int) -> Model:
    """So many models near the initial one, each another, none with weights of zero, which would hide what
    lies before them."""
    noise = stream(0, Purpose.INIT).standard_normal((2, clients, network.layout.width), dtype=np.float32)
    scale, shift = torch.from_numpy(noise)
    return network.layout.model(network.initial.row * (1 + 0.1 * scale) + 0.02 * shift)
