"""The costs that two papers print: FedTrip's Tables III to V, and the overheads of the paper on GHBM."""

from __future__ import annotations

import torch
from reproducing.accounting import fedtrip_forward

from fedray.models.inspection import inspect_model
from fedray.models.small import MLP, FedTripCNN


def counted(module, shape=(1, 28, 28)):
    """Returns F, as FedTrip counts a forward pass of one sample, and the number of a model's parameters."""
    facts = inspect_model(module, torch.zeros(2, *shape), "it")
    return fedtrip_forward(module, facts, torch.zeros(2, *shape)), facts.parameters


MODELS = {
    "mlp": counted(MLP((1, 28, 28), 10)),
    "cnn": counted(FedTripCNN((1, 28, 28), 10)),
    "alexnet": (145.93e6, 2.72e6),
}
"""F and |w| of each model. AlexNet's are those of Table III, as its variant is not known. EMNIST was counted with the
CNN of 10 classes."""

COLUMNS = ("fedtrip", "fedavg", "fedprox", "slowmo", "moon", "feddyn")
TABLES_IV_AND_V = """
mlp      600  28 49 53 46 25 28   1.441  2.334  2.626  2.191   3.573   1.441
mlp     1000   9 19 16 26 14 17   0.772  1.509  1.321  2.064   3.335   1.458
cnn      600  24 39 41 40 46 40   6.161  9.897  10.465 10.151  35.02   10.269
cnn     1000  19 52 45 65 35 51   8.13   21.993 19.144 27.491  44.409  21.822
cnn     3000  32 45 45 92 44 97   41.077 57.097 57.431 116.733 167.486 124.513
alexnet 2000  46 74 75 87 84 79   13446  21596  21906  25392   73549   23091
"""
"""Each line has the model, the samples of a client, Table IV's rounds, and Table V's GFLOPs."""

CELLS = [
    (model, int(samples), name, int(rounds), gflops)
    for model, samples, *numbers in map(str.split, TABLES_IV_AND_V.strip().splitlines())
    for name, rounds, gflops in zip(COLUMNS, numbers[:6], numbers[6:], strict=True)
]
MISPRINT = ("alexnet", 2000, "fedavg", 74, "21596")
"""No count gives this cell together with the others of its row."""

OVERHEADS = {"fedavg": 1, "scaffold": 2, "fedavgm": 1, "mimemom": 3, "ghbm": 1.5, "local_ghbm": 1, "fedhbm": 1}
"""What the paper on GHBM multiplies FedAvg's traffic by."""
