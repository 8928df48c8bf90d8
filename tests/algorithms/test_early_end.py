"""Runs that end early because of the main metric, and the best model: also resumed, killed and on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedray import UserError, simulate
from fedray.config import load
from fedray.testing.contracts import SETTINGS, small_source


def settings(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    common = {"algorithm.name": "fedavgm", "run.output": str(folder), "run.name": name, "run.rounds": 14}
    return {**SETTINGS, **common, "run.checkpoint_every": 1, "train.lr": 0.4, **changed}


def model_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run to its end, and the accuracy after each round."""
    folder = tmp_path_factory.mktemp("whole")
    result = simulate(settings(folder, "whole"), data=small_source())
    return result, result.metrics.set_index("round")["test_accuracy"]


def first(values, reached) -> int:
    return next(number for number, value in values.items() if reached(value))


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_first_round_that_reaches_a_value(engine, whole, tmp_path, request):
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    _, values = whole
    target = float(values.quantile(0.6))
    result = simulate(settings(tmp_path, "early", run__stop_at=target, engine__kind=engine), data=small_source())
    end = first(values, lambda value: value >= target)
    assert 1 < end < 14, "the example shows something"
    assert (result.summary["rounds"], result.summary["status"]) == (end, "completed")
    assert result.summary["stopped_by"] == "run.stop_at"
    plain = simulate(settings(tmp_path, "plain", run__rounds=end), data=small_source())
    assert plain.summary["model_sha256"] == result.summary["model_sha256"]
    assert plain.summary["stopped_by"] is None
    again = simulate(settings(tmp_path, "early", run__stop_at=target, engine__kind=engine), data=small_source())
    assert again.summary == result.summary, "it is finished"


def test_patience(whole, tmp_path):
    _, values = whole
    best, end = 1, None
    for number, value in values.items():
        if value > values[best]:
            best = number
        if number - best >= 2:
            end = number
            break
    assert end is not None, "the example shows something"
    result = simulate(settings(tmp_path, "early", run__patience=2), data=small_source())
    assert (result.summary["rounds"], result.summary["stopped_by"]) == (end, "run.patience")


def test_less_is_better(tmp_path):
    keys = {"task__metric": "loss", "run__stop_at": 1.0}
    result = simulate(settings(tmp_path, "loss", **keys), data=small_source())
    losses = result.metrics["test_loss"]
    assert losses.iloc[-1] <= 1.0
    assert (losses.iloc[:-1] > 1.0).all()


@pytest.mark.parametrize(
    ("column", "quantile", "less"),
    [
        ("train_accuracy", 0.6, False),
        ("test_loss", 0.2, True),
        ("bytes_up", 0.5, False),
        ("virtual_seconds", 0.3, False),
    ],
)
def test_the_first_round_in_which_a_column_reaches_a_value(column, quantile, less, tmp_path):
    keys = {"run__eval_train_samples": 40, "system__up_mbps": 1}
    values = simulate(settings(tmp_path, "whole", **keys), data=small_source()).metrics.set_index("round")[column]
    target = float(values.quantile(quantile))
    # the other column never gets there
    stop_at = {column: target, "flops": 1e30}
    result = simulate(settings(tmp_path, "early", run__stop_at=stop_at, **keys), data=small_source())
    end = first(values, lambda value: value <= target if less else value >= target)
    assert 1 < end < 14, "the example shows something"
    assert (result.summary["rounds"], result.summary["stopped_by"]) == (end, "run.stop_at")


def test_only_evaluated_rounds_end_a_run(tmp_path):
    """A cost is known in every round, but the run ends with a model that is evaluated."""
    keys = {"run__eval_every": 3, "system__latency_ms": 500, "run__stop_at": {"virtual_seconds": 3.5}}
    result = simulate(settings(tmp_path, "early", **keys), data=small_source())
    assert result.metrics["virtual_seconds"].tolist() == [1, 2, 3, 4, 5, 6]
    assert result.summary["stopped_by"] == "run.stop_at"
    assert result.summary["final"] == result.metrics["test_accuracy"].iloc[-1]


