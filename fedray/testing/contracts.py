"""Contract tests: what every algorithm must do. Subclass :class:`AlgorithmContract` in a test file of pytest::

from fedray.testing import AlgorithmContract

class TestMine(AlgorithmContract):
    algorithm = "mine.py:Mine"
    hyper = {"mu": 0.3}
    zero = {"mu": 0.0}      # with these it is FedAvg
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pandas as pd

from fedray.api import simulate
from fedray.client.optimizer import LocalOptimizer
from fedray.config import load
from fedray.core.vectors import Model, Vector
from fedray.data.federated import FederatedData
from fedray.data.sources.source import Source
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.engine.run import Run
from fedray.engine.state import checkpoint as checkpoints
from fedray.engine.state.packing import Packed
from fedray.engine.tasks import AnyTask, PhaseTask
from fedray.engine.worker import Worker
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.models.inspection import ModelFacts
from fedray.models.stacking import samples_of_trial, stacking_obstacle
from fedray.testing.pickling import DoublingPool, PicklingPool, hashes
from fedray.testing.steps import checked_direction
from fedray.tracking.costs import (
    bytes_per_client,
    client_flops,
    costs_by_phase,
    load_of,
    server_of_mean_clients,
)
from fedray.tracking.result import RunResult

TIMES = ("round_seconds", "wall_seconds", "virtual_seconds")

SETTINGS: dict[str, Any] = {
    "data.clients": 9,
    "data.partition.kind": "dirichlet",
    "data.public_samples": 60,
    "model.name": "mlp",
    "model.hidden": [8],
    "train.local_epochs": 1,
    "train.batch_size": 8,
    "train.lr": 0.1,
    "train.cohort_size": 5,
    "run.rounds": 6,
    "engine.kind": "local",
    "engine.vectorize": False,
}
"""The configuration of the tests' runs.

Clients have different numbers of samples, so that last batches are smaller, and only some of them take part in each
round.
"""

OPTIMIZER: dict[str, Any] = {"train.momentum": 0.5, "train.weight_decay": 0.01, "train.grad_clip": 1.0}
"""The clients' optimizer in the contract tests. ``settings`` may override it."""


def small_source() -> Source:
    """Returns the data set of the contract tests: 360 training and 60 test samples with 12 features in 4 classes, which
    are always the same random numbers."""
    rng = np.random.Generator(np.random.Philox(key=7))
    centres = rng.normal(size=(4, 12))
    y = rng.integers(0, 4, 420)
    x = (centres[y] + rng.normal(size=(420, 12))).astype(np.float32)
    return Source("small", x[:360], y[:360], x[360:], y[360:], 4)


_base_runs: dict[tuple[type, str], tuple[tempfile.TemporaryDirectory[str], RunResult]] = {}


