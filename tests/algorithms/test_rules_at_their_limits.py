"""What algorithms do where a formula of theirs has no value, and what they advise against. The mutants that the other
tests let live are in these places (tests/mutations.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedray.algorithms import Cohort, ServerState, Traffic, find_algorithm
from fedray.algorithms.pfedmo import _mixed
from fedray.core.vectors import Model


def made(name: str, **hyper: Any) -> Any:
    algorithm: Any = find_algorithm(name)
    return algorithm(algorithm.Hyper(**hyper))


def server_of(cohort: Cohort, **more: Any) -> Any:
    def unused(*arguments: Any) -> Any:
        raise AssertionError("nothing is trained here")

    model = Model(torch.zeros(3), 3)
    state = {"as_client": unused, "draw_inputs": unused, "model_of": unused, "initial_model": unused, **more}
    state = {"parameters_of": unused, **state}
    return ServerState({"x": model, "x_rep": model}, N=4, seed=0, server_lr=1.0, cohort=cohort, **state)


@pytest.mark.parametrize(
    ("name", "hyper", "run", "words"),
    [
        ("fedadam", {}, {"server_lr": 1.0}, "an adaptive server moves every parameter"),
        ("fedadam", {}, {"server_lr": 0.9}, None),
        ("fedhbm", {}, {"cohort": 4}, "the cohort is everybody"),
        ("fedhbm", {}, {"cohort": 3}, None),
        ("fedhbm", {"beta": 0.0}, {"cohort": 4}, None),
        ("fedtrip", {"xi_mode": "gap"}, {}, "pushes with xi > 1"),
        ("slowmo", {"buffer": "maintain"}, {}, "there is no buffer without train.momentum"),
        ("slowmo", {"buffer": "maintain"}, {"momentum": 0.9}, None),
        ("slowmo", {}, {}, None),
        ("fedtrip", {}, {}, None),
    ],
)
def test_advice_is_given_where_it_is_meant(name, hyper, run, words):
    lines = [*made(name, **hyper).advice(**{"momentum": 0.0, "cohort": 2, "clients": 4, "server_lr": 0.1} | run)]
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


def test_slowmo_needs_the_momentum_buffers_that_it_keeps_or_averages():
    reset, average = made("slowmo"), made("slowmo", buffer="average")
    assert reset.any_optimizer
    assert not average.any_optimizer
    assert average.traffic == Traffic(vectors_down=1, vectors_up=1)


def test_fedtrips_mu_is_shared_among_epochs_and_never_more_than_mu():
    """Three steps are one and a half epochs of two; a single step is no half of one."""
    algorithm = made("fedtrip", mu=0.6, mu_per="epoch")
    data = SimpleNamespace(epoch_steps=lambda: torch.tensor([[2.0], [2.0]]))
    found = algorithm._mu(SimpleNamespace(J=torch.tensor([[3.0], [1.0]]), data=data))
    assert found.flatten().tolist() == pytest.approx([0.4, 0.6])
    assert made("fedtrip", mu=0.6)._mu(None) == 0.6


def test_fedsiam_da_keeps_the_first_average_only_if_no_client_is_similar():
    algorithm, server = made("fedsiam_da"), server_of(Cohort((0, 1)))
    ones = Model(torch.ones(3), 3)
    algorithm.server_update(server, "reweigh", {"y": ones}, {"similarity": [0.0, 0.0]})
    assert torch.equal(server["x"].row, torch.zeros(3))
    algorithm.server_update(server, "reweigh", {"y": ones}, {"similarity": [0.3, 0.2]})
    assert torch.equal(server["x"].row, torch.ones(3))


class TestPFedMo:
    def test_the_representation_model_makes_as_many_steps_as_clients(self):
        algorithm = made("pfedmo")
        assert algorithm.resolved_defaults(2, 4, 7) == {"rep_steps": 7}
        assert algorithm.resolved_defaults(2, 4, None) == {}
        asked = []

        def as_client(server: Any, steps: int) -> Any:
            asked.append(steps)
            raise InterruptedError

        server = server_of(Cohort((0, 1), steps=(3, 6)), as_client=as_client)
        with pytest.raises(InterruptedError):
            algorithm.server_training(server)
        # Python rounds 4.5 to the even number
        assert asked == [4]

    def test_scores_of_clients(self):
        """eqs. 8-10: 1 - l_i / u_i, where u_i is the largest l_i so far; 0 for a client that never had a loss."""
        algorithm, server = made("pfedmo", pi=0.5), server_of(Cohort((0, 2), weights=(0.25, 0.75)))
        assert algorithm._mean_a(server) == 0
        algorithm.server_update(server, "score", {}, {"l": [0.0, 2.0]})
        assert server.client_scalars["score"] == [0.0, 0.0]
        algorithm.server_update(server, "score", {}, {"l": [0.0, 0.5]})
        assert server.client_scalars["score"] == [0.0, 0.75]
        assert algorithm._mean_a(server) == 0.75 * 0.5 * 0.75

    def test_constant_buffers_are_not_mixed(self):
        rows = torch.tensor([[1.0, math.inf, 4.0], [3.0, math.inf, 8.0]])
        found = _mixed(Model(rows[0], 1), Model(rows[1], 1), 0.25)
        assert torch.equal(found.row, torch.tensor([1.5, math.inf, 5.0]))


def test_the_probe_batch_is_drawn_as_the_hyper_parameters_say():
    asked: list[Any] = []

    def draw_inputs(server: Any, size: int, source: str) -> Any:
        asked.append((size, source))
        return torch.zeros(size, 2)

    logits = torch.zeros(1, 5, 3)
    objective = SimpleNamespace(class_logits=lambda at, x: logits)
    server = server_of(Cohort((0,)), draw_inputs=draw_inputs, as_client=lambda *_: SimpleNamespace(objective=objective))
    sent = made("pfedmo", probe_batch=5, probe_source="test").broadcast(server, "score").shared
    assert asked == [(5, "test")]
    assert torch.equal(sent["w"], torch.full((5, 3), 1 / 3))
