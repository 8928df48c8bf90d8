"""Personal models that are saved at the end of a run."""

from __future__ import annotations

import pytest
import torch
from small_runs import run

from fedray import UserError, evaluate
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.result import RunResult


@pytest.mark.parametrize("algorithm", ["fedper", "ditto", "apfl", "perfedavg", "pfedmo", "ifca"])
def test_they_are_those_that_are_scored(algorithm, tmp_path):
    keys = {"train__cohort_size": 3, "run__rounds": 4, "run__personal_models_of": "all", "run__eval_clients": "all"}
    made, source = run(tmp_path / "local", algorithm=algorithm, **keys), small_source()
    _, data = resolve(load({**SETTINGS, "algorithm.name": algorithm}), CustomObjects(source=small_source()))
    rows = made.evaluation[made.evaluation["round"] == 4].set_index("client")
    for client in rows.index[rows.test_samples > 0]:
        places = data.client_test(client)
        logits = made.client_model(client)(torch.from_numpy(source.x_test[places]))
        score = float((logits.argmax(1).numpy() == source.y_test[places]).mean())
        assert rows.personal_accuracy[client] == pytest.approx(score)
    other = run(tmp_path / "pickled", algorithm=algorithm, engine__kind="fedray.testing.pickling:PicklingPool", **keys)
    for client in rows.index:
        for one, same in zip(
            made.client_model(client).parameters(), other.client_model(client).parameters(), strict=True
        ):
            assert torch.equal(one, same)


def test_evaluate_takes_one(tmp_path):
    made = run(tmp_path, algorithm="fedper", run__personal_models_of=[0, 2])
    assert sorted(each.name for each in (made.folder / "personal").iterdir()) == [
        "client-0.safetensors", "client-2.safetensors",
    ]  # fmt: skip
    with pytest.raises(
        UserError, match=r"no personal model of client 1, but of 2 clients: run\.personal_models_of names those"
    ):
        RunResult(made.folder, made.module).client_model(1)
    source = small_source()
    found = evaluate(
        made.folder / "personal/client-2.safetensors",
        data=(source.x_train, source.y_train),
        test=(source.x_test, source.y_test),
    )
    logits = made.client_model(2)(torch.from_numpy(source.x_test))
    assert found.metrics["accuracy"] == pytest.approx(float((logits.argmax(1).numpy() == source.y_test).mean()))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": "fedavg", "run__personal_models_of": [1]}, "algorithm.name=fedavg has no personal models"),
        ({"algorithm": "fedper", "run__personal_models_of": [99]}, "there is no client 99"),
        ({"algorithm": "fedper", "run__personal_models_of": [-1]}, "personal_models_of"),
    ],
)
def test_what_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, **keys)
