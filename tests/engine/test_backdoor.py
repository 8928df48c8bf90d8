"""A backdoor: what attackers train on, how often it succeeds, the same bits anywhere, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import run

from fedray import UserError
from fedray.data.sources.source import Source
from fedray.robust.attacks import Attack
from fedray.robust.backdoor import Backdoor
from fedray.testing.contracts import assert_same, small_source


def images():
    """400 images of 5 x 6 pixels in 4 classes."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 4, 460)
    centres = rng.uniform(-1, 1, (4, 1, 5, 6))
    x = np.clip(centres[y] + rng.normal(0, 0.4, (460, 1, 5, 6)), -1.5, 1.5).astype(np.float32)
    return Source("images", x[:400], y[:400], x[400:], y[400:], 4)


KEYS = {"attack__kind": "backdoor", "attack__fraction": 0.3, "attack__target": 2, "attack__patch": 2}
LONG = {"run__rounds": 15, "train__local_epochs": 3, "train__cohort_size": None}


def test_what_attackers_train_on():
    x = torch.arange(2 * 3 * 4 * 30, dtype=torch.uint8).view(2, 3, 4, 1, 5, 6)
    y = torch.arange(24).view(2, 3, 4) % 4
    indices = np.arange(24).reshape(2, 3, 4)[::-1].copy()
    marked = np.arange(24) % 3 == 0
    attack = Attack("backdoor", frozenset({7, 9}), None, 0, 4, Backdoor(2, 2, 255.0), marked)
    found, labels = attack.poison(x.clone(), y.clone(), [7, 8, 9], indices)
    for place in np.ndindex(2, 3, 4):
        lies = place[1] != 1 and indices[place] % 3 == 0
        expected = x[place].clone()
        if lies:
            expected[0, 3:, 4:] = 255
        assert torch.equal(found[place], expected)
        assert labels[place] == (2 if lies else y[place])


def test_share_of_marked_samples():
    marked = Backdoor(0, 1, 1.0).chosen(20_000, 0.3, 5)
    assert marked.mean() == pytest.approx(0.3, abs=0.02)
    assert (marked == Backdoor(0, 1, 1.0).chosen(20_000, 0.3, 5)).all()


def test_its_success_is_measured(tmp_path):
    data = images()
    plain = run(tmp_path / "plain", data=data, **LONG)
    made = run(tmp_path / "made", data=data, **KEYS, **LONG)
    source = images()
    x = torch.from_numpy(source.x_test[source.y_test != 2].copy())
    x[:, :, -2:, -2:] = float(source.x_test.max())

    def success(result):
        return float((result.model().eval()(x).argmax(1) == 2).float().mean())

    assert made.metrics.backdoor_accuracy.iloc[-1] == pytest.approx(success(made))
    assert made.metrics.backdoor_accuracy.iloc[-1] > success(plain) + 0.3
    assert made.metrics.test_accuracy.iloc[-1] > 0.8
    assert "backdoor_accuracy" not in plain.metrics


def test_the_same_bits_anywhere_and_when_it_is_resumed(tmp_path):
    keys = KEYS | {"run__checkpoint_every": 1, "attack__scale": 3.0}
    whole = run(tmp_path / "whole", data=images(), **keys)
    run(tmp_path / "parts", data=images(), **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", data=images(), **keys))
    pool = "fedray.testing.pickling:PicklingPool"
    assert_same(whole, run(tmp_path / "pickled", data=images(), engine__kind=pool, engine__chunk=1, **keys))


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (small_source, {}, "marks images in an array"),
        (images, {"data__augment": "crop_flip"}, "would move or cut off the mark"),
        (images, {"attack__patch": 6}, r"attack\.patch=6: images have 5 x 6 pixels"),
        (images, {"attack__target": 4}, r"attack\.target=4: there are 4 classes, from 0"),
        (images, {"attack__z": 1.0}, "z is not for kind=backdoor, but for alie"),
        (images, {"attack__kind": "alie"}, "is not for kind=alie, but for backdoor"),
    ],
)
def test_what_is_refused(data, keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, data=data(), **KEYS | keys)
