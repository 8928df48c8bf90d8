"""pFedMo: personalized momentum and models, pulled towards a representation model of the server's.

S. Fu, Z. Yang et al.: pFedMo, IEEE Transactions on Big Data 2024, eqs. 6-12.

Eqs. 11-12 do not say clearly what "momentum" is. The paper writes y, the iterate of Nesterov's rule. With y (``form:
printed``), the pull towards the representation model cancels in eq. 12, x_i+ = xbar + a_i gamma (v_rep - vbar), and
training gets worse than FedNAG or diverges. With the velocity v_t = y_t - y_{t-1} (``form: velocity``, the default;
"worker i's momentum" in the paper's Table 1), the method behaves as published. Most of the gain under label skew is
then the accuracy of the representation model itself, which is why ``representation_accuracy`` is always logged too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, Upload
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model, Vector

FOUR = ("x", "m", "x_rep", "m_rep")


class PFedMo(Algorithm):
    """Each client starts from a mixture of the clients' average and a representation model that the server trains on
    public samples. Clients keep nothing: four values that the server keeps, the models xbar and x_rep and their momenta
    mbar and m_rep, and a score a_i say from what client i starts.

    The numbers in parentheses are the paper's equations. Clients run Nesterov's rule (6-7) from the model x_i+ and the
    momentum m_i+, and end with x_i and m_i. The server averages these, xbar = sum p_i x_i and mbar = sum p_i m_i. It
    runs the same rule on its public set, which gives the representation model x_rep and its momentum m_rep. Then the
    clients are scored (8-10) on a batch of probe samples b, with w = softmax of the logits of x_rep, and logits_i those
    of x_i: l_i = mean_b(-sum_c w_bc log softmax(logits_i)_bc), where c are the classes; u_i is the largest l_i of all
    rounds so far; s_i = 1 - l_i/u_i; a_i = ``pi`` s_i. In the next round clients start from
        m_i+ = (1 - a_i) mbar + a_i m_rep                             (11)
        x_i+ = (1 - a_i) xbar + a_i x_rep + (mbar - m_i+)             (12)
    The global model is x_+ = sum p_i x_i+, and its momentum m_+ = sum p_i m_i+.

    Under partial participation a client starts from the server's current values, with its latest a_i. A client without
    a score takes the mean sum p_j a_j over the last cohort in place of a_i. It then starts exactly from x_+ and m_+.
    """

    paper = "Fu, Yang et al., IEEE Trans. Big Data 2024"
    assumes_plain_sgd = True
    phases = ("train", "score")
    server_training_before = "score"
    traffic = Traffic(vectors_down=1, vectors_up=1)
    needs_public = True
    needs_classes = True
    uses_server_lr = False
    # its momentum follows from its model, and clients begin with models of their own
    sends_updates = False

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

    def resolved_defaults(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        return {} if steps is None else {"rep_steps": steps}

    def init_server(self, server: ServerState) -> None:
        x = server["x"]
        m = x.parameters.clone() if self.hyper.form == "printed" else x.zeros()
        server.vectors |= {"m": m, "x_rep": x.clone(), "m_rep": m.clone()}

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        if phase == "score":
            inputs = server.draw_inputs(server, self.hyper.probe_batch, self.hyper.probe_source)
            logits = server.as_client(server, 1).objective.class_logits(server["x_rep"].rows(1), inputs)[0]
            return Broadcast({"inputs": inputs, "w": torch.softmax(logits, dim=-1)})
        return self.personal_broadcast(server)

    def personal_broadcast(self, server: ServerState) -> Broadcast:
        a, unscored = server.column("a"), self._mean_a(server)
        return Broadcast(
            {name: server[name] for name in FOUR}, {"a": [a.get(client, unscored) for client in server.cohort.ids]}
        )

    def begin(self, client: ClientPhase) -> Carry:
        x, m = self._personal(client.shared, client.scalars["a"])
        return Carry({"x": x, "m": m})

    def _personal(self, server: Any, a: Tensor | float) -> tuple[Model, Tensor]:
        """Returns the models and momentum (x_i+, m_i+) from which clients start, by eqs. 11-12, given the server's four
        vectors and the clients' scores ``a``."""
        m = (1 - a) * server["m"] + a * server["m_rep"]
        x = _mixed(server["x"], server["x_rep"], a)
        return (x + (server["m"] - m) if self.hyper.contrast else x), m

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        gamma, x, m = self.hyper.gamma, carry["x"], carry["m"]
        if self.hyper.form == "printed":
            carry = client.optimizer.descend(carry, "x", client.objective.gradient(x, batch))
            y = carry["x"]
            return carry.update(x=y + gamma * (y.parameters - m), m=y.parameters)
        direction, carry = client.optimizer.direction(carry, "x", client.objective.gradient(x, batch))
        pull = client.lr * direction
        v = gamma * m - pull
        return carry.update(x=x + gamma * v - pull, m=v)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        uploads = {"x": Upload.weighted_mean(carry["x"]), "m": Upload.weighted_mean(carry["m"])}
        return Result(uploads, kept={"x": carry["x"]})

    def score(self, client: ClientPhase) -> Result:
        """Runs the second phase of a round, ``score``. Returns the number that each client of a stack of C clients
        sends, l_i of the paper's eqs. 8-9, ``[C, 1]``: the cross-entropy between the outputs of the client's model and
        those of the representation model (the model that the server trains) on a batch of probe samples."""
        logits = client.objective.class_logits(client.kept["x"], client.shared["inputs"])
        cross = -(client.shared["w"] * torch.log_softmax(logits, dim=-1)).sum(-1)
        return Result(scalars={"l": cross.flatten(1).mean(1, keepdim=True)})

    def server_training(self, server: ServerState) -> Mapping[str, Vector]:
        """Trains the representation model on the public set, in addition to the clients' training and by the same rule.
        Returns a dict with the trained model, ``x_rep``, and its momentum, ``m_rep``, which replace the server's values
        of these names."""
        steps = server.cohort.steps
        client = server.as_client(server, self.hyper.rep_steps or round(sum(steps) / len(steps)))
        carry = self.local_steps(client, Carry({"x": client.start("x_rep"), "m": client.start("m_rep")}))
        return {"x_rep": carry["x"][0], "m_rep": carry["m"][0]}

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
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

    def _mean_a(self, server: ServerState) -> float:
        """Returns sum_j p_j a_j, the mean score of the last scored cohort, for clients without a score. It is 0 in
        round 1, where nothing is scored."""
        return server.column("mean_a").get(0, 0.0)

    def eval_model(self, server: ServerState) -> Model:
        return self._personal(server, self._mean_a(server))[0]

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        return {"representation": server["x_rep"]}

    def personal_model(self, client: ClientPhase) -> Model:
        return self._personal(client.shared, client.scalars["a"])[0]

    def server_flops(self, server: ServerState, forward: float) -> float:
        there = server.public_samples if self.hyper.probe_source == "public" else server.test_samples
        probes: int = min(self.hyper.probe_batch, there) * (len(server.cohort.ids) + 1)
        return self.server_flops_beside(server, forward) + forward * probes

    def server_flops_beside(self, server: ServerState, forward: float) -> float:
        steps: int = self.hyper.rep_steps or round(sum(server.cohort.steps) / len(server.cohort.steps))
        return forward * 3 * steps * min(server.batch_size or server.public_samples, server.public_samples)


def _mixed(x: Model, x_rep: Model, a: Tensor | float) -> Model:
    """Returns the model (1 - a) x + a x_rep. Buffers are mixed only where they differ, because a constant buffer may
    hold infinities."""
    parameters = (1 - a) * x.parameters + a * x_rep.parameters
    if not x.has_buffers:
        return Model(parameters, x.width)
    b, b_rep = x.buffers, x_rep.buffers
    weight = torch.as_tensor(a, dtype=b.dtype, device=b.device)
    buffers = torch.where(b == b_rep, b, torch.lerp(b, b_rep, weight))
    return Model(torch.cat([parameters, buffers.expand(*parameters.shape[:-1], -1)], dim=-1), x.width)