class AlgorithmContract:
    """Tests that every algorithm must pass. They check, for example, that a client's result depends only on its inputs,
    that a run can be resumed, that workers in other processes compute the same bits, and that transferred bytes are
    counted.

    A subclass in a test file sets ``algorithm``, and pytest runs all tests for it. ``hyper`` should turn on everything
    that the algorithm can do::

        class TestMine(AlgorithmContract):
            algorithm = "mine.py:Mine"
            hyper = {"mu": 0.3}
    """

    algorithm: ClassVar[str]
    """The value of ``algorithm.name``: a name, or file.py:Class or module:Class."""
    hyper: ClassVar[Mapping[str, Any]] = {}
    """Hyper-parameters with which the algorithm uses all of its rules. Others have their defaults."""
    zero: ClassVar[Mapping[str, Any] | None] = None
    """Hyper-parameters with which the algorithm computes the same as FedAvg, or None if there are none."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Further keys for the tests' runs, for example train.local_steps for an algorithm that needs equal numbers of
    steps."""
    actors: ClassVar[Sequence[int]] = ()
    """The numbers of client actors with which Ray must give the same bits as the local engine. The tests always compare
    workers in this process to which everything is pickled, as on Ray; each run on Ray itself takes some seconds
    more."""

    def config(self, folder: Path, **changes: Any) -> dict[str, Any]:
        """Returns the configuration with which the tests run the algorithm, as a dict with dotted keys. The run folder
        is created in ``folder``.

        ``changes`` replace keys; in their names ``__`` stands for a dot, as in ``run__rounds=2``.
        """
        hyper = {f"algorithm.{name}": value for name, value in self.hyper.items()}
        named = {"algorithm.name": self.algorithm, "run.output": str(folder)}
        optimizer = {} if "train.optimizer" in self.settings else OPTIMIZER
        # a key of the contracts' own model
        others = ("model.hidden",) if "model.name" in self.settings else ()
        return {
            **{key: value for key, value in SETTINGS.items() if key not in others},
            **optimizer,
            **named,
            **hyper,
            **self.settings,
            **{k.replace("__", "."): v for k, v in changes.items()},
        }

    def simulate(self, folder: Path, **changes: Any) -> RunResult:
        """Runs the algorithm on a small data set with the configuration that :meth:`config` returns, and returns the
        result of the run. The run folder is created in ``folder``, and ``changes`` replace keys, as in
        ``run__rounds=2``."""
        return simulate(self.config(folder, **changes), data=small_source())

    def base_run(self) -> RunResult:
        """Returns the result of an ordinary run of the algorithm. Most tests make a run in another way, for example
        with other workers, and compare it with this one. The ordinary run is made when it is first needed, and then
        shared by all tests of a class."""
        key = type(self), self.algorithm
        if key not in _base_runs:
            folder = tempfile.TemporaryDirectory(prefix="fedray-contract-")
            _base_runs[key] = folder, self.simulate(Path(folder.name))
        return _base_runs[key][1]

    def test_state_round_trip(self, tmp_path: Path) -> None:
        """Checks that a checkpoint brings a run that has gone on back to exactly the state of the server and the states
        of the clients that it has saved."""
        experiment, data = self._resolve(tmp_path)
        with _open_run(experiment, data) as run:
            for report in run.rounds():
                if report.round == 3:
                    run.checkpoints.save()
                    saved = checkpoints.load_last(run.recorder.folder.checkpoints, print)
                    before = _state_of(run)
                if report.round == 5:
                    break
            assert saved is not None
            assert _state_of(run) != before
            run.restore(saved)
            assert _state_of(run) == before

    def test_resume_equality(self, tmp_path: Path) -> None:
        """Checks that a run of the algorithm that is stopped and resumed ends with the same model and tables as a run
        that was never stopped."""
        config = self.config(tmp_path, run__checkpoint_every=2)
        for stop in (1, 4):
            simulate(config, data=small_source(), callbacks=[lambda report, stop=stop: report.round == stop])  # type: ignore[misc]
        parts = simulate(config, data=small_source())
        assert parts.summary["status"] == "completed"
        assert_same(self.base_run(), parts)

    def test_actor_counts(self, tmp_path: Path) -> None:
        """Checks that the number of workers has no influence on the result: the model and the tables must be the same
        to the bit with 1 and with 3 workers that share no memory with the server. These workers stand for client actors
        (processes on Ray). Real runs on Ray are made for the numbers of client actors in the attribute ``actors``."""
        for workers in (1, 3):
            experiment, data = self._resolve(tmp_path / f"workers{workers}")
            with _open_run(experiment, data, lambda worker, workers=workers: PicklingPool(worker, workers)) as run:  # type: ignore[misc]
                list(run.rounds())
            assert_same(self.base_run(), _result(experiment))
        for actors in self.actors:
            ray = self.simulate(
                tmp_path / f"ray{actors}", engine__kind="ray", engine__actors=actors, engine__cpus_per_actor=0.1
            )
            assert_same(self.base_run(), ray)

    def test_chunk_sizes(self, tmp_path: Path) -> None:
        """Checks that the model and the tables are the same to the bit, whether the clients of a cohort are sent to
        workers one by one or in blocks of 2 or 16. Clients are computed one after another here (loop mode)."""
        for size in (1, 2, 16):
            assert_same(self.base_run(), self.simulate(tmp_path / str(size), engine__chunk=size))

    def test_vectorized_agrees(self, tmp_path: Path) -> None:
        """Checks that the final model is the same, up to a relative difference of 1e-4 from rounding, whether clients
        are trained together as one batched model or one after another, and so are the losses of every round, also those
        of personal models. The test is skipped if the model can't be batched."""
        experiment, data = self._resolve(tmp_path / "facts")
        size = experiment.training.batch_size or int(data.sizes().max())
        examples = data.examples(samples_of_trial(size))
        if obstacle := stacking_obstacle(experiment.build_model(), experiment.task, *examples):
            import pytest

            pytest.skip(f"the model that it needs can't be batched over clients: {obstacle}")
        loop, stacks = self.base_run(), self.simulate(tmp_path / "vmap", engine__vectorize=True, engine__chunk=4)
        assert np.linalg.norm(_vector(loop) - _vector(stacks)) <= 1e-4 * np.linalg.norm(_vector(loop)), (
            "the model is another if clients are trained together: compute row by row, as norm(dim=-1, keepdim=True)"
        )
        losses = [name for name in map(str, loop.metrics) if name.endswith("loss")]
        np.testing.assert_allclose(stacks.metrics[losses], loop.metrics[losses], rtol=1e-3)

    def test_client_updates_are_pure(self, tmp_path: Path) -> None:
        """Checks that the algorithm's methods for clients are pure. A task is the work of some clients in one phase (a
        part of a round). It must change none of its inputs, and give the same bits if another worker repeats it.

        The other worker begins with nothing stored from the earlier phases of the round. If the method ``step`` is
        marked ``in_place``, so that it may overwrite the model, it must also give the same bits when it makes a new
        model instead.
        """
        experiment, data = self._resolve(tmp_path)
        with _open_run(experiment, data, DoublingPool) as run:
            assert len(list(run.rounds())) == 6
        # an ordinary pool has fewer tasks, whose results come in another order
        assert_same(self.base_run(), _result(experiment))

    def test_phase_outputs(self, tmp_path: Path) -> None:
        """Checks that each phase of the algorithm (a part of a round) returns values with the same names and shapes for
        every client in every round, also for clients with few samples and clients that take part for the first time.
        The values are, for example, what clients upload, and the states that they keep for later rounds.

        A run checks this only within each round. But it counts the same number of bytes for a client in all rounds,
        which is right only if the shapes never change. Neither may it count more than is sent; ``traffic`` may leave
        out what clients and server can compute from other things that they get.
        """
        forms: dict[int, list[Any]] = {}
        received: dict[int, int] = {}
        experiment, data = self._resolve(tmp_path)
        facts = experiment.facts

        class NotingPool(LocalPool):
            slots = 64
            numbers = 0

            def publish(self, vectors: Mapping[str, Vector]) -> Any:
                shapes = [None if isinstance(each, Model) else each.shape for each in vectors.values()]
                self.numbers = sum(_numbers(shape, facts) for shape in shapes)
                return super().publish(vectors)

            def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
                for task, result in super().map(tasks, sticky):
                    if isinstance(task, PhaseTask):
                        received.setdefault(task.phase, self.numbers)
                        forms.setdefault(task.phase, []).append(result.forms)
                    yield task, result

        with _open_run(experiment, data, NotingPool) as run:
            list(run.rounds())
        assert len(forms) == len(experiment.algorithm.phases)
        for found in forms.values():
            assert all(each == found[0] for each in found), "a phase does not return the same for all clients"
        uploads = [form for found in forms.values() for key, form in found[0].items() if key.startswith("uploads[")]
        sent = sum(_numbers(None if form.kind.endswith("model") else form.shape, facts) for form in uploads)
        down, up = bytes_per_client(experiment.algorithm.traffic, facts)
        assert down <= 4 * sum(received.values()), f"traffic counts {down} bytes for a client, which are not broadcast"
        assert up <= 4 * sent, f"traffic counts {up} bytes from a client, which are not uploaded"
        assert up or experiment.algorithm.private or not sent, "traffic counts nothing that clients upload"

    def test_steps_of_the_optimizer(self, tmp_path: Path) -> None:
        """Checks the momentum of the clients' optimizer: each model that a client trains must have a separate momentum,
        which lasts over the client's local steps.

        With the same gradients, ``client.optimizer`` must move a model in each step as torch.optim.SGD does. A step
        that does without it knows no ``train.momentum``, ``train.weight_decay`` and ``train.grad_clip``, and one that
        returns the model as it was trains nothing: neither may be.
        """
        if "train.momentum" not in self.config(tmp_path):
            import pytest

            pytest.skip("it is about train.optimizer=sgd")
        steps: list[str] = []
        with mock.patch.object(LocalOptimizer, "direction", checked_direction(LocalOptimizer.direction, steps)):
            run = self.simulate(tmp_path, run__rounds=2, train__decay_norms_and_biases=True, train__lr=0.01)
        assert steps, "clients make no step of client.optimizer, so that train.momentum and its like change nothing"
        losses = [result.metrics["train_loss"].iloc[1] for result in (run, self.base_run())]
        assert losses[0] != losses[1], "train.lr changes nothing: a step must return the model that it makes"

    def test_bytes(self, tmp_path: Path) -> None:
        """Checks that the numbers of bytes in metrics.csv are those that follow from the algorithm's attribute
        ``traffic``. It declares how many models a client receives and sends in a round, and how many vectors, such as
        gradients, with as many numbers as the model has parameters."""
        run = self.base_run()
        experiment, _ = self._resolve(tmp_path)
        traffic, upload = experiment.algorithm.traffic, experiment.upload
        sent = [bytes_per_client(traffic, experiment.facts_in(r), upload) for r in run.metrics["round"]]
        down, up = (run.metrics["cohort_size"] * np.array(counts) for counts in zip(*sent, strict=True))
        assert list(run.metrics["bytes_down"]) == list(down.cumsum())
        assert list(run.metrics["bytes_up"]) == list(up.cumsum())

    def test_costs_of_phases(self, tmp_path: Path) -> None:
        """Checks that the costs of an algorithm's phases (``traffic_in``, ``work_in``), by which the virtual clock
        goes, add up to those of the round (``traffic``, ``work``), and that what the server computes beside the clients
        is not more than all that it computes."""
        experiment, data = self._resolve(tmp_path)
        algorithm, facts, training = experiment.algorithm, experiment.facts, experiment.training
        phases = costs_by_phase(algorithm, facts, training, data.sizes())
        assert [phase.name for phase in phases] == list(algorithm.phases)
        down, up = bytes_per_client(algorithm.traffic, facts)
        assert (sum(phase.down for phase in phases), sum(phase.up for phase in phases)) == (down, up)
        flops = [client_flops(algorithm.work, facts, load_of(int(size), training)) for size in data.sizes()]
        np.testing.assert_allclose(sum(phase.flops for phase in phases), flops, rtol=1e-12)
        server = server_of_mean_clients(training, data.sizes(), experiment.cohort_size, len(data.public), 60)
        beside = algorithm.server_flops_beside(server, facts.flops)
        assert 0 <= beside <= algorithm.server_flops(server, facts.flops)

    def test_reduces_to_fedavg(self, tmp_path: Path) -> None:
        """Checks that the algorithm computes the same model as FedAvg, up to rounding, with the hyper-parameters of the
        attribute ``zero``, such as ``{"mu": 0.0}``. The test is skipped if ``zero`` is None."""
        if self.zero is None:
            import pytest

            pytest.skip("no hyper-parameters declared under which it is FedAvg")
        zero = {f"algorithm__{name}": value for name, value in self.zero.items()}
        resolved = self._resolve(tmp_path / "resolved")[0]
        same = {"train.weighting": resolved.weighting, "model.head": resolved.config.model.head}
        mine = _vector(self.simulate(tmp_path / "mine", **zero))
        config = {k: v for k, v in self.config(tmp_path / "fedavg").items() if not k.startswith("algorithm.")}
        fedavg = simulate({**config, "algorithm.name": "fedavg", **same}, data=small_source())
        distance = np.linalg.norm(mine - _vector(fedavg)) / np.linalg.norm(mine)
        assert distance <= 1e-5, f"with {dict(self.zero)} the model is {distance:.1e} of its length from FedAvg's"

    def _resolve(self, folder: Path) -> tuple[Experiment, FederatedData]:
        return resolve(load(self.config(folder)), CustomObjects(source=small_source()))


