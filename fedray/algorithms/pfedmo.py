"""pFedMo: personalized momentum and models, pulled towards a representation model of the server's.

J. Fu, Z. Yang et al.: pFedMo, IEEE Transactions on Big Data 2024, eqs. 6-12.

What "momentum" means in eqs. 11-12. The paper writes y, the iterate of Nesterov's rule. Read so (``form: printed``) the
pull towards the representation model cancels in eq. 12, x_i+ = xbar + a_i gamma (v_rep - vbar), and training gets worse
than FedNAG or diverges. Read as the velocity v_t = y_t - y_{t-1} (``form: velocity``, the default, "worker i's
momentum" of the paper's Table 1) it behaves as published. Most of the gain under label skew is then the representation
model's own accuracy, which is why ``representation_accuracy`` is always logged beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, mean
from fedray.algorithms.server import Server
from fedray.core.context import Context

FOUR = ("x", "m", "x_rep", "m_rep")


class PFedMo(Algorithm):
    """Clients hold nothing: the server's four vectors and a score a_i say what client i starts from.

    Workers (eqs. 6-7) run Nesterov's rule from (x_i+, m_i+); the server averages xbar = sum p_i x_i, mbar = sum p_i m_i
    and runs the same rule on its public set (x_rep, m_rep). Scores (eqs. 8-10) on a probe batch, w = softmax of the
    representation model's logits: l_i = mean_b(-sum_c w_bc log softmax(logits_i)_bc), u_i = max(u_i, l_i),
    s_i = 1 - l_i/u_i, a_i = pi s_i. Then
        m_i+ = (1 - a_i) mbar + a_i m_rep                             (11)
        x_i+ = (1 - a_i) xbar + a_i x_rep + (mbar - m_i+)             (12)
    and the global model is x_+ = sum p_i x_i+. Under partial participation a client starts from the current four
    vectors and its last a_i; one never scored takes sum p_j a_j of the last cohort, which gives exactly (x_+, m_+).
    """

    paper = "Fu, Yang et al., IEEE Trans. Big Data 2024"
    assumes_plain_sgd = True
    phases = ("train", "score")
    background_before = "score"
    traffic = Traffic(vectors_down=1, vectors_up=1)
    needs_public = True
    uses_server_lr = False

    class Hyper(base.Hyper):
        gamma: float = base.parameter(0.5, "momentum factor (gamma, eqs. 6-7)", ge=0, lt=1)
        pi: float = base.parameter(0.5, "strength of the personal pull (pi)", ge=0, le=1)
        form: Literal["velocity", "printed"] = base.parameter("velocity", "what momentum is in eqs. 11-12: v or y")
        contrast: bool = base.parameter(True, "the last term of eq. 12, mbar - m_i+")
        rep_steps: int | None = base.parameter(
            None, "steps of the representation model per round; the clients' J", ge=1
        )
        probe_batch: int = base.parameter(256, "samples of the probe batch (B, eq. 9)", ge=1)
        probe_source: Literal["public", "test"] = base.parameter(
            "public", "where the probe batch comes from; the paper takes the test set"
        )

    def implied(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        return {} if steps is None else {"rep_steps": steps}

    def init_server(self, server: Server) -> None:
        x = server["x"]
        m = x.clone() if self.hyper.form == "printed" else torch.zeros_like(x)
        server.vectors |= {"m": m, "x_rep": x.clone(), "m_rep": m.clone()}
        if "buffers" in server.vectors:
            server["buffers_rep"] = server["buffers"].clone()

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        if phase == "score":
            inputs = server.probe(server, self.hyper.probe_batch, self.hyper.probe_source)
            ctx = server.public_context(server, 1)
            ctx.buffers = server["buffers_rep"][None] if "buffers_rep" in server.vectors else None
            logits = ctx.forward(server["x_rep"][None], inputs).logits[0]
            return Broadcast({"inputs": inputs, "w": torch.softmax(logits, dim=1)})
        return self.personal_broadcast(server)

    def personal_broadcast(self, server: Server) -> Broadcast:
        a, unscored = server.column("a"), self._mean_a(server)
        shared = {name: server[name] for name in (*FOUR, "buffers_rep") if name in server.vectors}
        return Broadcast(shared, {"a": [a.get(client, unscored) for client in server.cohort.ids]})

    def begin(self, ctx: Context) -> Carry:
        if ctx.buffers is not None:
            ctx.buffers = _mix(ctx.buffers, ctx.shared["buffers_rep"], ctx.given["a"])
        x, m = self._personal(ctx.shared, ctx.given["a"])
        return {"x": x, "m": m}

    def _personal(self, server: Any, a: Tensor | float) -> tuple[Tensor, Tensor]:
        """(x_i+, m_i+) of eqs. 11-12 from the server's four vectors and the scores ``a``."""
        m = (1 - a) * server["m"] + a * server["m_rep"]
        x = (1 - a) * server["x"] + a * server["x_rep"]
        return (x + (server["m"] - m) if self.hyper.contrast else x), m

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        gamma, x, m = self.hyper.gamma, carry["x"], carry["m"]
        if self.hyper.form == "printed":
            y = ctx.descend(x, ctx.grad(x, batch))
            return {"x": y + gamma * (y - m), "m": y}
        pull = ctx.lr * ctx.assemble(x, ctx.grad(x, batch))
        v = gamma * m - pull
        return {"x": x + gamma * v - pull, "m": v}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"x": mean(carry["x"]), "m": mean(carry["m"])}, kept={"x": carry["x"]})

    def score(self, ctx: Context) -> Result:
        """The phase ``score``: l_i of eqs. 8-9 on the probe batch."""
        logits = ctx.forward(ctx.kept["x"], ctx.shared["inputs"]).logits
        cross = -(ctx.shared["w"] * torch.log_softmax(logits, dim=2)).sum(2)
        return Result(scalars={"l": cross.mean(1, keepdim=True)})

    def background(self, server: Server) -> Mapping[str, Tensor]:
        """The representation model: the workers' own rule, on the public set."""
        steps = server.cohort.steps
        ctx = server.public_context(server, self.hyper.rep_steps or round(sum(steps) / len(steps)))
        if "buffers_rep" in server.vectors:
            ctx.buffers = server["buffers_rep"][None].clone()
        carry = self.local_steps(ctx, {"x": ctx.start("x_rep"), "m": ctx.start("m_rep")})
        buffers = {} if ctx.buffers is None else {"buffers_rep": ctx.buffers[0]}
        return {"x_rep": carry["x"][0], "m_rep": carry["m"][0], **buffers}

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "train":
            server["x"], server["m"] = sums["x"], sums["m"]
            return
        u, a, scores = server.column("u"), server.column("a"), []
        for client, l in zip(server.cohort.ids, scalars["l"], strict=True):
            u[client] = max(u.get(client, l), l)
            scores.append(1 - l / u[client] if u[client] > 0 else 0.0)
            a[client] = self.hyper.pi * scores[-1]
        server.column("mean_a")[0] = sum(
            p * a[i] for p, i in zip(server.cohort.weights, server.cohort.ids, strict=True)
        )
        server.client_scalars["score"] = scores

    def _mean_a(self, server: Server) -> float:
        """sum_j p_j a_j of the last scored cohort (0 in round 1, where nothing is scored)."""
        return server.column("mean_a").get(0, 0.0)

    def eval_model(self, server: Server) -> Tensor:
        return self._personal(server, self._mean_a(server))[0]

    def eval_buffers(self, server: Server, model: str = "") -> Tensor | None:
        if "buffers" not in server.vectors:
            return None
        mixing = 1.0 if model == "representation" else self._mean_a(server)
        return _mix(server["buffers"], server["buffers_rep"], mixing)

    def monitors(self, server: Server) -> Mapping[str, Tensor]:
        return {"representation": server["x_rep"]}

    def personal_model(self, ctx: Context) -> Tensor:
        return self.begin(ctx)["x"]

    def server_flops(self, server: Server, forward: float) -> float:
        cohort = server.cohort
        steps = self.hyper.rep_steps or round(sum(cohort.steps) / len(cohort.steps))
        batch = min(server.batch_size or server.public_samples, server.public_samples)
        there = server.public_samples if self.hyper.probe_source == "public" else server.test_samples
        probes = min(self.hyper.probe_batch, there) * (len(cohort.ids) + 1)
        return forward * (3 * steps * batch + probes)


def _mix(buffers: Tensor, buffers_rep: Tensor, a: Tensor | float) -> Tensor:
    """(1 - a) buffers + a buffers_rep, where they differ: a constant buffer may hold infinities."""
    a = torch.as_tensor(a, dtype=buffers.dtype, device=buffers.device)
    return torch.where(buffers == buffers_rep, buffers, torch.lerp(buffers, buffers_rep, a))
