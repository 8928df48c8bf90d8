"""What every pool of workers promises, whoever its workers are."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedray import UserError, simulate
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import describe
from fedray.engine.ray.client_actor import create_actor
from fedray.engine.ray.copies import travelled
from fedray.engine.ray.pool import RayPool
from fedray.engine.ray.stored import store
from fedray.engine.state.packing import Enclosed, Packed
from fedray.engine.tasks import AnyTask, PhaseTask
from fedray.engine.worker import Worker
from fedray.testing import PoolContract
from fedray.testing.contracts import SETTINGS, small_source
from fedray.testing.pickling import DoublingPool
from fedray.testing.pools import results_of_round


class TestLocal(PoolContract):
    """A worker in this process."""

    pool = "local"

    @pytest.mark.parametrize("packed", [lambda start: True, lambda start: start % 2], ids=["all", "every other"])
    def test_a_sum_does_not_depend_on_how_its_nodes_came(self, packed, tmp_path):
        """As tensors of a worker in this process, or as arrays from another, which may be read-only."""

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

        with self.open(tmp_path) as run, self.open(tmp_path, reference=True) as expected:
            assert results_of_round(run, by_another_process) == results_of_round(expected)
            for name, vector in Packed.pack(run.state.server.vectors).arrays.items():
                assert torch.equal(vector, Packed.pack(expected.state.server.vectors).arrays[name])

    def test_a_later_phase_may_go_to_a_worker_that_did_not_do_the_earlier(self, tmp_path):
        """The task holds the broadcasts of both phases, so that a worker that knows nothing can begin at the first."""

        def by_strangers(tasks: list[PhaseTask], sticky: bool) -> Iterator[tuple[PhaseTask, Any]]:
            clients = run.worker.clients
            stranger = Worker(Clients(run.experiment, run.data, clients.states, fetch=clients.fetch))
            yield from ((task, stranger.run(task)) for task in tasks)

        with self.open(tmp_path) as run, self.open(tmp_path, reference=True) as expected:
            assert results_of_round(run, by_strangers) == results_of_round(expected)


class Doubling(DoublingPool):
    """Two workers that share nothing."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)


class TestDoubling(PoolContract):
    pool = f"{__name__}:Doubling"


class TestPickling(PoolContract):
    """Two workers in this process, to which everything is pickled."""

    pool = "fedray.testing.pickling:PicklingPool"


@pytest.mark.parametrize(("chunk", "are_idle"), [(64, True), (2, False)])
def test_a_line_says_that_there_are_fewer_stacks_than_workers(tmp_path, chunk, are_idle):
    keys = {"engine.kind": TestPickling.pool, "engine.vectorize": True, "engine.chunk": chunk, "run.rounds": 1}
    found = simulate({**SETTINGS, **keys, "run.output": str(tmp_path)}, data=small_source())
    line = "1 of the 2 actors train at a time, because clients are trained in stacks"
    assert (line in (found.folder / "log.txt").read_text()) == are_idle


@pytest.mark.usefixtures("ray_cluster")
class TestRay(PoolContract):
    """Two Ray actors."""

    pool = "ray"

    def make_pool(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        import ray

        here = ray.get_runtime_context().get_node_id()
        worker.clients.states.node = here
        stored = store(worker.data)
        actors = [create_actor(worker.experiment, stored, here) for _ in range(2)]
        silent = lambda line: None  # noqa: E731
        pool = RayPool(worker.experiment, stored, actors, worker.clients.states, silent, silent)
        return pool, [describe("cpu")]

    def test_large_broadcasts_go_through_the_store(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fedray.engine.ray.pool.ENCLOSED_BYTES", 0)
        self.test_evaluation_goes_the_same_way(tmp_path)

    def test_a_broadcast_is_as_it_was_when_it_was_published(self, tmp_path):
        """A task of a later phase is sent the earlier phases' broadcasts too, and the server may have changed its
        own."""
        with self.open(tmp_path) as run:
            model = run.state.server["x"]
            handle = run.pool.publish({"global": model})
            assert isinstance(handle, Enclosed)
            before = model.row.clone()
            model.row.zero_()
            assert handle.packed.arrays["global"].tobytes() == before.numpy().tobytes()
            model.row.copy_(before)

    def test_no_actor_is_left_when_a_pool_is_closed(self, tmp_path):
        import ray
        from ray.exceptions import RayActorError

        with self.open(tmp_path) as run:
            assert isinstance(run.pool, RayPool)
            actors = [member.actor for member in run.pool.actors.alive]
            assert len(actors) == 2
            run.pool.close()
            for actor in actors:
                # Ray may still run what an actor is asked for just after it was told to end
                with pytest.raises(RayActorError):
                    [ray.get(actor.progress.remote()) for _ in range(1000)]


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


def test_what_travelled_is_a_copy_that_nobody_may_write_to():
    """As whatever comes out of Ray's object store."""
    array = np.arange(3.0)
    copy = travelled({"array": array})["array"]
    array[0] = 7
    assert copy[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        copy[0] = 7


def test_a_broadcast_arrives_as_it_was_sent():
    vectors = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    arrived = Packed.pack(vectors).numpy().unpack(torch.device("cpu"))
    assert all(torch.equal(arrived[name], value) for name, value in vectors.items())


class Returning(LocalPool):
    """Before each later phase its worker has done the first phase in another attempt, with other learning rates."""

    ago = 1

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        for task in tasks:
            if isinstance(task, PhaseTask) and task.phase > 0:
                self.worker.run(replace(task, phase=0, lr=3 * task.lr, attempt=task.attempt - self.ago))
            yield task, self.worker.run(task)


class Confusing(Returning):
    """It makes a mistake: the attempts have the same number."""

    ago = 0


def test_what_phases_keep_is_not_taken_for_that_of_another_attempt(tmp_path: Path):
    """After a run has gone back to a checkpoint, a worker may have values of the same round from before."""

    def model(kind: str) -> str:
        settings = {
            **SETTINGS,
            "algorithm.name": "pfedmo",
            "engine.kind": kind,
            "run.output": str(tmp_path / kind[-9:]),
        }
        return simulate(settings, data=small_source()).summary["model_sha256"]

    assert model(f"{__name__}:Returning") == model("local")
    # so the values would matter
    assert model(f"{__name__}:Confusing") != model("local")


class NoPool(LocalPool):
    """What it lacks is needed by some algorithms only, and in later rounds."""

    keep = property()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("locl", "engine.kind must be 'ray' or 'local', or your own as .* .did you mean 'local'"),
        ("nothing.py:Pool", "engine.kind=nothing.py:Pool: can't read the file .*nothing.py"),
        (f"{__name__}:NoPool", "is no pool: it has no 'keep'"),
    ],
)
def test_an_engine_that_is_none_is_told(kind: str, message: str, tmp_path: Path):
    settings = {**SETTINGS, "algorithm.name": "fedavg", "engine.kind": kind, "run.output": str(tmp_path)}
    with pytest.raises(UserError, match=message):
        simulate(settings, data=small_source())
