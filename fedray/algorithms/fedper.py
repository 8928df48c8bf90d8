"""FedPer: each client keeps the last layers of its model.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary: Federated Learning with Personalization Layers. arXiv
1912.00818, 2019.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg


class FedPer(FedAvg):
    """FedAvg of a part of the model. A client trains its own last layers together with the server's model, keeps them,
    and sends only the rest.

    ``private`` names the layers that stay at the client (``head``, the last layer, unless set). The global model has
    their initial values, so the accuracies to look at are those of the clients' personal models.
    """

    allows_aggregation = True
    paper = "Arivazhagan et al., arXiv 1912.00818, 2019"

    class Hyper(base.Hyper):
        private: tuple[str, ...] = base.parameter(("head",), "the layers that stay at each client")

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.private = self.hyper.private
