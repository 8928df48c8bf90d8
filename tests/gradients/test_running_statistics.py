"""Models with buffers: running statistics are torch's own, and the server averages them with the clients' weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from client_stacks import CLOSE, client_phase, data, trained
from small_modules import Normed, made

from fedray import simulate
from fedray.algorithms import ClientPhase, find_algorithm
from fedray.client.phase import Stack
from fedray.core.local_training import LocalTraining
from fedray.core.samples import Samples
from fedray.core.task import cross_entropy
from fedray.gradients.loop import LoopNetwork
from fedray.testing.contracts import SETTINGS, assert_same, small_source


def test_running_statistics_are_torchs():
    module = made(Normed)
    network = LoopNetwork(copy.deepcopy(module))
    training = LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2)
    client = client_phase(network, data((12,), 16), [16], training, lr=0.1)
    sent = client.shared["x"].clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shapes = []
    for batch in client.data.batches():
        x = batch.x[0]
        shapes.append(len(x))
        if len(x) == 1:
            # no variance to normalise by: torch itself would refuse
            module.norm.eval()
        optimizer.zero_grad()
        cross_entropy(module(x), batch.y[0]).mean().backward()
        optimizer.step()
        module.norm.train()
    assert shapes == [5, 5, 5, 1] * 2
    carry = trained(find_algorithm("fedavg")(), client)
    assert carry["y"].has_buffers
    state = module.state_dict()
    assert state["norm.num_batches_tracked"] == 6
    for name, value in network.layout.named(carry["y"][0]).items():
        torch.testing.assert_close(value, state[name], **CLOSE)
    # the broadcast is never written to
    assert torch.equal(client.shared["x"].row, sent.row)


def two_clients(sizes: Sequence[int]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray]]:
    samples = data((12,), sum(sizes))
    client = np.repeat(np.arange(len(sizes)), sizes)
    return (samples.x.numpy(), samples.y.numpy(), client), (samples.x.numpy()[:8], np.arange(8) % 4)


OWN: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "data.partition.kind": "natural",
    "train.local_epochs": 1,
    "train.batch_size": 4,
    "train.lr": 0.1,
    "run.rounds": 1,
    "engine.kind": "local",
    "run.checkpoint_every": 0,
}


def test_buffers_are_averaged_with_the_clients_weights(tmp_path):
    sizes = [12, 4]
    train, test = two_clients(sizes)
    module = made(Normed)
    run = simulate({**OWN, "run.output": str(tmp_path)}, data=train, test=test, model=module)
    final = run.model().state_dict()
    finals = []
    for i, start in enumerate((0, 12)):
        samples = Samples(torch.from_numpy(train[0]), torch.from_numpy(train[1]))
        stack = Stack([i], [np.arange(start, start + sizes[i])], [sizes[i] // 4], [1.0], [0])
        training = LocalTraining(0, batch_size=4, local_steps=None, local_epochs=1)
        network = LoopNetwork(copy.deepcopy(module))
        shared = {"x": network.loaded()}
        client = ClientPhase(network, samples, training, stack, round=1, lr=0.1, clients=2, shared=shared)
        finals.append(network.layout.named(trained(find_algorithm("fedavg")(), client)["y"][0]))
    for name in ("norm.running_mean", "norm.running_var", "first.weight"):
        assert not torch.allclose(finals[0][name], finals[1][name])
        torch.testing.assert_close(final[name], 0.75 * finals[0][name] + 0.25 * finals[1][name], **CLOSE)
    # whole numbers are the first client's; what nobody changes stays as it was
    assert final["norm.num_batches_tracked"] == 3
    assert finals[1]["norm.num_batches_tracked"] == 1
    for name in ("places", "keep", "mask"):
        assert torch.equal(final[name], module.state_dict()[name])
        assert final[name].dtype == module.state_dict()[name].dtype


@pytest.mark.parametrize("algorithm", ["fedavg", "fednag", "pfedmo"])
def test_models_with_buffers_run_whichever_way_they_are_cut(algorithm, tmp_path):
    config = {**SETTINGS, "algorithm.name": algorithm}
    del config["model.name"], config["model.hidden"]
    runs = [
        simulate(
            {**config, "engine.chunk": size, "run.output": str(tmp_path / str(size))}, data=small_source(), model=Normed
        )
        for size in (1, 4)
    ]
    assert runs[0].summary["status"] == "completed"
    assert_same(*runs)
    assert torch.equal(runs[0].model().mask, torch.tensor([0.0, -torch.inf]))
