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
    """The factors ``[C]`` by which the losses of the C clients of a stack are multiplied before their backward passes.
    The gradients are divided by them afterwards.

    Without scaling, small gradients would become 0 in half precision (Micikevicius et al., ICLR 2018). Whenever a
    gradient overflows, the factor is halved and the backward pass is repeated, so no local step is skipped. Factors are
    powers of 2, which cause no rounding. They are reset at the start of each local training, so no result depends on
    which clients a process trained before.
    """

    def __init__(self, clients: int, device: torch.device | str = "cpu") -> None:
        self.factors = torch.full((clients,), FIRST, device=device)

    def lowered(self, gradients: Tensor, clients: slice = slice(None)) -> bool:
        """Halves the factor of each of the ``clients`` whose row of ``gradients [clients, width]`` is not finite, and
        returns whether there was one. A factor of 1 is not halved, because then the loss or the forward pass itself
        overflows."""
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
    """Writes the gradient of ``objective`` with respect to the parameters ``tensors`` into ``out [width]``. ``client``
    is the row of the client in its stack. Large linear layers write their part through ``direct``."""
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