OTHER_MODEL = (
    "two runs that should be the same end with other models: what lasts must be in server[...] or Result(state=...), "
    "not on self, and random numbers of clients must come from client.generator(row)"
)


def assert_same(a: RunResult, b: RunResult) -> None:
    """Asserts that two finished runs are equal to the bit: the final model, and all columns of metrics.csv,
    clients.parquet and evaluation.parquet except times."""
    assert a.summary["model_sha256"] == b.summary["model_sha256"], OTHER_MODEL
    pd.testing.assert_frame_equal(
        a.metrics.drop(columns=list(TIMES)), b.metrics.drop(columns=list(TIMES)), check_exact=True
    )
    pd.testing.assert_frame_equal(a.clients, b.clients, check_exact=True)
    assert a.has_evaluation == b.has_evaluation
    if a.has_evaluation:
        pd.testing.assert_frame_equal(a.evaluation, b.evaluation, check_exact=True)


@contextlib.contextmanager
def _open_run(
    experiment: Experiment, data: FederatedData, pool: Callable[[Worker], LocalPool] = LocalPool
) -> Iterator[Run]:
    def make_pool(worker: Worker) -> tuple[LocalPool, list[dict[str, Any]]]:
        return pool(worker), [describe("cpu")]

    with computing_process(1, False), open_run(experiment, data, make_pool, False) as run:
        assert run is not None
        yield run


def _state_of(run: Run) -> dict[str, Any]:
    """Returns all that lasts from round to round in a form that can be compared by ``==``."""
    server, read = run.state.server, run.worker.clients.states.read
    return {
        "round": server.round,
        "last": dict(server.last_round),
        "table": {name: dict(column) for name, column in server.table.items()},
        "server": hashes(Packed.pack(server.vectors).numpy().arrays),
        "clients": {client: hashes(read(file)) for client, file in run.state.clients.items()},
    }


def _numbers(shape: Sequence[int] | None, facts: ModelFacts) -> int:
    """Returns how many numbers a tensor of a shape has, or a model if ``shape`` is None."""
    return facts.parameters + facts.buffers if shape is None else math.prod(shape)


def _result(experiment: Experiment) -> RunResult:
    """Returns the result of a run that was made without :func:`simulate`, read from its folder."""
    run = experiment.config.run
    return RunResult(run.place / str(run.name), experiment.module)


def _vector(run: RunResult) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in run.model().parameters()])
