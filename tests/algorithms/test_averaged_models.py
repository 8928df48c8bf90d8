"""FedDyn and AdaBest log the accuracy of the model that they don't evaluate, as their authors' code does."""

import numpy as np
import pytest
import reference_runs
import references_variance
from reference_runs import EVERYTHING, cohorts_of, make_start
from references import accuracy

from fedray import simulate
from fedray.testing.contracts import SETTINGS, small_source

HYPER = {"feddyn": {"alpha": 0.3}, "adabest": {"mu": 0.4, "beta": 0.85}}


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    return make_start(data, tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize(
    ("name", "option", "column"),
    [
        ("feddyn", {}, "averaged_accuracy"),
        ("feddyn", {"eval": "avg_selected"}, "server_accuracy"),
        ("adabest", {}, "averaged_accuracy"),
    ],
)
def test_the_other_model_is_that_of_the_float64_reference(data, start, tmp_path, name, option, column):
    vector, path = start
    hyper = HYPER[name] | option
    keys = {f"algorithm.{key}": value for key, value in hyper.items()}
    keys |= {"train.cohort_size": 2, "train.weighting": "uniform", "model.weights": str(path)}
    train = reference_runs.Train(**(vars(EVERYTHING) | {"weighting": "uniform"}))
    result = reference_runs.run(data, tmp_path, name, train, **keys)
    rounds = getattr(references_variance, name)(data.problem, cohorts_of(result), train, vector, **hyper)
    other = [r.x_mean if column == "averaged_accuracy" else r.server["x"] for r in rounds]
    expected = [accuracy(model, data.x_test, data.y_test) for model in other]
    np.testing.assert_allclose(result.metrics[column], expected, atol=1e-9)
    assert (result.metrics[column] != result.metrics["test_accuracy"]).any()
    assert not {"averaged_accuracy", "server_accuracy"} - {column} & set(result.metrics.columns)


def test_one_runs_evaluated_model_is_the_others_monitor(tmp_path):
    """What is evaluated changes nothing in training: FedDyn's two runs show the same two models."""
    runs = [
        simulate(
            {**SETTINGS, "algorithm.name": "feddyn", "algorithm.eval": of, "run.output": str(tmp_path / of)},
            data=small_source(),
        ).metrics
        for of in ("server", "avg_selected")
    ]
    assert runs[0]["test_accuracy"].tolist() == runs[1]["server_accuracy"].tolist()
    assert runs[0]["averaged_accuracy"].tolist() == runs[1]["test_accuracy"].tolist()
