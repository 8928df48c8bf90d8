"""Losses and metrics that a config names are those that are handed over from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedray import RunResult, UserError, evaluate, simulate
from fedray.testing.contracts import SETTINGS, assert_same, small_source

FILE = """
import torch.nn.functional as F


def squares(logits, targets):
    return (logits.softmax(1) - F.one_hot(targets, logits.shape[1])).square().sum(1)


def certain(logits, targets):
    return logits.softmax(1).amax(1) > 0.5


number = 3
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def run(name: str, call: Any = None, **changes: Any) -> RunResult:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    own = {"algorithm.name": "fedavg", "run.rounds": 2, "run.output": "runs", "run.name": name}
    return simulate({**SETTINGS, **own, **keys}, data=small_source(), **(call or {}))


def functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(FILE, found)
    return found


def test_a_named_loss_is_that_from_python(mine):
    given = run("given", {"loss": functions()["squares"]})
    assert_same(run("named", task__loss="mine.py:squares"), given)
    assert given.summary["model_sha256"] != run("default").summary["model_sha256"]
    assert_same(run("torch", task__loss="torch.nn:CrossEntropyLoss"), run("object", {"loss": nn.CrossEntropyLoss()}))
    assert_same(run("ours", task__loss="cross_entropy"), run("default"))


def test_named_metrics_are_those_from_python():
    given = run("given", {"metrics": {"certain": functions()["certain"]}})
    assert_same(run("list", task__metrics=["mine.py:certain"]), given)
    assert_same(run("names", task__metrics={"certain": "mine.py:certain"}), given)
    both = run("both", {"metrics": {"certain": functions()["certain"]}}, task__metrics={"brier": "mine.py:squares"})
    assert {"test_certain", "test_brier"} < set(both.metrics)
    main = run("main", task__metrics={"brier": "mine.py:squares"}, task__metric="brier", task__mode="min")
    assert main.summary["metric"] == "brier"
    assert main.summary["final"] == main.metrics["test_brier"].iloc[-1]


def test_a_saved_model_is_evaluated_with_them():
    result = run("run", task__loss="mine.py:squares", task__metrics=["mine.py:certain"])
    found = evaluate(result.folder, data=small_source()).metrics
    last = result.metrics.iloc[-1]
    assert found["loss"] == last["test_loss"]
    assert found["certain"] == last["test_certain"]


@pytest.mark.parametrize(("old", "changed"), [("sum(1)", "mean(1)"), ("> 0.5", "> 0.6")])
def test_their_code_is_part_of_the_result(old, changed, mine):
    keys: dict[str, Any] = {"task__loss": "mine.py:squares", "task__metrics": ["mine.py:certain"]}
    run("run", {"callbacks": [lambda report: True]}, **keys)
    assert run("run", {"callbacks": [lambda report: True]}, **keys).status == "completed"
    mine.write_text(FILE.replace(old, changed))
    with pytest.raises(UserError, match=r"holds another run .(loss|metric certain) differs"):
        run("run", run__rounds=3, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task__loss": "crossentropy"}, "task.loss: there is no 'crossentropy' .did you mean 'cross_entropy'"),
        ({"task__loss": "mine.py:square"}, "task.loss=mine.py:square: mine.py has no 'square' .did you mean 'squares'"),
        ({"task__loss": "yours.py:squares"}, "task.loss=yours.py:squares: can't read the file"),
        ({"task__loss": "mine.py:number"}, "task.loss: mine.py:number must be a function or a class of such, not int"),
        ({"task__metrics": ["mine.py:certain", "mine.py:certain"]}, "task.metrics: two have the same name"),
        (
            {"task__metrics": {"accuracy": "mine.py:certain"}},
            "'accuracy' has the name of one of fedray's metrics",
        ),
        ({"task__metrics": "mine.py:certain"}, "task.metrics must be "),
    ],
)
def test_names_that_mean_nothing_are_told(keys, message):
    with pytest.raises(UserError, match=message):
        run("run", **keys)
