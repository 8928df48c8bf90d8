"""SlowMo: slow momentum at the server, over rounds of a base optimizer.

J. Wang, V. Tantia, N. Ballas, M. Rabbat: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum.
ICLR 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase


class SlowMo(FedAvg):
    """FedAvg with a slow momentum u at the server, over the rounds:
    u <- beta u + (x^r - xbar) / gamma_r; x^{r+1} = x^r - alpha gamma_r u, where gamma_r is the clients' rate eta_l.

    Symbols as in :class:`FedAvg`: x^r is the server's model, and xbar the weighted mean of the clients' final models.
    The base optimizer is the clients' SGD with ``train.momentum``. ``buffer`` says what happens to its momentum buffer:
    it starts from zero in every round (``reset``), is kept by each client (``maintain``), or is averaged at the server
    and sent to the cohort (``average``).
    """

    allows_aggregation = True
    allows_private = True
    paper = "Wang et al., ICLR 2020"
    uses_server_lr = False

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.5, "slow momentum (beta)", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "slow learning rate (alpha)", gt=0)
        buffer: Literal["reset", "maintain", "average"] = base.parameter(
            "reset", "what becomes of local momentum buffers"
        )

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.any_optimizer = self.hyper.buffer == "reset"
        if self.hyper.buffer == "maintain":
            self.client_state = ("b",)
        elif self.hyper.buffer == "average":
            # the server averages buffers too, and private layers are missing in them
            self.allows_aggregation = self.allows_private = False
            self.traffic = Traffic(vectors_down=1, vectors_up=1)

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        if self.hyper.buffer != "reset" and not momentum:
            yield f"algorithm.buffer={self.hyper.buffer}: there is no buffer without train.momentum"

    def init_server(self, server: ServerState) -> None:
        server["u"] = server["x"].zeros()
        if self.hyper.buffer == "average":
            server["b"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({name: server[name] for name in ("x", "b") if name in server.vectors})

    def begin(self, client: ClientPhase) -> Carry:
        if self.hyper.buffer == "reset":
            return super().begin(client)
        b = client.state["b"] if self.hyper.buffer == "maintain" else client.start("b")
        return super().begin(client).remember("y", {"momentum": b})

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        result = super().end(client, carry)
        b = carry.memory("y").buffers.get("momentum")
        if b is None or self.hyper.buffer == "reset":
            return result
        if self.hyper.buffer == "maintain":
            return Result(result.uploads, state={"b": b})
        return Result({**result.uploads, "b": Upload.weighted_mean(b)})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        x = server["x"].with_buffers_of(sums["y"])
        server["u"] = self.hyper.beta * server["u"] + (x - sums["y"]) / server.lr
        server["x"] = x - self.hyper.alpha * server.lr * server["u"]
        if "b" in sums:
            server["b"] = sums["b"]
