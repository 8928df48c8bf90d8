"""What clients keep of their optimizer from one round to the next."""

from __future__ import annotations

import re

import pytest
from small_runs import run

from fedray import UserError
from fedray.testing.contracts import assert_same


def test_momentum_that_is_kept_survives_a_pause_and_other_workers(tmp_path):
    keys = {"train__momentum": 0.9, "train__momentum_reset": "never", "run__rounds": 6, "run__checkpoint_every": 1}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", **keys))
    assert_same(whole, run(tmp_path / "pickled", engine__kind="fedray.testing.pickling:PicklingPool", **keys))
    anew = run(tmp_path / "anew", **keys | {"train__momentum_reset": "round"})
    assert anew.summary["model_sha256"] != whole.summary["model_sha256"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"train__momentum_reset": "never"}, "train.momentum_reset=never needs train.momentum above 0"),
        (
            {"train__momentum_reset": "never", "train__momentum": 0.9, "algorithm": "scaffold"},
            "train.momentum_reset=never: the rules of algorithm.name=scaffold count on a momentum that is new in each",
        ),
        ({"train__momentum_reset": "nver", "train__momentum": 0.9}, "(did you mean 'never'?)"),
    ],
)
def test_where_momentum_can_not_be_kept(tmp_path, keys, line):
    with pytest.raises(UserError, match=re.escape(line)):
        run(tmp_path, **keys)
