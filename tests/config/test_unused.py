"""A key that changes nothing, because of what other keys say, is named with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from fedray import UserError
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source


def lines(source: bool = True, **keys: Any) -> list[str]:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    own = CustomObjects(source=small_source()) if source else CustomObjects()
    return [note for note in resolve(load({**SETTINGS, **changed}), own)[0].notes if "changes nothing" in note]


SAMPLE = {"source": False, "data__source": "sample", "data__partition": {"kind": "iid"}}
UNUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "checkpoints": (
        {"run__checkpoint_every": 0, "run__keep_checkpoints": 5}, {"run__checkpoint_every": 2},
        "run.keep_checkpoints=5 changes nothing, as run.checkpoint_every=0 makes no checkpoints",
    ),
    "the time for a URI": (
        {"run__output_timeout": 3}, {"run__output": "s3://bucket/runs"},
        "run.output_timeout=3.0 changes nothing, as run.output is a folder and not a URI",
    ),
    "the last rounds": (
        {"run__last_rounds": 5, "run__rounds": 4}, {"run__rounds": 5},
        "run.last_rounds=5 changes nothing, as the run has only 4 rounds",
    ),
    "tokens": (
        {"task__ignore_index": 7}, {"task__ignore_index": -100},
        "task.ignore_index=7 changes nothing, as task.kind is classification and not tokens",
    ),
    "the width of no head": (
        {"model__head": "none", "model__proj_dim": 8}, {"model__head": "moon"},
        "model.proj_dim=8 changes nothing, as model.head is none",
    ),
    "the folder of data that come with fedray": (
        SAMPLE | {"data__root": "nowhere"}, {"data__root": None},
        "data.root='nowhere' changes nothing, as the source sample comes with fedray",
    ),
    "an overlap with nothing": (
        {"data__public_overlap": True, "data__public_samples": 0}, {"data__public_samples": 20},
        "data.public_overlap=true changes nothing, as there is no public set",
    ),
    "Ray's keys": (
        {"engine__actors": 4}, {"engine__kind": "ray"}, "engine.actors=4 changes nothing, as engine.kind is local"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSED)
def test_it_is_said_where_it_is_so(case):
    unused, used, line = UNUSED[case]
    assert lines(**{"algorithm__name": "fedavg", **unused}) == [f"warning: {line}"]
    assert lines(**{"algorithm__name": "fedavg", **unused, **used}) == []


def test_a_target_that_no_model_reaches():
    with pytest.raises(UserError, match=r"run.targets=85: accuracy is a fraction of 1 \(did you mean 0.85\?\)"):
        lines(run__targets=[0.5, 85])
