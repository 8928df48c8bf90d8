"""What pFedMo's server does itself: it trains on its public set, and asks its representation model for scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from small_modules import Normed
from small_runs import opened_run

from fedray.algorithms.pfedmo import PFedMo


def test_the_server_takes_as_many_steps_on_its_public_set_as_it_is_told(tmp_path):
    """This holds under local_epochs too, where its clients' numbers of steps follow from their sizes."""
    for found in opened_run(tmp_path, "pfedmo"):
        assert found.experiment.training.local_epochs == 1
        for steps in (1, 3, 40):
            client = found.worker.server_as_client(found.state.server, steps)
            batches = list(client.data.batches())
            assert len(batches) == steps
            assert client.J.item() == steps
            assert all(batch.counts is None and batch.y.shape == (1, 8) for batch in batches)


def test_the_representation_model_is_asked_with_its_own_buffers(tmp_path):
    """It does not matter which model's buffers the server's module has held before."""
    for found in opened_run(tmp_path, "pfedmo", model=Normed):
        rounds = found.rounds()
        next(rounds)
        server, network = found.state.server, found.worker.clients.network
        asked = found.experiment.algorithm.broadcast(server, "score").shared
        other = server["x"].clone()
        other.buffers.fill_(3.0)
        network.load(other)
        again = found.experiment.algorithm.broadcast(server, "score").shared
        assert torch.equal(asked["w"], again["w"])
        module = Normed().eval()
        module.load_state_dict(network.layout.named(server["x_rep"]))
        with torch.no_grad():
            torch.testing.assert_close(asked["w"], torch.softmax(module(asked["inputs"]), 1))


def test_a_score_is_a_mean_over_samples_and_their_positions() -> None:
    """A model of tokens has logits for each position of a sample."""
    rng = torch.Generator().manual_seed(3)
    logits, w = torch.randn(2, 3, 4, 5, generator=rng), torch.rand(3, 4, 5, generator=rng)
    objective = SimpleNamespace(class_logits=lambda model, inputs: logits)
    client: Any = SimpleNamespace(objective=objective, kept={"x": None}, shared={"inputs": None, "w": w})
    scores = PFedMo(PFedMo.Hyper()).score(client).scalars["l"]
    torch.testing.assert_close(scores, -(w * logits.log_softmax(-1)).sum(-1).mean((1, 2))[:, None])
