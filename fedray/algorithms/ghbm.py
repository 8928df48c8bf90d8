"""GHBM, Local-GHBM and FedHBM: heavy-ball momentum over windows of rounds.

R. Zaccone, S. P. Karimireddy, C. Masone, M. Ciccone: Communication-Efficient Heterogeneous Federated Learning with
Generalized Heavy-Ball Momentum. TMLR 2025 (arXiv 2311.18578).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class GHBM(FedAvg):
    """FedAvg whose clients follow the mean update M^r of the last tau rounds as momentum:
    M^r = (x^{r-tau} - x^r) / tau (0 until r > tau);
    y_j = y_{j-1} - eta_l g_i(y_{j-1}) - (beta / J_i) M^r; x^{r+1} = xbar.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j of its J_i local steps, g_i
    its mini-batch gradient, and xbar the weighted mean of the final models. The rule for x^{r+1} is FedAvg's, shown for
    eta_g = 1. With ``warmup: init``, x^1 stands for the models before round 1, as in the paper's lemma. The default M^r
    = 0 is that of the authors' code.
    """

    allows_aggregation = True
    paper = "Zaccone et al., TMLR 2025"
    any_optimizer = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)

    class Hyper(base.Hyper):
        tau: int | None = base.parameter(None, "window in rounds (tau); 1 / participation, rounded", ge=1)
        beta: float = base.parameter(0.9, "momentum (beta)", ge=0, lt=1)
        warmup: Literal["zero", "init"] = base.parameter("zero", "the momentum of the first tau rounds")

    def resolved_defaults(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        return {"tau": max(1, round(clients / cohort))}

    @property
    def earlier_models(self) -> int:
        tau: int = self.hyper.tau
        return tau

    @property
    def momentum_window(self) -> int:
        tau: int = self.hyper.tau
        return tau

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        tau, x = self.hyper.tau, server["x"]
        first = server.round - tau
        if first < 1 and self.hyper.warmup == "zero":
            return Broadcast({"x": x, "M": x.zeros()})
        return Broadcast({"x": x, "M": (server.model_of(max(first, 1)) - x) / tau})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y = carry["y"]
        pull = self.hyper.beta / (client.lr * client.J) * client.shared["M"]
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) + pull)


class _OwnWindow(FedAvg):
    """The base class of the variants of GHBM in which each client has its own momentum window: the rounds since it last
    took part."""

    any_optimizer = False

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        # by the size of the cohort a client's update would tell who else takes part
        self.allows_aggregation = self.hyper.scale != "participation"

    def scale(self, client: ClientPhase) -> Tensor | float:
        """Returns the factor s_i of each client's momentum: one over the number of rounds since it last took part,
        ``[C, 1]``, or, with ``scale: participation``, the number of clients in the cohort divided by the number of all
        clients."""
        if self.hyper.scale == "participation":
            return client.members / client.N
        return 1 / client.gap.clamp(min=1)


class LocalGHBM(_OwnWindow):
    """GHBM with a separate momentum M_i for each client, over the rounds since its previous participation:
    M_i = s_i (a_i - x^r), s_i = 1 / gap_i, where a_i is the server's model that the client received at its previous
    participation, gap_i rounds ago. M_i stays the same in all local steps of a round, and is 0 at the first
    participation.

    M_i takes the place of M^r in the local step of :class:`GHBM`: y_j = y_{j-1} - eta_l g_i(y_{j-1}) - (beta / J_i)
    M_i. Here x^r is the server's model, y_j a client's model after j of its J_i local steps, g_i its mini-batch
    gradient, eta_l the clients' learning rate, and beta the momentum factor.

    With ``scale: participation``, as in the authors' code, s_i is instead the number of clients in the cohort divided
    by the number of all clients.
    """

    name = "local_ghbm"
    allows_aggregation = True
    paper = "Zaccone et al., TMLR 2025"
    assumes_plain_sgd = True
    needs_received = True

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.9, "momentum (beta)", ge=0, lt=1)
        scale: Literal["inv_gap", "participation"] = base.parameter("inv_gap", "what s_i is")

    def begin(self, client: ClientPhase) -> Carry:
        x = client.start("x")
        M = torch.where(client.gap > 0, self.scale(client) * (client.received - x), 0)
        return Carry({"y": x, "M": M})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, M = carry["y"], carry["M"]
        pull = self.hyper.beta / (client.lr * client.J) * M
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) + pull)


class FedHBM(_OwnWindow):
    """FedAvg with a momentum for each client: it moves away from a_i, its final model of its previous participation:
    y_j = y_{j-1} - eta_l g_i(y_{j-1}) + (beta / J_i) s_i (y_{j-1} - a_i), with s_i = 1 / gap_i.

    Symbols as in :class:`FedAvg`: y_j is a client's model after j of its J_i local steps in round r, g_i its mini-batch
    gradient, gap_i the number of rounds since it last took part, and eta_l the clients' learning rate. beta is the
    momentum factor. With ``scale: participation``, s_i is instead the number of clients in the cohort divided by the
    number of all clients.

    A client that takes part for the first time has no a_i. It then has no momentum (``variant: standard``); or a_i is
    the run's initial model (``variant: shared``) or a random model drawn for this client (``variant: random``), and s_i
    is 1 / max(1, r - 1), unless ``scale`` is ``participation``.
    """

    allows_aggregation = True
    paper = "Zaccone et al., TMLR 2025"
    assumes_plain_sgd = True
    client_state = ("a",)
    work = Work(per_step=3)

    class Hyper(base.Hyper):
        beta: float = base.parameter(1.0, "momentum (beta)", ge=0, le=1)
        scale: Literal["inv_gap", "participation"] = base.parameter("inv_gap", "what s_i is")
        variant: Literal["standard", "shared", "random"] = base.parameter(
            "standard", "the first participation's anchor"
        )

    def begin(self, client: ClientPhase) -> Carry:
        s = self.scale(client)
        if self.hyper.variant == "standard":
            return Carry({"y": client.start("x"), "a": client.state["a"], "s": torch.where(client.gap > 0, s, 0)})
        first = s if self.hyper.scale == "participation" else 1 / max(1, client.round - 1)
        a, new = client.state["a"], client.gap == 0
        if new.any():
            anchor = client.initial_models(per_client=self.hyper.variant == "random")
            a = torch.where(new, anchor.parameters, a)
        return Carry({"y": client.start("x"), "a": a, "s": torch.where(new, first, s)})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, a, s = carry["y"], carry["a"], carry["s"]
        pull = self.hyper.beta / (client.lr * client.J) * s * (y.parameters - a)
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) - pull)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])}, state={"a": carry["y"].parameters})

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        yield from super().advice(momentum, cohort, clients, server_lr)
        if cohort == clients and self.hyper.beta:
            yield "the cohort is everybody, so that s_i = 1: models may run away along flat directions"
