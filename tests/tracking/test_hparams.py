"""TensorBoard's HParams table, as TensorBoard makes it: columns for what was set and for the algorithms, no others."""

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.backend_context import Context

from fedray import simulate
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source

BASE = {"model.name": "logistic", "engine.kind": "local", "data.clients": 5, "run.rounds": 2}


@pytest.fixture
def columns(tmp_path):
    """The names of the table's columns for all runs below the folder."""

    def read():
        runs = EventMultiplexer()
        runs.AddRunsFromDirectory(str(tmp_path))
        runs.Reload()
        provider = MultiplexerDataProvider(runs, str(tmp_path))
        context = Context(TBContext(logdir=str(tmp_path), multiplexer=runs, data_provider=provider))
        request = RequestContext()
        experiment = context.experiment_from_metadata(
            request,
            "",
            True,
            context.hparams_metadata(request, ""),
            context.hparams_from_data_provider(request, "", 99),
        )
        return {info.name for info in experiment.hparam_infos}, {info.name.tag for info in experiment.metric_infos}

    return read


def test_the_table_has_what_was_set_and_what_the_algorithms_take(columns, tmp_path):
    shared = BASE | {"run.output": str(tmp_path)}
    simulate(shared | {"run.name": "one", "algorithm.name": "fedavg"}, data=small_source())
    two = {"run.name": "two", "algorithm.name": "fedprox", "train.lr": 0.1}
    simulate(shared | two, data=small_source())
    found, metrics = columns()
    assert found == {*BASE, "algorithm.name", "algorithm.mu", "algorithm.anchor", "train.lr"}
    assert {"final/final_accuracy", "accuracy/test"} <= metrics


def test_values_are_the_resolved_ones():
    keys = {"train.participation": 0.4, "run.iterations": 40, "algorithm.name": "ghbm", "run.output": "elsewhere/"}
    del (base := dict(BASE))["run.rounds"]
    experiment, _ = resolve(load(base | keys), CustomObjects(small_source()))
    assert experiment.hyper_parameters == {
        "algorithm.beta": 0.9,
        "algorithm.name": "ghbm",
        "algorithm.tau": 2,
        "algorithm.warmup": "zero",
        "data.clients": 5,
        "engine.kind": "local",
        "model.name": "logistic",
        "run.iterations": 40,
        "train.participation": 0.4,
    }
