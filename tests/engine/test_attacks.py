"""What Byzantine clients send, and how far it lies from the others."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedray.robust import ATTACKS, AttackedRun
from fedray.robust.attackers import Attackers
from fedray.robust.attacks.alie import hidden

M, D = 11, 23
U = np.random.default_rng(4).normal(size=(M, D)) * np.linspace(0.3, 2, M)[:, None] + np.linspace(-1, 1, D)


def attacked(kind, byzantine=(20, 70), **options):
    clients = [10 * i for i in range(M)]
    attackers = Attackers(ATTACKS[kind](**options), frozenset(byzantine), 5)
    return attackers.upload(torch.tensor(U, dtype=torch.float32), clients, 3, "y", 0).double().numpy()


def test_attacks_on_uploads():
    honest = np.delete(U, [2, 7], axis=0)
    z = norm.ppf((M - 2 - (math.floor(M / 2 + 1) - 2)) / (M - 2))
    mean, deviation = honest.mean(axis=0), honest.std(axis=0)
    cases = [
        ("sign_flip", {}, (-U[2], -U[7])), ("sign_flip", {"scale": 3.0}, (-3 * U[2], -3 * U[7])),
        ("alie", {}, [mean - z * deviation] * 2), ("alie", {"z": 1.5}, [mean - 1.5 * deviation] * 2),
        ("ipm", {}, [-0.5 * mean] * 2), ("ipm", {"eps": 2.0}, [-2 * mean] * 2),
        ("backdoor", {}, (U[2], U[7])), ("backdoor", {"scale": 3.0}, (3 * U[2], 3 * U[7])),
        ("label_flip", {}, (U[2], U[7])),
    ]  # fmt: skip
    for kind, options, expected in cases:
        found = attacked(kind, **options)
        np.testing.assert_allclose(found[[2, 7]], expected, rtol=1e-5, atol=1e-6, err_msg=kind)
        np.testing.assert_allclose(np.delete(found, [2, 7], axis=0), honest, rtol=1e-6)
    noise = attacked("noise", scale=3.0)[[2, 7]]
    assert noise.std() == pytest.approx(3.0, rel=0.3)
    assert (attacked("noise", scale=3.0)[[2, 7]] == noise).all()
    np.testing.assert_allclose(noise, 3 * attacked("noise")[[2, 7]], rtol=1e-6)
    assert all((attacked(kind, [10 * i for i in range(M)]) == 0).all() for kind in ("alie", "ipm"))


def test_wrong_labels():
    """Those of Byzantine clients alone, and no inputs."""
    attack = ATTACKS["label_flip"]()
    attack.prepare(AttackedRun(SimpleNamespace(classes=4), "classification", "none", 0, "label_flip"))
    x, y = torch.rand(2, 3, 4, 5), torch.arange(24).view(2, 3, 4) % 4
    indices = np.arange(24).reshape(2, 3, 4)
    stored, labels = Attackers(attack, frozenset({7, 9}), 0).poison(x.clone(), y.clone(), [7, 8, 9], indices)
    assert torch.equal(stored, x)
    assert labels.tolist() == torch.stack([3 - y[:, 0], y[:, 1], 3 - y[:, 2]], dim=1).tolist()


@pytest.mark.parametrize(
    ("members", "attackers", "share"),
    [(50, 12, 24 / 38), (10, 5, 4 / 5), (10, 6, 3 / 4), (300, 150, 0.99), (4, 3, 0.01)],
)
def test_how_far_attackers_can_hide(members, attackers, share):
    """As in the paper's Algorithm 3 with 50 clients, 12 of them corrupt; at the ends the quantile is a finite one."""
    assert hidden(members, attackers) == pytest.approx(norm.ppf(share))
