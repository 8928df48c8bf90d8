"""Every algorithm passes the contract tests of fedray.testing; so do a user's own."""

from __future__ import annotations

import pytest

from fedray.testing import AlgorithmContract

pytestmark = pytest.mark.usefixtures("ray_cluster")


class TestFedAvg(AlgorithmContract):
    algorithm = "fedavg"
    zero = {}


class TestFedProx(AlgorithmContract):
    algorithm = "fedprox"
    actors = (3,)
    hyper = {"mu": 0.3}
    zero = {"mu": 0.0}


class TestFedNAG(AlgorithmContract):
    algorithm = "fednag"
    actors = (2,)
    zero = {"gamma": 0.0}


class TestPFedMo(AlgorithmContract):
    algorithm = "pfedmo"
    actors = (3,)
    hyper = {"pi": 0.7, "probe_batch": 32}
    zero = {"pi": 0.0, "gamma": 0.0}


class TestPFedMoPrinted(AlgorithmContract):
    algorithm = "pfedmo"
    hyper = {"pi": 0.3, "form": "printed", "rep_steps": 3}
    actors = (2,)
    zero = {"pi": 0.0, "gamma": 0.0}


class TestOwnStateful(AlgorithmContract):
    algorithm = "stateful:Drift"
    actors = (1, 3)
    zero = {"strength": 0.0}


class TestOwnLoss(AlgorithmContract):
    algorithm = "stateful:Contrast"
    actors = (2,)
    zero = {"mu": 0.0}
