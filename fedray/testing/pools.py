"""Contract tests that every pool of workers must pass, whether it comes with fedray or is yours.

from fedray.testing import PoolContract

class TestMine(PoolContract):
    pool = "mine.py:Processes"
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file

from fedray.algorithms.fedavg import FedAvg
from fedray.api import simulate
from fedray.config import load
from fedray.core.vectors import Model
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Part, Sent, TaskCutter, task_of
from fedray.engine.local_engine import make_pool
from fedray.engine.opening import open_run
from fedray.engine.pool import Pool
from fedray.engine.process import computing_process
from fedray.engine.run import Run
from fedray.engine.server_rules import server_rule
from fedray.engine.sums import CohortSums
from fedray.engine.tasks import EvalTask, PhaseResult, PhaseTask
from fedray.engine.worker import Worker
from fedray.errors import ClientError, StateLost
from fedray.experiment.cohorts import rehearsed
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, assert_same, small_source

Do = Callable[..., Iterator[tuple[PhaseTask, Any]]]


class Failing(FedAvg):
    """FedAvg whose clients raise an error in their first local step. Tests use it to check what a pool (the workers of
    a run) does with errors."""

    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        raise ValueError("my own mistake")


class PoolContract:
    """Tests that every pool must pass. A pool is the workers of a run, which simulate its clients.

    To test a pool, set ``pool`` in a subclass in a test file of pytest, as in ``pool = "mine.py:Processes"``. Most
    tests run an algorithm that has two phases (parts of a round), and whose clients keep states between rounds. Each
    task that they give to the pool is the work of one client in one phase.
    """

    pool: ClassVar[str]
    """The value of ``engine.kind``: local, or a user-defined pool as file.py:Class or module:Class."""

    def make_pool(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        """Makes the tested pool. Returns the pool, and a list of dicts that describe the computing processes, which the
        run records in summary.json. This list has only one dict, for the process of ``worker``.

        ``worker`` is the worker in this process, in which the server runs too. It has the run's experiment and data,
        and the pool may use it to do tasks.
        """
        return make_pool(self.pool, worker), [worker.describe()]

    @contextlib.contextmanager
    def open(self, folder: Path, reference: bool = False, **changes: Any) -> Iterator[Run]:
        """Opens a run, before its first round, as a context whose value is the run. Its clients are simulated by the
        tested pool, or by the local pool (fedray's pool in this process) if ``reference`` is true.

        The run folder is created in ``folder``. ``changes`` replace keys of the configuration; in their names ``__``
        stands for a dot, as in ``run__rounds=2``.
        """
        settings = {**SETTINGS, "algorithm.name": "fedsiam_da", "model.proj_dim": 8, "engine.cpus_per_actor": 0.5}
        settings |= {"run.output": str(folder / ("reference" if reference else "pool"))}
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        experiment, data = resolve(load(settings), CustomObjects(small_source()))

        def local(worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
            return make_pool("local", worker), [worker.describe()]

        with (
            computing_process(1, False),
            open_run(experiment, data, local if reference else self.make_pool, False) as run,
        ):
            assert run is not None
            yield run

    def test_each_task_is_done_once_with_the_same_result_as_anywhere(self, tmp_path: Path) -> None:
        """Checks that the tasks of a round with two phases have the same results as on the local pool, to the bit. Each
        task must be done once, and the pool must change no task."""
        with self.open(tmp_path, reference=True) as run:
            expected = results_of_round(run)
        with self.open(tmp_path) as run:
            assert results_of_round(run) == expected
        assert len(expected) == 2 * len({start for _, start in expected})

    def test_a_whole_run_has_the_same_bits(self, tmp_path: Path) -> None:
        """Checks that a run of four rounds has the same model and tables on this pool as on the local pool, to the
        bit."""
        settings = {**SETTINGS, "algorithm.name": "scaffold", "run.rounds": 4, "engine.cpus_per_actor": 0.1}
        runs = [
            simulate(settings | {"engine.kind": kind, "run.output": str(tmp_path / str(number))}, data=small_source())
            for number, kind in enumerate(("local", self.pool))
        ]
        assert_same(*runs)

    def test_no_tasks_are_no_results(self, tmp_path: Path) -> None:
        """Checks that a pool that gets an empty list of tasks returns nothing, and does not wait."""
        with self.open(tmp_path) as run:
            assert list(run.pool.map([])) == []

    def test_what_is_kept_is_there_until_it_is_dropped(self, tmp_path: Path) -> None:
        """Checks the pool's methods for arrays of the server: what ``keep`` has stored can be read by ``fetch``,
        written to a file by ``store``, and deleted by ``drop``."""
        import pytest

        vectors = {"x": np.arange(5, dtype=np.float32), "m": np.ones((2, 3), np.float32)}
        with self.open(tmp_path) as run:
            handle = run.pool.keep("kept", vectors)
            fetched = dict(run.pool.fetch(handle))
            run.pool.store(handle, tmp_path / "kept.safetensors")
            run.pool.drop([handle])
            with pytest.raises(StateLost):
                run.pool.fetch(handle)
        for found in (fetched, load_file(tmp_path / "kept.safetensors")):
            assert found.keys() == vectors.keys()
            for name, value in found.items():
                np.testing.assert_array_equal(value, vectors[name])

    def test_the_states_of_clients_can_be_stored(self, tmp_path: Path) -> None:
        """Checks that each task's result names a file with the states that clients keep between rounds, and that the
        pool's method ``store`` writes the same states into another file, as is done for a checkpoint."""
        with self.open(tmp_path) as run:
            _, tasks = next(phase_tasks(run))
            files = [file for _, result in run.pool.map(tasks) for file in result.states]
            run.pool.settle()
            assert len(files) == len(tasks)
            for number, file in enumerate(files):
                target = tmp_path / f"{number}.safetensors"
                run.pool.store(file, target)
                kept = run.worker.clients.states.read(file)
                assert {name: a.tobytes() for name, a in load_file(target).items()} == {
                    name: a.tobytes() for name, a in kept.items()
                }
            run.pool.drop(files)

    def test_evaluation_goes_the_same_way(self, tmp_path: Path) -> None:
        """Checks that the pool also does tasks that evaluate a model on test samples. Two different models, one after
        the other, must have the same losses and metrics as on the local pool, to the bit."""
        losses = []
        with self.open(tmp_path) as run, self.open(tmp_path, reference=True) as expected:
            model = run.state.server["x"]
            for other in (model, Model(model.row * 2, model.width)):
                task = EvalTask(run.pool.publish({"global": other}), ["global"], "test", 0, 40)
                ((same, result),) = run.pool.map([task])
                assert same is task
                ((_, alone),) = expected.pool.map([replace(task, broadcast=expected.pool.publish({"global": other}))])
                assert result.sums == alone.sums
                losses.append(result.sums[0]["loss"])
        assert losses[0] != losses[1]

    def test_a_clients_error_names_the_client_and_the_phase(self, tmp_path: Path) -> None:
        """Checks that an exception in a client's code reaches the server as a :class:`ClientError` that names the
        client, the phase and the round."""
        import pytest

        with self.open(tmp_path, algorithm__name=f"{__name__}:Failing") as run:
            _, tasks = next(phase_tasks(run))
            with pytest.raises(ClientError, match=r"client \d+ failed in phase train of round 1 on "):
                list(run.pool.map(tasks))

    def test_a_pool_says_how_work_should_be_cut(self, tmp_path: Path) -> None:
        """Checks the pool's attributes by which a cohort is divided into tasks. ``slots``, the number of tasks that are
        done at the same time, must be at least 1. ``task_fraction``, which says how large a task should be, must be
        above 0 and at most 1. Each client of the cohort must then be in exactly one task."""
        with self.open(tmp_path) as run:
            assert run.pool.slots >= 1
            assert 0 < run.pool.task_fraction <= 1
            next(phase_tasks(run))
            cutter = TaskCutter(run.pool, run.experiment.training, None, run.state.layout.row_width)
            cohort = run.state.server.cohort
            positions = [i for part in cutter.cut(cohort) for start, stop in part.blocks for i in range(start, stop)]
        assert sorted(positions) == list(range(len(cohort.ids)))


def phase_tasks(run: Run) -> Iterator[tuple[str, list[PhaseTask]]]:
    """Prepares round 1 of ``run``, a run of which no round has been made yet, for a test. For each phase (part of the
    round) it yields a pair: the phase's name, and a list of tasks, one for each client of the cohort.

    Before the caller asks for the next pair, it must let a pool do the tasks, and call the algorithm's
    ``server_update`` with the sums of the results.
    """
    state, algorithm = run.state, run.experiment.algorithm
    server = state.server
    server.round, server.lr = 1, 0.1
    server.cohort = cohort_of(rehearsed(1, state.sizes, run.experiment), state, run.experiment, 1)
    state.earlier.remember(1, server["x"])
    sent: list[Sent] = []
    for phase in algorithm.phases:
        with server_rule(algorithm, "broadcast", server, phase):
            broadcast = algorithm.broadcast(server, phase)
        sent.append(Sent(run.pool.publish(broadcast.shared), broadcast.scalars))
        yield (
            phase,
            [task_of(Part([(i, i + 1)], 1.0), sent, state, run.experiment) for i in range(len(server.cohort.ids))],
        )


def results_of_round(run: Run, do: Do | None = None) -> dict[tuple[str, int], dict[str, Any]]:
    """Computes round 1 of a run and returns the results of its tasks, so that two pools can be compared by comparing
    what this function returns for them.

    Args:
        run: The run, of which no round has been made yet.
        do: The function that does the tasks, with the signature of ``Pool.map``. None means the method ``map`` of the
            run's pool.

    Returns:
        A dict with an entry for each task. Its key is a pair: the name of the task's phase, and the position of the
        task's first client in the cohort. Its value is a dict with what the task returned, as far as it must not
        depend on the pool: the sums of uploads (``nodes``), ``scalars``, ``log``, ``forms`` (names and shapes of the
        values) and the clients' ``states``. Arrays are replaced by bytes, so that the dicts can be compared by ``==``.
    """
    do = do or run.pool.map
    found: dict[tuple[str, int], dict[str, Any]] = {}
    algorithm, state = run.experiment.algorithm, run.state
    for number, (phase, tasks) in enumerate(phase_tasks(run)):
        sums = CohortSums(algorithm, phase, len(state.server.cohort.ids), state.layout, state.device)
        before = [repr(task) for task in tasks]
        returned: list[PhaseTask] = []
        for task, result in do(tasks, sticky=number > 0):
            returned.append(task)
            run.pool.settle()
            found[phase, task.start] = _bits(result, run)
            sums.add(task, result)
        _check_returned(tasks, returned)
        assert [repr(task) for task in tasks] == before, "a pool changed a task"
        with server_rule(algorithm, "server_update", state.server, phase):
            algorithm.server_update(state.server, phase, sums.totals(), sums.scalars)
    return found


def _check_returned(tasks: Sequence[PhaseTask], returned: Sequence[PhaseTask]) -> None:
    assert sorted(task.start for task in returned) == [task.start for task in tasks], "not each task was done once"
    assert all(any(task is one for one in tasks) for task in returned), "a pool must yield the task that it was given"


def _bits(result: PhaseResult, run: Run) -> dict[str, Any]:
    """Returns the content of a task's result as plain values (bytes, numbers, texts), which can be compared by
    ``==``."""
    nodes = {
        (name, node): np.asarray(value).tobytes()
        for name, partial in result.sums.items()
        for node, value in partial.nodes.items()
    }
    read = run.worker.clients.states.read
    states = [{name: a.tobytes() for name, a in read(file).items()} for file in result.states]
    return {"nodes": nodes, "scalars": result.scalars, "log": result.log, "forms": result.forms, "states": states}
