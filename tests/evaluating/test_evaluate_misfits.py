"""What a saved model and other data say of each other where they do not fit (``fedray evaluate``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedray import UserError, evaluate
from fedray.cli.main import main

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = np.arange(40) % 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more.weight": torch.zeros(2)}, "has a tensor 'more.weight', which the model does not have"),
        (
            {"linear.bias": torch.zeros(2, dtype=torch.complex64)},
            "linear.bias in .* is of torch.complex64, but of torch",
        ),
        (
            {"linear.bias": torch.zeros(2, dtype=torch.int64)},
            "linear.bias in .* is of torch.int64, but of torch.float32",
        ),
        (
            {"linear.bias": torch.full((2,), 1e300, dtype=torch.float64)},
            "linear.bias in .* has numbers that are not fin",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, message, tmp_path):
    torch.save({"linear.weight": torch.zeros(2, 6), "linear.bias": torch.zeros(2), **change}, tmp_path / "odd.pt")
    data = X[:40], Y[:40] % 2
    keys = ["model.name=logistic", "data.clients=1", "data.partition.kind=iid"]
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "odd.pt", data=data, test=data, overrides=keys)


@pytest.mark.parametrize("classes", [3, 2])
def test_inputs_of_another_shape(classes, tmp_path):
    """What is meant is said, and not only which tensors differ."""
    torch.save({"linear.weight": torch.zeros(3, 4), "linear.bias": torch.zeros(3)}, tmp_path / "four.pt")
    data = X[:40], np.arange(40) % classes
    keys = ["model.name=logistic", "data.clients=1", "data.partition.kind=iid"]
    message = {
        3: r"linear.weight is \[3, 4\] in .*four.pt, but \[3, 6\] in the model; the samples of .* have shape \[6\]$",
        2: r"the model in .*four.pt has 3 classes, but the targets of .* have 2$",
    }[classes]
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "four.pt", data=data, test=data, overrides=keys)


def test_lines_about_data_are_shown(tmp_path, capsys):
    torch.save({"linear.weight": torch.zeros(3, 2), "linear.bias": torch.zeros(3)}, tmp_path / "three.pt")
    for part, label in (("train", 0), ("test", 2)):
        rows = [f"1,{i},{(i % 2) or label}" for i in range(6)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["a,b,target", *rows]))
    words = ["data.source=csv", f"data.root={tmp_path}", "model.name=logistic", "data.clients=1"]
    assert main(["evaluate", str(tmp_path / "three.pt"), *words, "data.partition.kind=iid"]) == 0
    assert (
        "warning: 3 of the 6 samples of y_test have a label that no sample of y_train has (2)"
        in capsys.readouterr().out
    )