def test_single_clients_do_not_end_a_private_run(tmp_path):
    keys = {"privacy__noise": 1.0, "privacy__clip": 1.0, "algorithm__name": "fedavg"}
    with pytest.raises(UserError, match=r"^run.stop_at: with privacy, train_loss must not decide when the run ends"):
        simulate(settings(tmp_path, "private", run__stop_at={"train_loss": 0.5}, **keys), data=small_source())
    spent = simulate(settings(tmp_path, "spent", **keys), data=small_source()).metrics["epsilon"]
    result = simulate(settings(tmp_path, "early", run__stop_at={"epsilon": spent[4]}, **keys), data=small_source())
    assert result.summary["rounds"] == 5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "run.stop_at must be a number, or {column: number, ...}, not {}"),
        (
            {"train_acuracy": 1},
            "run.stop_at: there is no column 'train_acuracy' in this task .did you mean 'train_accuracy'",
        ),
        ({"train_accuracy": 1}, "run.stop_at: train_accuracy needs run.eval_train_samples"),
        ({"validation_accuracy": 1}, "run.stop_at: validation_accuracy needs data.validation_samples"),
        ({"virtual_seconds": 1}, "run.stop_at: virtual_seconds is not recorded without a virtual clock"),
        ({"epsilon": 1}, "run.stop_at: epsilon is not recorded without privacy"),
        ({"wall_seconds": 1}, "run.stop_at: there is no column 'wall_seconds'"),
        ({"train_loss": "a"}, "run.stop_at must be a number, or {column: number, ...}, not 'a'"),
    ],
)
def test_columns_that_are_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=f"^{message}"):
        simulate(settings(tmp_path, "refused", run__stop_at=keys), data=small_source())


def test_the_best_model_is_kept(whole, tmp_path):
    _, values = whole
    best = int(values.idxmax())
    result = simulate(settings(tmp_path, "best", run__save_best=True), data=small_source())
    shorter = simulate(settings(tmp_path, "shorter", run__rounds=best), data=small_source())
    kept = model_of(result.folder, "model-best.safetensors")
    expected = model_of(shorter.folder, "model.safetensors")
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert result.summary["model_sha256"] == whole[0].summary["model_sha256"], "to follow the metric changes nothing"


@pytest.mark.parametrize("key", ["run__patience", "run__stop_at"])
@pytest.mark.parametrize("at", [1, 2, None])
def test_resumed(at, key, whole, tmp_path):
    """What was seen before the break counts: the best value, when it was, and that the run had to end there."""

    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        if report.round == (at or straight.summary["rounds"]):
            raise Stop

    limit = 3 if key == "run__patience" else float(whole[1].max())
    keys = {key: limit, "run__save_best": True}
    straight = simulate(settings(tmp_path, "straight", **keys), data=small_source())
    assert straight.summary["rounds"] > (at or 1), "the example shows something"
    with pytest.raises(Stop):
        simulate(settings(tmp_path, "parts", **keys), data=small_source(), callbacks=[stop])
    parts = simulate(settings(tmp_path, "parts", **keys), data=small_source())
    for key in ("rounds", "stopped_by", "model_sha256"):
        assert parts.summary[key] == straight.summary[key]
    one, other = (model_of(each.folder, "model-best.safetensors") for each in (parts, straight))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"run.patience": 0}, "run.patience must be at least 1, not 0"),
        ({"run.stop_at": 0.9, "run.eval_every": 0}, "run.stop_at and run.patience need evaluations"),
        ({"run.save_best": True, "run.eval_test": False}, "run.save_best needs a test set"),
        ({"run.patiense": 3}, "did you mean 'run.patience'"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(UserError) as error:
        load(keys)
    assert message in str(error.value)


@pytest.mark.parametrize("tested", [False, True])
def test_on_the_validation_set(tested, tmp_path):
    """The test set decides nothing where there is a validation set."""
    keys = {"data__validation_samples": 60}
    whole = simulate(settings(tmp_path, "whole", **keys), data=small_source()).metrics.set_index("round")
    validation, test = whole["validation_accuracy"], whole["test_accuracy"]
    targets = [each for each in validation if each <= test.max()]
    target = next(each for each in targets if (validation >= each).idxmax() != (test >= each).idxmax())
    end = (validation >= target).idxmax()
    keys |= {"run__eval_test": tested, "run__stop_at": target}
    result = simulate(settings(tmp_path, "validation", **keys), data=small_source())
    assert (result.summary["rounds"], result.summary["stopped_by"]) == (end, "run.stop_at")


def test_an_unfinished_run_may_be_cut_short_where_it_has_not_been(tmp_path):
    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        if report.round == 4:
            raise Stop

    keys = {"run__eval_every": 0, "run__save_best": False}
    with pytest.raises(Stop):
        simulate(settings(tmp_path, "cut", **keys), data=small_source(), callbacks=[stop])
    for rounds in (3, 4):
        with pytest.raises(UserError, match=f"has gone on to round 4 of 14 already: run.rounds={rounds} can't end"):
            simulate(settings(tmp_path, "cut", run__rounds=rounds, **keys), data=small_source())
    cut = simulate(settings(tmp_path, "cut", run__rounds=5, **keys), data=small_source())
    straight = simulate(settings(tmp_path, "straight", run__rounds=5, **keys), data=small_source())
    assert cut.summary["model_sha256"] == straight.summary["model_sha256"]
    assert cut.summary["final"] == straight.summary["final"] is not None
