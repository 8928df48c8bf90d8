"""The public set may go to the clients, so that methods with and without it see the same labelled samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

import fedray
from fedray.config import load
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source

FEDAVG = {**SETTINGS, "algorithm.name": "fedavg"}


def federated(source=None, **more):
    return resolve(load(FEDAVG | more), CustomObjects(source or small_source()))[1]


def test_dealt_public_samples_come_on_top_of_the_clients_own():
    """Each public sample goes to one client; without them every client holds what it held before, in the same order."""
    held_out = federated()
    dealt = federated(**{"data.public_to": "clients"})
    assert len(held_out.public) == 60
    assert len(dealt.public) == 0
    for client in range(held_out.clients):
        own = set(held_out.client(client).tolist())
        assert own <= set(dealt.client(client).tolist())
        assert set(dealt.client(client).tolist()) - own <= set(held_out.public.tolist())
        assert (np.diff(dealt.client(client)) > 0).all()
    assert sorted(dealt.indices.tolist()) == sorted([*held_out.indices.tolist(), *held_out.public.tolist()])
    gained = dealt.sizes() - held_out.sizes()
    assert gained.sum() == 60
    assert set(gained.tolist()) == {6, 7}
    assert (dealt.validation == held_out.validation).all()


def test_a_public_set_that_overlaps_takes_nothing_from_the_clients():
    held_out, without = federated(), federated(**{"data.public_samples": 0})
    overlapping = federated(**{"data.public_overlap": True})
    assert overlapping.public.tolist() == held_out.public.tolist()
    assert overlapping.partition_hash == without.partition_hash
    assert set(overlapping.public.tolist()) <= set(overlapping.indices.tolist())
    assert not set(overlapping.validation.tolist()) & set(overlapping.indices.tolist())
    # all samples that are not for validation
    whole = federated(**{"data.public_overlap": True, "data.public_samples": 360, "data.validation_samples": 0})
    assert len(whole.public) == len(whole.indices) == 360


def test_where_a_public_set_can_not_overlap():
    with pytest.raises(UserError, match=r"data\.public_overlap=true is for a public set of the server"):
        federated(**{"data.public_overlap": True, "data.public_to": "clients"})
    source = replace(small_source(), x_public=small_source().x_test[:20], y_public=small_source().y_test[:20])
    with pytest.raises(UserError, match=r"data\.public_overlap=true: the public set that comes with"):
        federated(source, **{"data.public_samples": 20, "data.public_overlap": True})


def test_clients_without_samples_are_dealt_none():
    settings = {"data.clients": 60, "data.partition.alpha": 0.02, "data.partition.min_samples": 0}
    held_out = federated(**settings)
    dealt = federated(**settings, **{"data.public_to": "clients"})
    assert (held_out.sizes() == 0).any()
    assert ((held_out.sizes() > 0) == (dealt.sizes() > 0)).all()
    assert dealt.active == held_out.active


def test_a_sources_own_public_set_is_dealt_too():
    source = small_source()
    source = replace(source, x_public=source.x_test[:20], y_public=source.y_test[:20])
    dealt = federated(source, **{"data.public_samples": 20, "data.public_to": "clients"})
    assert sorted(dealt.indices.tolist()) == list(range(380))


def test_the_deal_follows_data_seed_alone():
    dealt = {"data.public_to": "clients", "data.seed": 3}
    assert federated(**dealt).partition_hash == federated(**dealt, **{"run.seed": 5}).partition_hash
    assert federated(**dealt).partition_hash != federated(**dealt | {"data.seed": 4}).partition_hash


def test_a_run_on_dealt_samples_is_repeated_from_its_own_config(tmp_path):
    settings = FEDAVG | {"data.public_to": "clients", "run.rounds": 2, "run.output": str(tmp_path / "a")}
    first = fedray.simulate(settings, data=small_source())
    config = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert (config["data"]["public_samples"], config["data"]["public_to"]) == (60, "clients")
    config["run"]["output"] = str(tmp_path / "b")
    again = fedray.simulate(config, data=small_source())
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    held_out = fedray.simulate(settings | {"data.public_to": "server", "run.name": "s"}, data=small_source())
    assert held_out.summary["model_sha256"] != first.summary["model_sha256"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm.name": "pfedmo"}, "data.public_to=clients: pfedmo trains a model on the public set; use server"),
        ({"data.public_samples": 0}, "data.public_to=clients: there is no public set to distribute"),
        ({"data.public_samples": "auto"}, "data.public_to=clients: there is no public set to distribute"),
    ],
)
def test_what_can_not_be_dealt_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        federated(**{"data.public_to": "clients"} | settings)


def test_a_server_that_trains_on_a_public_set_can_not_do_without(tmp_path):
    """Nor where the source has one of its own."""
    source = small_source()
    own = replace(source, x_public=source.x_train[:20], y_public=source.y_train[:20])
    settings = {**SETTINGS, "algorithm.name": "pfedmo", "data.public_samples": 0, "run.output": str(tmp_path)}
    for each in (source, own):
        with pytest.raises(UserError, match=r"data.public_samples=0: pfedmo trains a model on a public set; use auto"):
            fedray.simulate(settings, data=each)


def test_too_few_samples_for_a_public_set():
    x, y = np.random.default_rng(0).normal(size=(6, 3)), np.arange(6) % 2
    settings = {"algorithm.name": "pfedmo", "engine.kind": "local", "data.clients": 1, "data.partition.kind": "iid"}
    with pytest.raises(UserError, match=r"pfedmo trains a model on a public set, and a tenth of 6 training samples"):
        fedray.simulate(settings, data=(x, y), test=(x, y))
