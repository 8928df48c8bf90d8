"""What every pool of workers promises, whoever its workers are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedray import simulate
from fedray.algorithms.fedavg import FedAvg
from fedray.config import load
from fedray.core.vectors import Model
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.cohorts import cohort_of_round
from fedray.engine.dealing import Dealer
from fedray.engine.opening import open_run
from fedray.engine.phase_tasks import Sent, task_of
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import computing_process, describe
from fedray.engine.ray.client_actor import create_actor
from fedray.engine.ray.pool import RayPool
from fedray.engine.ray.stored import store
from fedray.engine.run import Run
from fedray.engine.state.packing import Enclosed, Packed
from fedray.engine.sums import CohortSums
from fedray.engine.tasks import EvalTask, PhaseResult, PhaseTask
from fedray.engine.worker import Worker
from fedray.errors import ClientError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.testing.pools import DoublingPool, PicklingPool, travelled

IN_PROCESS: dict[str, type[LocalPool]] = {"local": LocalPool, "doubling": DoublingPool, "pickling": PicklingPool}
POOLS = (*IN_PROCESS, "ray")
"""A worker in this process, two that share nothing, two to which everything is pickled, and two Ray actors."""

EVERY_POOL = pytest.mark.parametrize("kind", POOLS)


class Failing(FedAvg):
    """Its clients fail in their first step."""

    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        raise ValueError("my own mistake")


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Opens runs whose clients are simulated by a pool of some kind; all are closed in the end."""
    closing: list[Any] = []

    def open_with(kind: str, **changes: Any) -> Run:
        if kind == "ray":
            request.getfixturevalue("ray_cluster")
        settings = {**SETTINGS, "algorithm.name": "fedsiam_da", "model.proj_dim": 8, **changes}
        settings |= {"engine.cpus_per_actor": 0.5, "run.output": str(tmp_path / f"{kind}-{len(closing)}")}
        experiment, data = resolve(load(settings), CustomObjects(small_source()))

        def make_pool(worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
            if kind != "ray":
                return IN_PROCESS[kind](worker), [describe("cpu")]
            import ray

            here = ray.get_runtime_context().get_node_id()
            worker.clients.states.node = here
            stored = store(data)
            actors = [create_actor(experiment, stored, here) for _ in range(2)]
            pool = RayPool(experiment, stored, actors, worker.clients.states, lambda line: None)
            return pool, pool.machines

        for context in (computing_process(1, False), open_run(experiment, data, make_pool, False)):
            closing.append(context)
            entered = context.__enter__()
        assert entered is not None
        return entered

    yield open_with
    for context in reversed(closing):
        context.__exit__(None, None, None)


def phase_tasks(run: Run) -> Iterator[tuple[str, list[PhaseTask]]]:
    """The tasks of the phases of round 1, each cut into as many as there are clients."""
    state, algorithm = run.state, run.experiment.algorithm
    server = state.server
    server.round, server.lr = 1, 0.1
    server.cohort = cohort_of_round(state, run.experiment, 1)
    state.earlier.remember(1, server["x"])
    sent: list[Sent] = []
    for phase in algorithm.phases:
        broadcast = algorithm.broadcast(server, phase)
        sent.append(Sent(run.pool.publish(broadcast.shared), broadcast.scalars))
        yield phase, [task_of([(i, i + 1)], 1.0, sent, state, algorithm) for i in range(len(server.cohort.ids))]


def bits(result: PhaseResult, pool: Any) -> dict[str, Any]:
    """All that a result says, as plain values that can be compared."""
    nodes = {
        (name, node): np.asarray(value).tobytes()
        for name, partial in result.sums.items()
        for node, value in partial.nodes.items()
    }
    states = [{name: a.tobytes() for name, a in pool.states.read(file).items()} for file in result.states]
    return {"nodes": nodes, "scalars": result.scalars, "log": result.log, "forms": result.forms, "states": states}


def results_of_round(run: Run, do: Callable[..., Any] | None = None) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of round 1 by phase and task, which ``do`` does, or the run's own pool."""
    do = do or run.pool.map
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for number, (phase, tasks) in enumerate(phase_tasks(run)):
        algorithm, state = run.experiment.algorithm, run.state
        sums = CohortSums(algorithm, phase, len(state.server.cohort.ids), state.layout, state.device)
        before = [repr(task) for task in tasks]
        returned = []
        for task, result in do(tasks, sticky=number > 0):
            returned.append(task)
            found[phase, task.start] = bits(result, run.pool)
            sums.add(task, result)
        assert sorted(task.start for task in returned) == [task.start for task in tasks]
        assert all(any(task is one for one in tasks) for task in returned)
        assert [repr(task) for task in tasks] == before
        algorithm.server_update(state.server, phase, sums.totals(), sums.scalars)
    return found


@EVERY_POOL
def test_each_task_is_done_once_with_the_same_result_as_anywhere(kind, opened):
    expected = results_of_round(opened("local"))
    assert results_of_round(opened(kind)) == expected
    assert len(expected) == 2 * len({start for _, start in expected})


@EVERY_POOL
def test_no_tasks_are_no_results(kind, opened):
    assert list(opened(kind).pool.map([])) == []


def test_a_later_phase_may_go_to_a_worker_that_did_not_do_the_earlier(opened):
    """The task holds the broadcasts of both phases, so that a worker that knows nothing can begin at the first."""
    run = opened("local")
    clients = run.worker.clients

    def by_strangers(tasks: list[PhaseTask], sticky: bool) -> Iterator[tuple[PhaseTask, Any]]:
        stranger = Worker(Clients(run.experiment, run.data, clients.states, fetch=clients.fetch))
        yield from ((task, stranger.run(task)) for task in tasks)

    assert results_of_round(run, by_strangers) == results_of_round(opened("local"))


@pytest.mark.parametrize("packed", [lambda start: True, lambda start: start % 2], ids=["all", "every other"])
def test_a_sum_does_not_depend_on_how_its_nodes_came(packed, opened):
    """As tensors of a worker in this process, or as arrays from another, which may be read-only."""
    run, expected = opened("local"), opened("local")

    def by_another_process(tasks: list[PhaseTask], sticky: bool) -> Iterator[tuple[PhaseTask, Any]]:
        for task, result in run.pool.map(tasks, sticky):
            assert all(
                isinstance(value, torch.Tensor) for each in result.sums.values() for value in each.nodes.values()
            )
            if packed(task.start):
                for partial in result.sums.values():
                    partial.pack()
                    for value in partial.nodes.values():
                        value.flags.writeable = False
            yield task, result

    assert results_of_round(run, by_another_process) == results_of_round(expected)
    for name, vector in Packed.of(run.state.server.vectors).arrays.items():
        assert torch.equal(vector, Packed.of(expected.state.server.vectors).arrays[name])


@EVERY_POOL
def test_what_is_kept_is_there_until_it_is_dropped(kind, opened, tmp_path):
    run = opened(kind)
    vectors = {"x": np.arange(5, dtype=np.float32), "m": np.ones((2, 3), np.float32)}
    handle = run.pool.keep("kept", vectors)
    for name, value in run.pool.fetch(handle).items():
        np.testing.assert_array_equal(value, vectors[name])
    run.pool.store(handle, tmp_path / "kept.safetensors")
    run.pool.drop([handle])
    for name, value in load_file(tmp_path / "kept.safetensors").items():
        np.testing.assert_array_equal(value, vectors[name])


@EVERY_POOL
def test_the_states_of_clients_can_be_stored(kind, opened, tmp_path):
    run = opened(kind)
    _, tasks = next(phase_tasks(run))
    files = [file for _, result in run.pool.map(tasks) for file in result.states]
    for number, file in enumerate(files):
        target = tmp_path / f"{number}.safetensors"
        run.pool.store(file, target)
        assert {name: a.tobytes() for name, a in load_file(target).items()} == {
            name: a.tobytes() for name, a in run.pool.states.read(file).items()
        }
    run.pool.drop(files)


@pytest.mark.parametrize("enclosed", [0, 1 << 20], ids=["by reference", "enclosed"])
@EVERY_POOL
def test_evaluation_goes_the_same_way(kind, enclosed, opened, monkeypatch):
    """Also when a broadcast is small enough to travel within the tasks, and when another one follows it."""
    monkeypatch.setattr("fedray.engine.ray.pool.ENCLOSED_BYTES", enclosed)
    run, expected = opened(kind), opened("local")
    model = run.state.server["x"]
    losses = []
    for other in (model, Model(model.row * 2, model.width)):
        task = EvalTask(run.pool.publish({"global": other}), ["global"], "test", 0, 40)
        ((same, result),) = run.pool.map([task])
        assert same is task
        ((_, alone),) = expected.pool.map([replace(task, broadcast=expected.pool.publish({"global": other}))])
        assert result.sums == alone.sums
        losses.append(result.sums[0]["loss"])
    assert losses[0] != losses[1]


def test_a_broadcast_is_as_it_was_when_it_was_published(opened):
    """A task of a later phase is sent the earlier phases' broadcasts too, and the server may have changed its own."""
    run = opened("ray")
    model = run.state.server["x"]
    handle = run.pool.publish({"global": model})
    assert isinstance(handle, Enclosed)
    before = model.row.clone()
    try:
        model.row.zero_()
        assert handle.packed.arrays["global"].tobytes() == before.numpy().tobytes()
    finally:
        model.row.copy_(before)


def test_samples_are_on_a_node_once(tmp_path, ray_cluster):
    """The process that started a run lets go of them when they are in Ray's store."""

    def held(report: Any) -> None:
        counts.append(sum(type(each) is FederatedData for each in gc.get_objects()))

    for kind in ("ray", "local"):
        counts: list[int] = []
        gc.collect()
        before = sum(type(each) is FederatedData for each in gc.get_objects())
        config = {**SETTINGS, "algorithm.name": "fedavg", "run.rounds": 2, "run.output": str(tmp_path / kind)}
        own = {"engine.kind": kind, "engine.actors": 1, "engine.cpus_per_actor": 0.1}
        simulate({**config, **own}, data=small_source(), callbacks=[held])
        assert counts == [before + (kind == "local")] * 2


@EVERY_POOL
def test_a_clients_own_error_names_the_client_and_the_phase(kind, opened):
    run = opened(kind, **{"algorithm.name": f"{__name__}:Failing"})
    _, tasks = next(phase_tasks(run))
    with pytest.raises(ClientError, match=r"client \d+ failed in phase train of round 1 on "):
        list(run.pool.map(tasks))


@EVERY_POOL
def test_a_pool_says_how_work_should_be_cut(kind, opened):
    run = opened(kind)
    assert run.pool.slots >= 1
    assert 0 < run.pool.task_fraction <= 1
    next(phase_tasks(run))
    dealer = Dealer(run.pool, run.experiment.training, None, run.state.layout.row_width)
    cohort = run.state.server.cohort
    positions = [i for blocks in dealer.cut(cohort) for start, stop in blocks for i in range(start, stop)]
    assert sorted(positions) == list(range(len(cohort.ids)))


def test_what_travelled_is_a_copy_that_nobody_may_write_to():
    """As whatever comes out of Ray's object store."""
    array = np.arange(3.0)
    copy = travelled({"array": array})["array"]
    array[0] = 7
    assert copy[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        copy[0] = 7


def test_no_ray_actor_is_left_when_a_pool_is_closed(opened):
    import ray
    from ray.exceptions import RayActorError

    run = opened("ray")
    actors = list(run.pool.actors)
    assert len(actors) == 2
    run.pool.close()
    for actor in actors:
        # Ray may still run what an actor is asked for just after it was told to end
        with pytest.raises(RayActorError):
            [ray.get(actor.describe.remote()) for _ in range(1000)]


def test_a_broadcast_arrives_as_it_was_sent():
    vectors = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    arrived = Packed.of(vectors).numpy().own(torch.device("cpu"))
    assert all(torch.equal(arrived[name], value) for name, value in vectors.items())
