"""The models of clients before they are averaged, which a run can save."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from small_runs import run

from fedray import UserError, evaluate
from fedray.testing.contracts import small_source

PICKLED = {"engine__kind": "fedray.testing.pickling:PicklingPool"}


@pytest.mark.parametrize(
    "keys", [{}, {"engine__vectorize": True, "engine__chunk": 3}, PICKLED], ids=["loop", "vmap", "workers"]
)
def test_their_mean_is_the_model_of_the_round(tmp_path, keys):
    keys = {"run__rounds": 2, "train__weighting": "uniform", "train__cohort_size": None, **keys}
    clients = list(range(6))
    saved = {"run__local_models_of": clients, "run__local_models_in": [2], "data__clients": 6}
    found = run(tmp_path / "run", **keys, **saved)
    (folder,) = (found.folder / "local").iterdir()
    assert folder.name == "round-00000002"
    models = [load_file(folder / f"client-{client}.safetensors") for client in clients]
    assert len(list(folder.iterdir())) == len(clients)
    for name, value in load_file(found.folder / "model.safetensors").items():
        local = torch.stack([model[name] for model in models])
        torch.testing.assert_close(local.double().mean(0).float(), value)
        assert not torch.equal(local[0], local[1])


def test_one_can_be_evaluated(tmp_path):
    found = run(tmp_path, run__rounds=2, run__local_models_of=[0], run__local_models_in=[2], train__cohort_size=None)
    (file,) = (found.folder / "local").rglob("*.safetensors")
    local, whole = (evaluate(path, data=small_source()).metrics for path in (file, found.folder))
    assert local.keys() == whole.keys()
    assert local != whole


def test_a_client_that_did_not_take_part_is_told(tmp_path):
    everybody = list(range(9))
    keys = {"run__rounds": 1, "train__cohort_size": 1, "run__local_models_of": everybody, "run__local_models_in": [1]}
    found = run(tmp_path, **keys)
    written = [path.stem for path in (found.folder / "local").rglob("*.safetensors")]
    assert len(written) == 1
    assert (found.folder / "log.txt").read_text().count("trained no model that began with round 1") == 8


def test_clients_and_rounds_are_given_together(tmp_path):
    with pytest.raises(UserError, match=r"give both of run\.local_models_of"):
        run(tmp_path, run__local_models_of=[1])


def test_clients_that_there_are_not(tmp_path):
    with pytest.raises(UserError, match=r"run\.local_models_of: there is no client 9, but 0 to 8"):
        run(tmp_path, run__local_models_of=[3, 9], run__local_models_in=[1])


def test_they_are_as_they_were_before_the_steps_of_an_upload(tmp_path):
    (tmp_path / "steps.py").write_text("def halve(rows, upload):\n    return rows / 2\n")
    saved = {"run__rounds": 1, "run__local_models_of": [0], "run__local_models_in": [1], "train__cohort_size": None}
    plain = run(tmp_path / "plain", **saved)
    halved = run(tmp_path / "halved", **saved, train__upload=[f"{tmp_path}/steps.py:halve"])
    one, other = (load_file(next((each.folder / "local").rglob("*.safetensors"))) for each in (plain, halved))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert plain.summary["model_sha256"] != halved.summary["model_sha256"]


def test_a_round_that_there_is_not(tmp_path):
    with pytest.raises(UserError, match=r"run\.local_models_in: round 7 is beyond the last one, 3"):
        run(tmp_path, run__local_models_of=[1], run__local_models_in=[7], run__rounds=3)


def test_rounds_that_are_over_are_refused(tmp_path):
    keys = {"run__rounds": 2, "train__cohort_size": None}
    run(tmp_path, **keys)
    with pytest.raises(UserError, match=r"local_models_in: round 1 of the run in .* is over"):
        run(tmp_path, **keys, run__local_models_of=[0], run__local_models_in=[1])
    longer = keys | {"run__rounds": 4, "run__local_models_of": [0], "run__local_models_in": [3]}
    assert len([*(run(tmp_path, **longer).folder / "local").rglob("*.safetensors")]) == 1
    assert run(tmp_path, **longer).status == "completed"
    with pytest.raises(UserError, match="round 3 of the run"):
        run(tmp_path, **longer | {"run__local_models_of": [0, 1]})
