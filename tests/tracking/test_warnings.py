"""Decisions that change a result are warnings: of Python's where nothing is shown, and lines where it is."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import fedray
from fedray import FedrayWarning, simulate
from fedray.api import run_experiment
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.progress import Display
from fedray.tuning.view import View
from fedray.warning import PythonWarnings, as_warning

HERE = __file__


def settings(folder: Any, **keys: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(folder), "run.rounds": 1, **changed}


def told(call: Any) -> list[Any]:
    """Returns the warnings of a call, which are all of fedray's own."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [each for each in found if issubclass(each.category, FedrayWarning)]


def each_row(x: torch.Tensor) -> torch.Tensor:
    return x + 0


def not_a_loss_for_classes(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return logits.square().mean(1)


DECIDED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the public set": ({"algorithm__name": "pfedmo", "data__public_samples": "auto"}, {}, "data.public_samples=auto: "),
    "iterations that are no rounds": (
        {"train__local_epochs": None, "train__local_steps": 4, "run__rounds": None, "run__iterations": 6}, {},
        "run.iterations=6 is not a multiple of train.local_steps=4",
    ),
    "samples that are not used": (
        {"data__partition": {"kind": "shards", "shards_per_client": 2}, "data__clients": 7, "train__cohort_size": 2},
        {}, "shards: 6 of 300 samples are not used",
    ),
    "a key without effect": ({"data__least_test_samples": 5}, {}, "data.least_test_samples=5 changes nothing"),
    "a key that another one leaves without effect": (
        {"run__checkpoint_every": 0, "run__keep_checkpoints": 5}, {}, "run.keep_checkpoints=5 changes nothing, as run."
    ),
    "samples that count twice": (
        {"train__weighting": "samples", "train__sampling": "weighted"}, {},
        "train.weighting=samples: with train.sampling=weighted clients are drawn by their samples already",
    ),
    "another rule than the paper's": (
        {"algorithm__name": "feddyn", "train__weighting": "samples"}, {},
        "train.weighting=samples: the paper's rule of feddyn has uniform weights",
    ),
    "a window that never ends": (
        {"algorithm__name": "ghbm", "algorithm__tau": 3, "run__rounds": 3}, {}, "algorithm.tau=3 is not less than the 3"
    ),
    "a constant that is not used": (
        {"algorithm__name": "fedtrip", "algorithm__xi_const": 5}, {}, "algorithm.xi_const=5 changes nothing"
    ),
    "an algorithm's advice": (
        {"algorithm__name": "fednag", "train__momentum": 0.5}, {}, "train.momentum=0.5: the paper's clients have none"
    ),
    "another task": (
        {}, {"model": lambda input_shape, classes: nn.Linear(12, 7), "loss": not_a_loss_for_classes},
        "task.kind=other, because model",
    ),
    "a transform that draws nothing": ({}, {"transform": each_row}, "transform draws no random numbers here"),
    "what can't be replayed": (
        {"engine__replay": True, "train__precision": "bf16"}, {}, "engine.replay=true: gradients are not replayed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECIDED)
def test_a_decision_is_a_warning_at_the_line_of_the_call(case, tmp_path, capsys):
    keys, own, expected = DECIDED[case]
    config = settings(tmp_path, **keys)
    if "model" in own:
        config = {key: value for key, value in config.items() if not key.startswith("model.")}
    (warning,) = told(lambda: simulate(config, data=small_source(), **own))
    text, line = str(warning.message), call_line()
    assert text.startswith(expected)
    assert (warning.filename, warning.lineno) == (HERE, line)
    assert capsys.readouterr().out == ""
    log = next(tmp_path.glob("*/log.txt")).read_text()
    assert f"warning: {text}" in log


def call_line() -> int:
    """Returns the number of the line in which the test above calls fedray."""
    lines = Path(HERE).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if "told(lambda: simulate(config, data=small" in line)


def test_nothing_is_said_of_what_changes_no_result(tmp_path):
    """Samples that are mapped from files; a run that is finished."""
    config = settings(tmp_path, data__access="mapped", data__partition={"kind": "iid"})
    for _ in range(2):
        assert told(lambda: simulate(config, data=small_source())) == []


def test_a_run_that_is_shown_shows_its_warnings(tmp_path, capsys):
    config = settings(tmp_path, data__least_test_samples=5)
    assert told(lambda: simulate(config, data=small_source(), verbose=True)) == []
    assert "warning: data.least_test_samples=5 changes nothing" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_run_that_diverged(tmp_path, vectorize):
    config = settings(tmp_path, train__lr=1e30, run__rounds=9, engine__vectorize=vectorize)
    results: list[Any] = []
    for _ in range(2):
        (warning,) = told(lambda: results.append(simulate(config, data=small_source())))
        assert str(warning.message).startswith("diverged after 1 round: the loss or the model is not finite any more")
    assert [result.status for result in results] == ["diverged"] * 2
    assert simulate(settings(tmp_path, run__name="other"), data=small_source()).status == "completed"


def test_runs_that_others_start_say_nothing(tmp_path):
    """The trials of a sweep are such runs."""
    config = load(settings(tmp_path, train__lr=1e30, run__rounds=9))
    assert told(lambda: run_experiment(config, lambda: CustomObjects(source=small_source()))) == []


def test_a_run_that_is_shown_ends_with_that_it_diverged(tmp_path, capsys):
    simulate(settings(tmp_path, train__lr=1e30, run__name="run"), data=small_source(), verbose=True)
    assert "warning: diverged after 1 round: the loss or the model is not finite" in capsys.readouterr().out


def test_an_error_if_the_user_wants_one(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedrayWarning)
        with pytest.raises(FedrayWarning, match="diverged after 1 round"):
            simulate(settings(tmp_path, train__lr=1e30), data=small_source())


def test_each_once_from_any_thread_and_only_warnings():
    warn = PythonWarnings()
    shown: list[Any] = [Display(quiet=True, warn=warn), View(quiet=True, warn=warn)]

    def say() -> None:
        for each in (*shown, Display(quiet=True), View(quiet=True)):
            each.say("a line")
            each.say(as_warning("a decision"))
            each.say(as_warning(as_warning("a decision")))

    def in_a_thread() -> None:
        thread = threading.Thread(target=say)
        thread.start()
        thread.join()

    (warning,) = told(in_a_thread)
    assert (str(warning.message), warning.filename) == ("a decision", HERE)
    with Console(record=True, quiet=False) as console, console.capture() as captured:
        Display(console, warn=warn).say(as_warning("another"))
    assert captured.get().strip() == "warning: another"


def test_evaluations(tmp_path):
    run = simulate(settings(tmp_path), data=small_source(), loss=nn.CrossEntropyLoss())
    (warning,) = told(lambda: fedray.evaluate(run.folder, data=small_source()))
    assert str(warning.message) == "the run got its loss from Python; here they are the task's own"
    assert warning.filename == HERE
    lines: list[str] = []
    assert told(lambda: fedray.evaluate(run.folder, data=small_source(), say=lines.append)) == []
    assert f"warning: {warning.message}" in lines
