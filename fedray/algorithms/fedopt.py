"""FedAdam, FedYogi and FedAdagrad: adaptive optimizers at the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan: Adaptive Federated
Optimization. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState


class FedAdagrad(FedAvg):
    """FedAvg whose server applies Adagrad to the clients' mean update Delta, as if this were a gradient:
    Delta = sum_i p_i (y_i - x^r); m <- beta_1 m + (1 - beta_1) Delta; v <- v + Delta^2;
    x^{r+1} = x^r + eta_g m / (sqrt(v) + tau), from m = 0 and v = tau^2.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_i the final model of client i, p_i its aggregation
    weight, and eta_g the server's learning rate.
    """

    allows_private = True
    asynchronous = True
    allows_aggregation = True
    paper = "Reddi et al., ICLR 2021"

    class Hyper(base.Hyper):
        beta1: float = base.parameter(0.0, "decay of the first moment (beta_1)", ge=0, lt=1)
        tau: float = base.parameter(1e-3, "degree of adaptivity (tau)", gt=0)

    def init_server(self, server: ServerState) -> None:
        server["m"] = server["x"].zeros()
        server["v"] = torch.full_like(server["m"], self.hyper.tau**2)

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        yield from super().advice(momentum, cohort, clients, server_lr)
        if server_lr >= 1:
            yield (
                f"train.server_lr={server_lr}: an adaptive server moves every parameter by about that much in a round, "
                "however small the clients' updates are, which mostly destroys the model; try train.server_lr=0.01"
            )

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Returns the server's new second moment v, given the old ``v`` and the clients' mean update of this round,
        ``delta``, each ``[width]`` with a number for each parameter.

        This rule is the only one in which FedAdagrad, FedAdam and FedYogi differ, so each of the three classes defines
        it.
        """
        return v + delta.square()

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        x = server["x"].with_buffers_of(sums["y"])
        delta = sums["y"] - x
        server["m"] = self.hyper.beta1 * server["m"] + (1 - self.hyper.beta1) * delta
        server["v"] = self.second_moment(server["v"], delta)
        server["x"] = x + server.server_lr * server["m"] / (server["v"].sqrt() + self.hyper.tau)


class FedAdam(FedAdagrad):
    """FedAvg whose server applies Adam to the clients' mean update Delta. Only the formula for v is not FedAdagrad's:
    v <- beta_2 v + (1 - beta_2) Delta^2.

    The formulas of FedAdagrad that stay are Delta = sum_i p_i (y_i - x^r), m <- beta_1 m + (1 - beta_1) Delta and
    x^{r+1} = x^r + eta_g m / (sqrt(v) + tau). Here x^r is the server's model, y_i the final model of client i, p_i its
    aggregation weight, and eta_g the server's learning rate.
    """

    allows_private = True
    asynchronous = True
    allows_aggregation = True
    paper = "Reddi et al., ICLR 2021"

    class Hyper(FedAdagrad.Hyper):
        beta1: float = base.parameter(0.9, "decay of the first moment (beta_1)", ge=0, lt=1)
        beta2: float = base.parameter(0.99, "decay of the second moment (beta_2)", ge=0, lt=1)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        beta2: float = self.hyper.beta2
        return beta2 * v + (1 - beta2) * delta.square()


class FedYogi(FedAdam):
    """FedAvg whose server applies Yogi to the clients' mean update Delta. Only the formula for v is not FedAdagrad's:
    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2).

    The formulas of FedAdagrad that stay are Delta = sum_i p_i (y_i - x^r), m <- beta_1 m + (1 - beta_1) Delta and
    x^{r+1} = x^r + eta_g m / (sqrt(v) + tau). Here x^r is the server's model, y_i the final model of client i, p_i its
    aggregation weight, and eta_g the server's learning rate.
    """

    paper = "Reddi et al., ICLR 2021"

    allows_private = True
    asynchronous = True
    allows_aggregation = True

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        beta2: float = self.hyper.beta2
        square = delta.square()
        return v - (1 - beta2) * square * torch.sign(v - square)
