"""The algorithms and variants whose contract is tested, besides those of the example run."""

from __future__ import annotations

from typing import Any

EQUAL_STEPS = {"train.local_epochs": None, "train.local_steps": 4}


SMALL_STEPS = {"train.server_lr": 0.05}


SMALL_HEAD = {"model.proj_dim": 8}


# algorithm, hyper-parameters, those with which it is FedAvg (None: there are none), further settings of the run
CASES: list[tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = [
    ("fedavgm", {}, {"beta": 0.0}, {}),
    ("fedavgm", {"nesterov": True, "beta": 0.5}, {"beta": 0.0}, {}),
    ("slowmo", {}, {"beta": 0.0}, {"train.lr_decay": 0.9}),
    ("slowmo", {"buffer": "maintain"}, None, {"train.momentum": 0.5}),
    ("slowmo", {"buffer": "average"}, None, {"train.momentum": 0.5}),
    ("fedmom", {}, {"beta": 0.0}, {}),
    ("fastslowmo", {}, {"gamma": 0.0, "gamma_a": 0.0}, {}),
    ("fastslowmo", {"carry": "velocity"}, {"gamma": 0.0, "gamma_a": 0.0}, {"train.lr_decay": 0.9}),
    ("domo", {"mu_s": 0.5, "mu_l": 0.5}, {"mu_s": 0.0, "mu_l": 0.0, "beta": 0.0}, EQUAL_STEPS),
    ("domo", {"variant": "step", "mu_s": 0.5, "mu_l": 0.5}, {"mu_s": 0.0, "mu_l": 0.0, "beta": 0.0}, EQUAL_STEPS),
    ("fedadc", {"beta_g": 0.5, "beta_l": 0.3}, {"beta_g": 0.0, "beta_l": 0.0}, {}),
    ("fedadc", {"variant": "nesterov", "beta_g": 0.5}, {"beta_g": 0.0}, {}),
    ("fedcm", {}, {"alpha": 1.0}, {}),
    ("scaffold_m", {"beta": 0.3}, None, {}),
    ("fedacg", {}, {"lam": 0.0, "beta": 0.0}, {}),
    ("scaffold", {}, None, {}),
    ("scaffold", {"option": 1}, None, {"train.weighting": "samples"}),
    ("mime", {}, None, {}),
    ("mimemom", {}, None, {}),
    ("mimelite", {}, {}, {}),
    ("mimelitemom", {"dampening": False, "beta": 0.5}, {"beta": 0.0}, {}),
    ("feddyn", {"alpha": 0.3}, None, {}),
    ("feddyn", {"alpha": 0.3, "eval": "avg_selected"}, None, {}),
    ("adabest", {}, {"mu": 0.0, "beta": 0.0}, {}),
    ("adabest", {"mu_scaling": "fedsim"}, {"mu": 0.0, "beta": 0.0}, {}),
    ("fedtrip", {}, {"mu": 0.0}, {"train.momentum": 0.5}),
    ("fedtrip", {"xi_mode": "const", "xi_const": 0.5}, {"mu": 0.0}, {}),
    ("ghbm", {"tau": 2}, {"beta": 0.0}, {}),
    ("ghbm", {"tau": 3, "warmup": "init"}, {"beta": 0.0}, {}),
    ("local_ghbm", {}, {"beta": 0.0}, {}),
    ("local_ghbm", {"scale": "participation"}, {"beta": 0.0}, {}),
    ("fedhbm", {}, {"beta": 0.0}, {}),
    ("fedhbm", {"variant": "shared", "scale": "participation"}, {"beta": 0.0}, {}),
    ("fedhbm", {"variant": "random"}, {"beta": 0.0}, {}),
    ("moon", {}, {"mu": 0.0}, SMALL_HEAD),
    ("moon", {"buffer": 2, "first": "init"}, {"mu": 0.0}, SMALL_HEAD),
    ("fedsiam_da", {}, {"mu": 0.0, "dual": False}, {**SMALL_HEAD, "train.lr": 0.05}),
    ("fedsiam_da", {"hist": "prev_step", "dual": False}, {"mu": 0.0}, SMALL_HEAD),
    ("fednova", {}, {}, EQUAL_STEPS),
    ("fedexp", {"eps": 0.0}, {"eps": 1e9, "average_last": False}, {}),
    ("fedsam", {}, {"rho": 0.0}, {}),
    ("fedsam", {"adaptive": True, "rho": 0.5}, {"rho": 0.0}, {}),
    ("qfedavg", {}, {"q": 0.0}, {"train.weighting": "uniform"}),
    ("fedper", {}, {"private": []}, {}),
    ("fedbn", {"private": ["layers.1"]}, {"private": []}, {}),
    ("fedrep", {"head_steps": 2}, {"private": [], "head_steps": 0}, {}),
    ("lg_fedavg", {"warmup_rounds": 2}, {"warmup_rounds": 99}, {}),
    ("fedbabu", {}, {"frozen": []}, {}),
    ("ditto", {}, {}, {}),
    ("ditto", {"personal_steps": 2, "personal_lr": 0.05}, {}, {}),
    ("pfedme", {}, None, {}),
    ("apfl", {}, {}, {}),
    ("ifca", {}, None, {}),
    ("fedproto", {}, None, {}),
    ("perfedavg", {}, None, {}),
    ("fedadam", {}, None, SMALL_STEPS),
    ("fedyogi", {}, None, SMALL_STEPS),
    ("fedadagrad", {}, None, SMALL_STEPS),
]

BESIDE_A_RULE: dict[str, dict[str, Any]] = {
    "private layers and steps of uploads": {
        "model.private": ["layers.1"], "train.upload": [{"clip": 0.5}, {"topk": 0.3}],
    },
    "quantised uploads": {"train.upload": [{"qsgd": 4}]},
    "drawn numbers, rounded, and clients by their samples": {
        "train.upload": [{"randk": 0.3}, {"quantize": 4}], "train.sampling": "weighted",
    },
    "signs alone, and clients in turn": {"train.upload": ["sign"], "train.sampling": "cyclic"},
    "noise on uploads, and a bound on their lengths": {
        "train.upload": [{"clip": 0.5}, {"noise": 0.1}], "train.aggregation": {"kind": "norm_bound", "norm": 0.3},
    },
    "power of choice": {"train.sampling": {"kind": "power_of_choice", "candidates": 7}},
    "power of choice cached": {"train.sampling": {"kind": "power_of_choice", "candidates": 7, "cached": True}},
    "oort": {"train.sampling": "oort"},
    "a robust rule and an attack": {
        "train.aggregation": {"kind": "multi_krum", "f": 1}, "attack": {"kind": "sign_flip", "fraction": 0.2},
    },
    "a rule that goes on from the round before, and wrong labels": {
        "train.aggregation": {"kind": "centered_clip", "tau": 0.5}, "attack": {"kind": "label_flip", "fraction": 0.3},
    },
    "a rule by weights, and attackers that know the others": {
        "train.aggregation": {"kind": "geometric_median"}, "attack": {"kind": "alie", "fraction": 0.3},
    },
    "a median, and noise in place of updates": {
        "train.aggregation": {"kind": "median"}, "attack": {"kind": "noise", "fraction": 0.2, "scale": 0.1},
    },
    "a trimmed mean, and the mean turned round": {
        "train.aggregation": {"kind": "trimmed_mean", "b": 1}, "attack": {"kind": "ipm", "fraction": 0.3},
    },
    "one upload of all, and a backdoor": {
        "train.aggregation": {"kind": "krum", "f": 1}, "attack": {"kind": "backdoor", "fraction": 0.2},
        "data.source": "sample", "train.local_epochs": None, "train.local_steps": 20,
    },
    "two rules one after the other": {
        "train.aggregation": {"kind": "bulyan", "f": 1}, "train.cohort_size": 7,
    },
    "privacy": {"privacy.noise": 0.4, "privacy.clip": 0.5, "privacy.adaptive": True},
}  # fmt: skip
"""What goes with the rule of FedAvg and others: what stays at clients, who takes part, what becomes of uploads."""
