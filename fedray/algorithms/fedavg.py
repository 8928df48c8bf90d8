"""FedAvg: local SGD, averaged.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedray.algorithms.base import Algorithm, Carry, Result, mean
from fedray.algorithms.server import Server
from fedray.core.context import Context


class FedAvg(Algorithm):
    """y_j = y_{j-1} - eta_l g_i(y_{j-1}) from y_0 = x^r; x^{r+1} = x^r - eta_g (x^r - sum_i p_i y_i)."""

    paper = "McMahan et al., AISTATS 2017"

    def begin(self, ctx: Context) -> Carry:
        return {"y": ctx.start("x")}

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y = carry["y"]
        return {"y": ctx.descend(y, ctx.grad(y, batch))}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"y": mean(carry["y"])})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server.move(sums["y"])
