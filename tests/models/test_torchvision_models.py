"""Every algorithm trains the models of large experiments: MobileNetV2 and the Vision Transformer, made small here."""

from __future__ import annotations

import numpy as np
import pytest
from torchvision.models import VisionTransformer, mobilenet_v2

from fedray import simulate
from fedray.algorithms import known_algorithms


def mobilenet(input_shape, classes):
    return mobilenet_v2(num_classes=classes, width_mult=0.1)


def transformer(input_shape, classes):
    return VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=classes)


@pytest.mark.parametrize("model", [pytest.param(mobilenet, marks=pytest.mark.slow), transformer])
@pytest.mark.parametrize("algorithm", sorted(known_algorithms()))
def test_every_algorithm_trains_it(algorithm, model, tmp_path):
    rng = np.random.default_rng(0)
    x, y, owner = rng.integers(0, 256, (40, 3, 32, 32), dtype=np.uint8), rng.integers(0, 4, 40), np.arange(32) % 4
    settings = {
        "run.output": str(tmp_path), "run.rounds": 3, "algorithm.name": algorithm, "train.cohort_size": 2,
        "train.local_steps": 1, "train.batch_size": 4, "train.lr": 0.001, "engine.kind": "local", "run.eval_every": 3,
    }  # fmt: skip
    result = simulate(settings, data=(x[:32], y[:32], owner), test=(x[32:], y[32:]), model=model)
    assert result.summary["status"] == "completed"
    assert result.metrics["train_loss"].notna().all()
