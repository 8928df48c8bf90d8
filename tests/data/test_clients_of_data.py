"""Clients that come with the data: they are used, their names are kept, and what is not used is said."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import yaml

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.federated import federate
from fedray.data.partitions import plot
from fedray.data.partitions.holdings import Holdings
from fedray.data.sources.source import Source, from_fields, load_source
from fedray.data.sources.user_data import user_source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve

rng = np.random.default_rng(1)
X, Y = rng.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
XT, YT = X[:12], Y[:12]
STATIONS = np.array(["f", "a", "e", "b"])[np.arange(60) % 4]
FAST = {
    "algorithm.name": "fedavg", "model.name": "logistic", "run.rounds": 1, "train.local_steps": 2,
    "engine.kind": "local",
}  # fmt: skip


def run(tmp_path, data=(X, Y, STATIONS), test=(XT, YT), **keys):
    config = {**FAST, "run.output": str(tmp_path), **{key.replace("__", "."): value for key, value in keys.items()}}
    result = simulate(config, data=data, test=test)
    log = (result.folder / "log.txt").read_text()
    return result, yaml.safe_load((result.folder / "config.yaml").read_text()), log


def test_given_clients_are_used_and_named(tmp_path):
    result, config, log = run(tmp_path)
    assert (config["data"]["partition"]["kind"], config["data"]["clients"]) == ("natural", 4)
    clients = result.clients
    assert clients["client"].tolist() == [0, 1, 2, 3]
    assert clients["client_name"].tolist() == ["a", "b", "e", "f"]
    assert list(clients.columns)[:5] == ["round", "client", "client_name", "samples", "steps"]
    assert "not use" not in log


def test_data_without_clients_are_dealt_out_as_before(tmp_path):
    result, config, _ = run(tmp_path, data=(X, Y), data__clients=3)
    assert config["data"]["partition"]["kind"] == "dirichlet"
    assert list(result.clients.columns)[:4] == ["round", "client", "samples", "steps"]
    explicit, *_ = run(tmp_path / "same", data=(X, Y), data__clients=3, data__partition__kind="dirichlet")
    assert explicit.summary["model_sha256"] == result.summary["model_sha256"]


def test_what_is_not_used_is_said(tmp_path):
    result, _, log = run(tmp_path / "iid", data__partition__kind="iid", data__clients=3)
    assert "the data say whose each sample is, but data.partition.kind=iid does not use that" in log
    assert "client_name" not in result.clients
    _, _, log = run(tmp_path / "many", data__clients=9)
    assert "data.clients=9 is not used: 4 clients come with the data" in log
    with pytest.raises(
        UserError, match=r"alpha does not apply to data.partition.kind=natural .auto: clients come with"
    ):
        run(tmp_path / "alpha", data__partition__alpha=0.3)


def test_a_resolved_config_means_the_same(tmp_path):
    source = user_source((X, Y, STATIONS), (XT, YT))
    first, data = resolve(load(FAST), CustomObjects(source))
    again, same = resolve(load(first.config.model_dump()), CustomObjects(source))
    assert again.config == first.config
    assert same.notes == data.notes == ()
    assert same.partition_hash == data.partition_hash


def frame(x, y, **more):
    return pd.DataFrame(x, columns=list("abcd")).assign(label=y, **more)


def test_a_mistyped_client_column_is_named():
    test = frame(XT, YT)
    with pytest.raises(UserError, match=r"data has no column 'clint' .client_column. .did you mean 'client'"):
        user_source(frame(X, Y, client=STATIONS), test, client_column="clint")
    for near in ("Client", "client_id", "clients"):
        with pytest.raises(UserError, match=f"no column 'client', but '{near}': give client_column='{near}'"):
            user_source(frame(X, Y, **{near: np.arange(60) % 4}), test)
        assert user_source(frame(X, Y, **{near: STATIONS}), test, client_column=near).client_names == tuple("abef")
    assert user_source(frame(X, Y, patient=0), frame(XT, YT, patient=0)).client_train is None


def test_test_samples_of_unknown_clients_are_counted(tmp_path):
    _, _, log = run(tmp_path, test=(XT, YT, np.array(["a", "q", "b"] * 4)))
    assert "4 of 12 test samples are those of no client that trains" in log


def test_clients_keep_their_names_in_every_form(tmp_path):
    given = {"x_train": X, "y_train": Y, "x_test": XT, "y_test": YT, "client_train": STATIONS}
    np.savez(tmp_path / "mine.npz", **given)
    sources = [
        user_source((X, Y, STATIONS), (XT, YT)),
        user_source((X, Y, pd.Series(STATIONS, dtype="category")), (XT, YT)),
        user_source(frame(X, Y, client=STATIONS), frame(XT, YT)),
        from_fields("mine", given),
        load_source("npz", str(tmp_path / "mine.npz")),
    ]
    for source in sources:
        data = federate(source, load().data, 0, 0)
        assert data.client_names == ("a", "b", "e", "f")
        assert all((STATIONS[data.client(i)] == name).all() for i, name in enumerate(data.client_names))


def test_numbers_of_clients_are_their_names_unless_they_count_from_zero():
    def names(owners, **more):
        return federate(Source("mine", X, Y, XT, YT, 3, client_train=owners, **more), load().data, 0, 0).client_names

    assert names(np.arange(60) % 4) is None
    assert names(np.arange(60) % 4 * 10 + 7) == ("7", "17", "27", "37")
    # client 2 has no samples
    assert names(np.where(np.arange(60) % 2, 3, 0), client_names=("a", "b", "c", "d")) == ("a", "d")


def test_a_client_that_is_missing_or_has_no_name_is_named():
    with pytest.raises(UserError, match="client_train has nothing in row 3"):
        user_source((X, Y, np.where(np.arange(60) == 3, None, STATIONS)), (XT, YT))
    fields = {"x_train": X, "y_train": Y, "x_test": XT, "y_test": YT}
    with pytest.raises(UserError, match="client_train has client 2 in row 2, but client_names has 2 names"):
        from_fields("mine", {**fields, "client_train": np.arange(60) % 4, "client_names": ["a", "b"]})
    with pytest.raises(UserError, match="has client_names but lacks client_train"):
        from_fields("mine", {**fields, "client_names": ["a", "b"]})


@pytest.mark.parametrize("test", [[(XT, YT)], (XT, YT, YT)])
def test_clients_of_test_samples_alone_are_refused_in_the_users_words(test):
    with pytest.raises(UserError, match=r"^test=... says which client each .* but data=... does not: give both in the"):
        user_source((X, Y), test)


@pytest.mark.parametrize("clients", [4, 50])
def test_pictures_show_names(clients, tmp_path):
    owners = np.array([f"house {i:02}" for i in range(clients)])[np.arange(60) % clients]
    labels = np.array(["walk", "_sit", "lie $1$ and rest for a while"])[Y]
    fields = {"x_train": X, "y_train": labels, "x_test": XT, "y_test": labels[:12], "client_train": owners}
    data = federate(from_fields("mine", fields), load().data, 0, 0)
    plot.draw_holdings(Holdings.of(data)).savefig(tmp_path / "who.svg")
    # the texts are comments beside the outlines of their letters
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "who.svg").read_text())
    assert {"walk", "lie $1$ and rest fo…"} <= {text.replace(r"\$", "$") for text in texts}
    assert ("house 03" in texts) == (clients == 4)


def test_clients_keep_their_names_where_they_are_scored(tmp_path):
    from fedray import simulate

    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    names = np.array(["ann", "bob"])[np.arange(40) // 20]
    keys = {"engine.kind": "local", "algorithm.name": "fedavg", "model.name": "logistic", "run.output": str(tmp_path)}
    keys |= {"run.rounds": 1, "train.local_steps": 1, "run.eval_clients": "all"}
    run = simulate(keys, data=(x, y, names), test=(x, y, names))
    assert run.evaluation["client_name"].tolist() == ["ann", "bob"]
    assert run.evaluation["test_samples"].tolist() == [20, 20]


def test_a_client_below_zero_is_refused_in_training():
    from fedray.data.sources.user_data import user_source

    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    with pytest.raises(UserError, match="client_train has client -1 in row 2; clients are 0, 1, 2"):
        user_source((x, y, np.array([0, 1, -1, 1])), (x, y))


def test_clients_that_lose_all_their_samples_are_counted():
    from fedray.config import load
    from fedray.data.federated import federate
    from fedray.data.sources.user_data import user_source

    x, y = np.zeros((8, 2), np.float32), np.arange(8) % 2
    source = user_source((x, y, np.arange(8)), (x, y))
    data = federate(source, load({"data.validation_samples": 3}).data, 0, 0)
    assert data.clients == 5
    assert any(note.startswith("warning: 3 of the data's 8 clients have no samples left") for note in data.notes)
