"""Algorithms pass the contract tests of fedray.testing, one of them on Ray too; so do a user's own."""

from __future__ import annotations

import pytest

from fedray.testing import AlgorithmContract


class TestFedAvg(AlgorithmContract):
    algorithm = "fedavg"
    zero = {}


class TestFedProx(AlgorithmContract):
    algorithm = "fedprox"
    hyper = {"mu": 0.3}
    zero = {"mu": 0.0}


class TestFedNAG(AlgorithmContract):
    algorithm = "fednag"
    zero = {"gamma": 0.0}


class TestPFedMo(AlgorithmContract):
    algorithm = "pfedmo"
    hyper = {"pi": 0.7, "probe_batch": 32}
    zero = {"pi": 0.0, "gamma": 0.0}


class TestPFedMoPrinted(AlgorithmContract):
    algorithm = "pfedmo"
    hyper = {"pi": 0.3, "form": "printed", "rep_steps": 3}
    zero = {"pi": 0.0, "gamma": 0.0}


@pytest.mark.usefixtures("ray_cluster")
class TestOwnStateful(AlgorithmContract):
    algorithm = "stateful:Drift"
    actors = (1, 3)
    zero = {"strength": 0.0}


class TestOwnLoss(AlgorithmContract):
    algorithm = "stateful:Contrast"
    zero = {"mu": 0.0}


class TestGathering(AlgorithmContract):
    """All uploads at the server, and one of another shape than the model."""

    algorithm = "gathered:Gathered"
