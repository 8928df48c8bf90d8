"""What pFedMo's server does itself: it trains on its public set, and asks its representation model for scores."""

from __future__ import annotations

import torch
from small_modules import Normed
from small_runs import opened_run


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
