"""LG-FedAvg: each client keeps a representation of its own, and the last layers are shared.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency: Think Locally,
Act Globally: Federated Learning with Local and Global Representations. arXiv 2001.01523, 2020, Algorithm 1.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.fedper import FedPer


class LGFedAvg(FedPer):
    """FedAvg of the head alone: a client trains all layers together, keeps the others, and sends only the head.

    The paper begins with a model that FedAvg has trained: for ``warmup_rounds`` rounds everything is shared, and
    clients begin with the layers that this has left at the server. ``private`` names the layers that stay at the client
    (``base``, all but the last layer, unless set).
    """

    name = "lg_fedavg"
    allows_aggregation = True
    paper = "Liang et al., arXiv 2001.01523, 2020"

    class Hyper(FedPer.Hyper):
        private: tuple[str, ...] = base.parameter(("base",), "the layers that stay at each client")
        warmup_rounds: int = base.parameter(0, "rounds of FedAvg before that", ge=0)

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.private_from = self.hyper.warmup_rounds + 1
