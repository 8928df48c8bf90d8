"""Loss scaling for gradients in half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fedray.core.vectors import Layout
from fedray.gradients.direct_linear import DirectLinear

FIRST = 2.0**16
"""The factor with which local training begins, as in torch.amp.GradScaler."""


class LossScale:
    """The loss scaling of training in fp16: without it, small gradients would become 0 in half precision (Micikevicius
    et al., ICLR 2018). The losses of C clients are multiplied by ``factors [C]`` before the backward passes, and the
    gradients are divided by them afterwards.

    Whenever a gradient overflows, the client's factor is halved and the backward pass is repeated, so no local step is
    skipped. Factors are powers of 2, which cause no rounding. Each local training begins with new factors, so no result
    depends on which clients a process trained before.
    """

    def __init__(self, clients: int, device: torch.device | str = "cpu") -> None:
        self.factors = torch.full((clients,), FIRST, device=device)

    def lowered(self, gradients: Tensor, clients: slice = slice(None)) -> bool:
        """Checks gradients for overflow, and halves the factor of each client whose gradient is not finite. Returns
        whether any factor was halved; the caller must then repeat the backward pass. A factor of 1 is not halved: there
        the loss or the forward pass itself overflows.

        ``gradients [rows, width]`` are the gradients of the clients in the slice ``clients`` of all C clients.
        """
        factors = self.factors[clients]
        lower = ~gradients.isfinite().all(dim=1) & (factors > 1)
        self.factors[clients] = torch.where(lower, factors / 2, factors)
        return bool(lower.any())


def write_gradient(
    objective: Tensor,
    tensors: Sequence[Tensor],
    layout: Layout,
    out: Tensor,
    scale: LossScale | None,
    client: int,
    direct: DirectLinear | None = None,
) -> None:
    """Computes the gradient of one client's loss with respect to the parameters, and writes it into one vector.

    Args:
        objective: The client's loss, a number with a graph of autograd.
        tensors: The parameters, in the order of ``layout``.
        layout: The place of each parameter in the vector.
        out: The vector ``[width]``, with one number for each entry of the parameters, and padding.
        scale: If not None, the loss is multiplied by the client's factor before the backward pass, and ``out`` divided
            by it again. This is repeated with a smaller factor while the gradient overflows.
        client: The client's row in its stack.
        direct: If not None, and without a ``scale``, large linear layers write their gradients into ``out`` themselves.
    """
    if scale is None:
        with contextlib.nullcontext() if direct is None else direct.writing(out):
            pieces = torch.autograd.grad(objective, tensors, allow_unused=True)
        layout.gather(pieces, out, () if direct is None else direct.written)
        return
    again = True
    while again:
        factor = scale.factors[client]
        layout.gather(torch.autograd.grad(objective * factor, tensors, allow_unused=True, retain_graph=True), out)
        out /= factor
        again = scale.lowered(out[None], slice(client, client + 1))
