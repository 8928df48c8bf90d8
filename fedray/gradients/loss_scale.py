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
    """The loss scaling of training in fp16: factors ``[C]`` by which the losses of C clients are multiplied before
    their backward passes. The gradients are divided by these factors afterwards.

    Without scaling, small gradients would become 0 in half precision (Micikevicius et al., ICLR 2018). Whenever a
    gradient overflows, the factor is halved and the backward pass is repeated, so no local step is skipped. Factors are
    powers of 2, which cause no rounding. They are reset at the start of each local training, so no result depends on
    which clients a process trained before.
    """

    def __init__(self, clients: int, device: torch.device | str = "cpu") -> None:
        self.factors = torch.full((clients,), FIRST, device=device)

    def lowered(self, gradients: Tensor, clients: slice = slice(None)) -> bool:
        """Checks ``gradients [rows, width]`` for overflow: halves the factor of each client whose row is not finite,
        except a factor of 1, with which the loss or the forward pass itself overflows. Returns whether any factor was
        halved; the backward pass must then be repeated. ``clients`` is the slice of the C clients to which the rows
        belong."""
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
    """Computes the gradient of one client's loss ``objective`` with respect to the parameters ``tensors``, and writes
    it into ``out [width]``, in the order of ``layout``.

    With a ``scale``, the loss is multiplied by the client's factor before the backward pass, and the gradient in
    ``out`` is divided by it again; this is repeated with a smaller factor while the gradient overflows. ``client`` is
    the client's row in its stack. With ``direct``, and without a ``scale``, large linear layers write their gradients
    into ``out`` themselves.
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
