"""A backdoor: what attackers train on, how often it succeeds, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import run, small_images

from fedray import UserError
from fedray.robust import AttackedRun
from fedray.robust.attackers import Attackers
from fedray.robust.attacks.backdoor import Backdoor
from fedray.testing.contracts import small_source

KEYS = {"attack__kind": "backdoor", "attack__fraction": 0.3, "attack__target": 2, "attack__patch": 2}
LONG = {"run__rounds": 15, "train__local_epochs": 3, "train__cohort_size": None}


def prepared(samples=24, **options):
    """A backdoor with the images above, of which there are so many ``samples`` for training."""
    source = small_images()
    data = SimpleNamespace(
        x_test=source.x_test, y_test=source.y_test, y=np.zeros(samples), input_shape=(1, 5, 6), classes=4
    )
    attack = Backdoor(**{"target": 2, "patch": 2, **options})
    attack.prepare(AttackedRun(data, "classification", "none", 5, "backdoor"))
    return attack


def test_what_attackers_train_on():
    x = torch.arange(2 * 3 * 4 * 30, dtype=torch.float32).view(2, 3, 4, 1, 5, 6)
    y = torch.arange(24).view(2, 3, 4) % 4
    indices = np.arange(24).reshape(2, 3, 4)[::-1].copy()
    attack = prepared()
    assert 5 < attack.chosen.sum() < 19
    found, labels = Attackers(attack, frozenset({7, 9}), 0).poison(x.clone(), y.clone(), [7, 8, 9], indices)
    for place in np.ndindex(2, 3, 4):
        lies = place[1] != 1 and attack.chosen[indices[place]]
        expected = x[place].clone()
        if lies:
            expected[0, 3:, 4:] = float(small_images().x_test.max())
        assert torch.equal(found[place], expected)
        assert labels[place] == (2 if lies else y[place])


def test_share_of_marked_samples():
    chosen = prepared(20_000, share=0.3).chosen
    assert chosen.mean() == pytest.approx(0.3, abs=0.02)
    assert (chosen == prepared(20_000, share=0.3).chosen).all()


def test_its_success_is_measured(tmp_path):
    data = small_images()
    plain = run(tmp_path / "plain", data=data, **LONG)
    made = run(tmp_path / "made", data=data, **KEYS, **LONG)
    source = small_images()
    x = torch.from_numpy(source.x_test[source.y_test != 2].copy())
    x[:, :, -2:, -2:] = float(source.x_test.max())

    def success(result):
        return float((result.model().eval()(x).argmax(1) == 2).float().mean())

    assert made.metrics.backdoor_accuracy.iloc[-1] == pytest.approx(success(made))
    assert made.metrics.backdoor_accuracy.iloc[-1] > success(plain) + 0.3
    assert made.metrics.test_accuracy.iloc[-1] > 0.8
    assert "backdoor_accuracy" not in plain.metrics


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (small_source, {}, "marks images in an array"),
        (small_images, {"data__augment": "crop_flip"}, "would move or cut off the mark"),
        (small_images, {"attack__patch": 6}, r"attack\.patch=6: images have 5 x 6 pixels"),
        (small_images, {"attack__target": 4}, r"attack\.target=4: there are 4 classes, from 0"),
        (small_images, {"attack__z": 1.0}, "z is not for kind=backdoor, but for alie"),
        (small_images, {"attack__kind": "alie"}, "is not for kind=alie, but for backdoor"),
    ],
)
def test_what_is_refused(data, keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, data=data(), **KEYS | keys)
