"""FedBN: each client keeps its normalisation layers.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.
ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.fedper import FedPer


class FedBN(FedPer):
    """FedAvg of everything but the normalisation layers, whose parameters and statistics each client trains and keeps.
    On a model without such layers it is FedAvg.

    ``private`` names the layers that stay at the client (``norm``, all normalisation layers, unless set). The global
    model has their initial values, so the accuracies to look at are those of the clients' personal models.
    """

    allows_aggregation = True
    paper = "Li et al., ICLR 2021"

    class Hyper(FedPer.Hyper):
        private: tuple[str, ...] = base.parameter(("norm",), "the layers that stay at each client")
