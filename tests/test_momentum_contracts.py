"""The contract tests of the momentum, variance-reduction and regularisation families, without their Ray runs."""

from __future__ import annotations

from fedray.testing import AlgorithmContract


class Local(AlgorithmContract):
    """Same bits on Ray are checked for all algorithms in one run each, elsewhere."""

    actors = ()
    __test__ = False


class TestFedAvgM(Local):
    __test__ = True
    algorithm = "fedavgm"
    zero = {"beta": 0.0}


class TestFedAvgMNesterov(Local):
    __test__ = True
    algorithm = "fedavgm"
    hyper = {"nesterov": True, "beta": 0.5}
    zero = {"beta": 0.0}


class TestSlowMo(Local):
    __test__ = True
    algorithm = "slowmo"
    settings = {"train.lr_decay": 0.9}
    zero = {"beta": 0.0}


class TestFedMom(Local):
    __test__ = True
    algorithm = "fedmom"
    zero = {"beta": 0.0}


class TestFastSlowMo(Local):
    __test__ = True
    algorithm = "fastslowmo"
    zero = {"gamma": 0.0, "gamma_a": 0.0}


class TestFastSlowMoVelocity(Local):
    __test__ = True
    algorithm = "fastslowmo"
    hyper = {"carry": "velocity"}
    zero = {"gamma": 0.0, "gamma_a": 0.0}


class TestDOMO(Local):
    __test__ = True
    algorithm = "domo"
    hyper = {"mu_s": 0.5, "mu_l": 0.5}
    settings = {"train.local_epochs": None, "train.local_steps": 4}
    zero = {"mu_s": 0.0, "mu_l": 0.0, "beta": 0.0}


class TestDOMOStep(TestDOMO):
    hyper = {"variant": "step", "mu_s": 0.5, "mu_l": 0.5}


class TestFedADC(Local):
    __test__ = True
    algorithm = "fedadc"
    hyper = {"beta_g": 0.5, "beta_l": 0.3}
    zero = {"beta_g": 0.0, "beta_l": 0.0}


class TestFedADCNesterov(Local):
    __test__ = True
    algorithm = "fedadc"
    hyper = {"variant": "nesterov", "beta_g": 0.5}
    zero = {"beta_g": 0.0}


class TestFedCM(Local):
    __test__ = True
    algorithm = "fedcm"
    zero = {"alpha": 1.0}


class TestScaffold(Local):
    __test__ = True
    algorithm = "scaffold"


class TestScaffoldOption1(Local):
    __test__ = True
    algorithm = "scaffold"
    hyper = {"option": 1}
    settings = {"train.weighting": "samples"}


class TestMime(Local):
    __test__ = True
    algorithm = "mime"


class TestMimeMom(Local):
    __test__ = True
    algorithm = "mimemom"


class TestMimeLite(Local):
    __test__ = True
    algorithm = "mimelite"
    zero = {}


class TestMimeLiteMom(Local):
    __test__ = True
    algorithm = "mimelitemom"
    hyper = {"dampening": False, "beta": 0.5}
    zero = {"beta": 0.0}


class TestFedDyn(Local):
    __test__ = True
    algorithm = "feddyn"
    hyper = {"alpha": 0.3}


class TestFedDynAverage(Local):
    __test__ = True
    algorithm = "feddyn"
    hyper = {"alpha": 0.3, "eval": "avg_selected"}


class TestAdaBest(Local):
    __test__ = True
    algorithm = "adabest"
    zero = {"mu": 0.0, "beta": 0.0}


class TestAdaBestFedsim(Local):
    __test__ = True
    algorithm = "adabest"
    hyper = {"mu_scaling": "fedsim"}
    zero = {"mu": 0.0, "beta": 0.0}


class TestFedTrip(Local):
    __test__ = True
    algorithm = "fedtrip"
    settings = {"train.momentum": 0.5}
    zero = {"mu": 0.0}


class TestFedTripConst(Local):
    __test__ = True
    algorithm = "fedtrip"
    hyper = {"xi_mode": "const", "xi_const": 0.5}
    zero = {"mu": 0.0}


class TestGHBM(Local):
    __test__ = True
    algorithm = "ghbm"
    hyper = {"tau": 2}
    zero = {"beta": 0.0}


class TestGHBMInit(Local):
    __test__ = True
    algorithm = "ghbm"
    hyper = {"tau": 3, "warmup": "init"}
    zero = {"beta": 0.0}


class TestLocalGHBM(Local):
    __test__ = True
    algorithm = "local_ghbm"
    zero = {"beta": 0.0}


class TestLocalGHBMParticipation(Local):
    __test__ = True
    algorithm = "local_ghbm"
    hyper = {"scale": "participation"}
    zero = {"beta": 0.0}


class TestFedHBM(Local):
    __test__ = True
    algorithm = "fedhbm"
    zero = {"beta": 0.0}


class TestFedHBMShared(Local):
    __test__ = True
    algorithm = "fedhbm"
    hyper = {"variant": "shared", "scale": "participation"}
    zero = {"beta": 0.0}


class TestFedHBMRandom(Local):
    __test__ = True
    algorithm = "fedhbm"
    hyper = {"variant": "random"}
    zero = {"beta": 0.0}


class TestFedAdam(Local):
    __test__ = True
    algorithm = "fedadam"
    settings = {"train.server_lr": 0.05}


class TestFedYogi(TestFedAdam):
    algorithm = "fedyogi"


class TestFedAdagrad(TestFedAdam):
    algorithm = "fedadagrad"
