"""Mime and MimeLite: clients use the server's statistics, which do not change while clients train, with and without a
control variate.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: Breaking the centralized barrier
for cross-device federated learning. NeurIPS 2021 (arXiv 2008.03606).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class MimeLite(FedAvg):
    """FedAvg whose clients use statistics s of the server, a mean of gradients, and leave s unchanged as they train:
    y_j = y_{j-1} - eta_l ((1 - beta) g_i(y_{j-1}) + beta s); then c = sum_i p_i G_i(x^r), the mean of the full-batch
    gradients, s <- (1 - beta) c + beta s, x^{r+1} = x^r - eta_g (x^r - xbar). MimeLite proper is beta = 0.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps, g_i and G_i its
    gradients on a mini-batch and on all its samples, p_i its aggregation weight, xbar the weighted mean of the final
    models, and eta_l and eta_g are the learning rates of clients and server. Without ``dampening`` the factors (1 -
    beta) are 1, as in torch's momentum.
    """

    paper = "Karimireddy et al., NeurIPS 2021"
    any_optimizer = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1, vectors_up=1)
    work = Work(full_gradients=1)
    weighting = "uniform"
    beta = 0.0
    dampening = True

    def init_server(self, server: ServerState) -> None:
        server["s"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "s": server["s"]})

    def momentum(self, fresh: Tensor, s: Tensor) -> Tensor:
        """Combines a new gradient with earlier ones: returns (1 - beta) fresh + beta s, or fresh + beta s without
        ``dampening``. Clients step along the result, which the paper calls U. For the server it is the new s.

        ``fresh`` is the new gradient: ``[C, width]`` for C clients, or ``[width]`` for the server. ``s [width]`` are
        the server's statistics, an average of earlier gradients.
        """
        return (1 - self.beta if self.dampening else 1.0) * fresh + self.beta * s

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        fresh = client.objective.gradient(carry["y"], batch)
        return client.optimizer.descend(carry, "y", self.momentum(fresh, client.shared["s"]))

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        c = client.objective.full_gradient(client.start("x"))
        return Result(uploads={"y": Upload.weighted_mean(carry["y"]), "c": Upload.weighted_mean(c)})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["s"] = self.momentum(sums["c"], server["s"])
        server.move(sums["y"])


class Mime(MimeLite):
    """MimeLite whose clients correct the noise of each gradient on the same mini-batch: g_i(y_{j-1}) - g_i(x^r) + c
    takes the place of g_i(y_{j-1}).

    Symbols as in :class:`MimeLite`: x^r is the server's model, y_{j-1} a client's model before local step j, g_i its
    mini-batch gradient, and c the clients' mean full-batch gradient at x^r. c is needed before training, so these
    full-batch gradients are a separate phase.
    """

    paper = "Karimireddy et al., NeurIPS 2021"
    phases = ("gradients", "train")
    traffic = Traffic(vectors_down=2, vectors_up=1)
    traffic_in: ClassVar[Mapping[str, Traffic]] = {
        "gradients": Traffic(models_up=0, vectors_up=1),
        "train": Traffic(models_down=0, vectors_down=2),
    }
    work = Work(forwards=1, backwards=1, full_gradients=1)
    work_in: ClassVar[Mapping[str, Work]] = {
        "gradients": Work(full_gradients=1),
        "train": Work(forwards=1, backwards=1),
    }

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        names = ("x",) if phase == "gradients" else ("x", "s", "c")
        return Broadcast({name: server[name] for name in names})

    def gradients(self, client: ClientPhase) -> Result:
        """Runs the first phase of a round, in which each client computes the gradient on all its samples at the
        server's model x^r. Returns the uploads of a stack of C clients: these gradients G_i(x^r) ``[C, width]``, which
        the server averages to c."""
        return Result(uploads={"c": Upload.weighted_mean(client.objective.full_gradient(client.start("x")))})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, objective = carry["y"], client.objective
        fresh = objective.gradient(y, batch)
        # x^r with the running statistics of y, which this pass must not update
        x = y.with_parameters(client.start("x").parameters)
        corrected = fresh - objective.gradient(x, batch) + client.shared["c"]
        return client.optimizer.descend(carry, "y", self.momentum(corrected, client.shared["s"]))

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "gradients":
            server["c"] = sums["c"]
        else:
            super().server_update(server, phase, {"y": sums["y"], "c": server["c"]}, scalars)


class MomentumHyper(base.Hyper):
    """The hyper-parameters of :class:`MimeLiteMom` and :class:`MimeMom`, ``algorithm.beta`` and
    ``algorithm.dampening``. The clients of these algorithms step along (1 - beta) g + beta s with dampening, and along
    g + beta s without. Here g is a new gradient, and s the mean of earlier gradients that the server keeps."""

    beta: float = base.parameter(0.9, "momentum (beta)", ge=0, lt=1)
    dampening: bool = base.parameter(True, "U = (1 - beta) g + beta s as in the paper, else g + beta s")


class MimeLiteMom(MimeLite):
    """MimeLite with momentum: clients step along (1 - beta) g_i + beta s, where g_i is a client's mini-batch gradient
    and s the server's mean of earlier gradients. beta is a hyper-parameter, which is 0 in MimeLite itself."""

    paper = "Karimireddy et al., NeurIPS 2021"
    Hyper = MomentumHyper

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.beta, self.dampening = self.hyper.beta, self.hyper.dampening


class MimeMom(Mime):
    """Mime with momentum: clients step along (1 - beta) g + beta s, where g is Mime's corrected gradient and s the
    server's mean of earlier gradients. beta is a hyper-parameter, which is 0 in Mime itself."""

    paper = "Karimireddy et al., NeurIPS 2021"
    Hyper = MomentumHyper

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.beta, self.dampening = self.hyper.beta, self.hyper.dampening
