"""The server of a run: samples cohorts, deals them out, reduces, evaluates, keeps records. Knows nothing of Ray."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

from fedray.algorithms import Cohort, ServerState
from fedray.core import batches, seeds
from fedray.core.seeds import Purpose
from fedray.core.tree import TreeSum
from fedray.core.vectors import Model, Vector, frozen
from fedray.data.federated import FederatedData
from fedray.engine import checkpoint as checkpoints
from fedray.engine.checkpoint import Checkpoint, flat_sha256
from fedray.engine.client_scores import Scoring
from fedray.engine.cohorts import draw_cohort, positions, shares, weights_of
from fedray.engine.determinism import nondeterministic_operations
from fedray.engine.evaluation import Evaluation, further_columns
from fedray.engine.packing import Packed, tensor_over
from fedray.engine.pool import Pool
from fedray.engine.profile import Profile
from fedray.engine.states import StateFile
from fedray.engine.tasks import AnyTask, Handle, PhaseTask
from fedray.engine.worker import Worker
from fedray.resolve import Experiment
from fedray.tracking.costs import bytes_per_client, flops_of_round, load_of
from fedray.tracking.recorder import Recorder

LEAST_SECONDS = 0.015
"""Tasks are not smaller than this, at the pace of the round before, where nobody waits for it: each costs a millisecond
or two."""

LONGEST_SECONDS = 10.0
"""Tasks are not longer than this, once the pace is known: all of it is lost with an actor that dies."""

SUMS_BYTES = 128_000_000
"""How much memory a worker may use for the partial sums of a task."""


@dataclass(frozen=True)
class Report:
    """One finished round: its number and its row of metrics.csv."""

    round: int
    metrics: Mapping[str, Any]


class Simulation:
    """A run, round by round.

    ``worker`` is the server's own model and data; ``pool`` simulates the clients. ``recorder``, which keeps the run
    folder, is to be set before the first round; its metrics.csv has ``further_columns``.
    With ``concurrent`` the algorithm's background work runs in a thread beside the pool's. With ``overlap`` a round is
    evaluated while the next one begins to train.
    """

    overlap = False
    recorder: Recorder

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData,
        worker: Worker,
        pool: Pool,
        concurrent: bool,
    ) -> None:
        self.experiment, self.data, self.worker, self.pool = experiment, data, worker, pool
        self.config, self.algorithm = experiment.config, experiment.algorithm
        self.concurrent = concurrent
        self.sizes = data.sizes()
        self.present = np.flatnonzero(self.sizes)
        self.states: dict[int, StateFile] = {}
        self.past: dict[int, Handle] = {}
        self.saved_round = 0
        self.stopping = threading.Event()
        self.server = ServerState(
            vectors={"x": worker.network.initial.clone()},
            N=data.active,
            seed=self.config.run.seed,
            server_lr=self.config.train.server_lr,
            as_client=worker.server_as_client,
            draw_inputs=self._inputs,
            model_of=self._earlier_model,
            batch_size=experiment.training.batch_size,
            public_samples=len(data.public),
            weighting=experiment.weighting,
            total_samples=int(self.sizes.sum()),
            test_samples=len(data.y_test),
        )
        self.algorithm.init_server(self.server)
        self.scoring = Scoring.of(experiment, data)
        self.further_columns = further_columns(experiment, self.scoring, list(self.algorithm.monitors(self.server)))
        self.costs = {"iterations": 0, "bytes_down": 0, "bytes_up": 0, "flops": 0.0}
        self.wall_before, self.began = 0.0, time.perf_counter()
        self.unfinished: _Finished | None = None
        # what each of the cohort trains on, in samples, and the seconds that one takes
        self.work: list[float] = []
        self.pace = 0.0
        self.profile = Profile()

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.server.vectors = saved.vectors.own(self.worker.device)
        self.server.round = self.saved_round = saved.round
        self.server.table = {
            name: {int(client): value for client, value in column.items()}
            for name, column in saved.record["table"].items()
        }
        self.costs, self.wall_before = saved.record["costs"], saved.record["wall_seconds"]
        self.pool.drop([*self.states.values(), *self.past.values()])
        self.states = {client: self.worker.states.adopt(path) for client, path in saved.states.items()}
        self.past = {seen: self.pool.keep(path.name, load_file(path)) for seen, path in saved.past.items()}

    def rounds(self) -> Iterator[Report]:
        """Run the rounds that are left; ends early when ``stopping`` is set or the loss is not finite any more.

        A round is reported once it is evaluated: with ``overlap``, when the next one has been trained.
        """
        self.began, self.profile = time.perf_counter(), Profile()
        status, last = "completed", self.server.round
        for number in range(self.server.round + 1, self.experiment.rounds + 1):
            if self.stopping.is_set():
                status = "interrupted"
                break
            before, finished = self.unfinished, self._round(number)
            finished.seconds = self.profile.take()
            if before is not None:
                yield self._report(before)
            self.unfinished, last = finished, number
            diverged = not math.isfinite(finished.row["train_loss"]) or not self._finite()
            every = self.config.run.checkpoint_every
            due = bool(every) and number % every == 0 and number < self.experiment.rounds
            if diverged or due or not self.overlap:
                report = self._evaluated()
                if due and not diverged:
                    with self.profile.of("checkpoint"):
                        self.checkpoint()
                yield report
            if diverged:
                status = "diverged"
                break
        if self.unfinished is not None:
            yield self._evaluated()
        if self.config.run.checkpoint_every and status != "diverged" and last:
            self.checkpoint()
        self._finish(status)

    def _evaluated(self) -> Report:
        """The report of the round before, its evaluation done now."""
        finished, self.unfinished = self.unfinished, None
        assert finished is not None
        if finished.evaluation is not None:
            for task, result in self._map(finished.evaluation.tasks):
                finished.evaluation.take(task, result)
        for purpose, seconds in self.profile.take().items():
            finished.seconds[purpose] += seconds
        return self._report(finished)

    def _report(self, finished: _Finished) -> Report:
        """Record a round that is trained and evaluated."""
        row = finished.row
        if finished.evaluation is not None:
            row |= finished.evaluation.row()
            self.recorder.scores(finished.evaluation.scores.rows())
        row["wall_seconds"] = self._wall()
        self.recorder.round(row, finished.log)
        self.recorder.profile(row["round"], finished.seconds)
        return Report(row["round"], row)

    def _wall(self) -> float:
        """Seconds of the run so far, before it was resumed too."""
        return self.wall_before + time.perf_counter() - self.began

    def _map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        """The pool's results, with what they cost noted."""
        with self.profile.of_pool(self.pool.slots) as busy:
            for task, result in self.pool.map(tasks, sticky):
                busy(result.seconds)
                self.recorder.withdraw_promise(result.nondeterministic)
                yield task, result

    def _finite(self) -> bool:
        # a module's constant buffers may hold infinities, such as an attention mask
        values = self.server.vectors.values()
        tensors = [value.parameters if isinstance(value, Model) else value for value in values]
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    def _round(self, number: int) -> _Finished:
        """Train a round; what is left to evaluate of the one before is done meanwhile."""
        began = time.perf_counter()
        server = self.server
        server.round = number
        server.lr = self.config.train.lr * self.config.train.lr_decay ** (number - 1)
        server.cohort = cohort = self._cohort(number)
        self.work = [load_of(size, self.experiment.training).seen for size in cohort.sizes]
        server.client_scalars = {}
        if self.algorithm.needs_received or self.algorithm.earlier_models:
            self.past[number] = self.pool.keep(f"model-{number}", {"x": server["x"].row.cpu().numpy().copy()})
        training = self._start_training() if self.algorithm.server_training_before else None
        results = self._phases(training)
        last = server.column("last")
        last |= dict.fromkeys(cohort.ids, number)
        for old in self.past.keys() - self._past_needed():
            self.pool.drop([self.past.pop(old)])
        self.pool.drop([self.states[client] for client in results.states if client in self.states])
        self.states |= results.states
        seen = sum(self.work)
        down, up = bytes_per_client(self.algorithm.traffic, self.experiment.facts)
        self.costs["iterations"] += max(cohort.steps)
        self.costs["bytes_down"] += down * len(cohort.ids)
        self.costs["bytes_up"] += up * len(cohort.ids)
        self.costs["flops"] += flops_of_round(self.algorithm, server, self.experiment.facts, seen)
        row: dict[str, Any] = {
            "round": number,
            "cohort_size": len(cohort.ids),
            "train_loss": math.fsum(results.log.get("loss", [])) / len(cohort.ids),
            **self.costs,
            "round_seconds": time.perf_counter() - began,
        }
        log = {
            "round": number,
            "client": list(cohort.ids),
            **self.data.names_of(cohort.ids),
            "samples": list(cohort.sizes),
            "steps": list(cohort.steps),
        }
        log |= results.log
        log |= {name: list(values) for name, values in server.client_scalars.items()}
        every, evaluation = self.config.run.eval_every, None
        if number == self.experiment.rounds or (every and number % every == 0):
            evaluation = Evaluation(self.experiment, self.scoring, server, self.data, self.pool, self.states)
        return _Finished(row, log, evaluation)

    def _past_needed(self) -> set[int]:
        """The rounds at whose start the model was what clients, or the server's rules, will ask for after this one."""
        clients = self.server.column("last").values() if self.algorithm.needs_received else ()
        following = self.server.round + 1
        return {int(number) for number in clients} | set(range(following - self.algorithm.earlier_models, following))

    def _earlier_model(self, number: int) -> Model:
        if number not in self.past:
            raise ValueError(
                f"server.model_of({number}) is not one of the earlier_models={self.algorithm.earlier_models} kept"
            )
        row = torch.tensor(self.pool.fetch(self.past[number])["x"], device=self.worker.device)
        return self.worker.network.layout.model(row)

    def _cohort(self, number: int) -> Cohort:
        config, training = self.config, self.experiment.training
        chosen = draw_cohort(
            self.present,
            self.experiment.cohort_size,
            config.train.sampling,
            config.run.seed,
            config.data.seed or 0,
            number,
        )
        sizes = self.sizes[chosen]
        last = self.server.column("last")
        return Cohort(
            ids=chosen.tolist(),
            sizes=sizes.tolist(),
            weights=weights_of(sizes, self.experiment.weighting),
            steps=[
                batches.steps_of(int(size), training.batch_size, training.local_steps, training.local_epochs)
                for size in sizes
            ],
            gaps=[number - int(last[client]) if client in last else 0 for client in chosen.tolist()],
        )

    def _nodes_per_task(self) -> int:
        """How many nodes of the summation tree a worker may have in its memory, for two uploads or so."""
        return max(1, SUMS_BYTES // (2 * 8 * self.worker.network.layout.row_width))

    def _start_training(self) -> Future[Mapping[str, Vector]]:
        """The server's own training, in a thread of its own or at once."""
        future: Future[Mapping[str, Vector]] = Future()

        def work() -> None:
            try:
                torch.set_num_threads(self.config.engine.threads)
                future.set_result(self.algorithm.server_training(self.server))
            except BaseException as error:
                future.set_exception(error)

        if self.concurrent:
            threading.Thread(target=work, name="server training").start()
        else:
            work()
        return future

    def _phases(self, training: Future[Mapping[str, Vector]] | None) -> _RoundResults:
        results = _RoundResults({}, {})
        broadcasts: list[Handle] = []
        scalars: list[Mapping[str, Any]] = []
        cut = shares(
            self.work, self.pool.slots, self.pool.at_once, self.experiment.chunk, self._nodes_per_task(),
            least=LEAST_SECONDS / self.pace if self.pace else 0,
            longest=LONGEST_SECONDS / self.pace if self.pace else math.inf,
        )  # fmt: skip
        for position, phase in enumerate(self.algorithm.phases):
            if training is not None and phase == self.algorithm.server_training_before:
                self.server.vectors |= training.result()
            broadcast = self.algorithm.broadcast(self.server, phase)
            broadcasts.append(self.pool.publish(broadcast.shared))
            scalars.append(broadcast.scalars)
            tasks = [self._task(position, blocks, broadcasts, scalars) for blocks in cut]
            sums, columns = self._reduce(tasks, position, results)
            self.algorithm.server_update(self.server, phase, sums, columns)
        self.pace = results.seconds / sum(self.work)
        return results

    def _task(
        self,
        phase: int,
        blocks: list[tuple[int, int]],
        broadcasts: list[Handle],
        scalars: list[Mapping[str, Any]],
    ) -> PhaseTask:
        cohort, places = self.server.cohort, positions(blocks)

        def of_task(values: Sequence[Any]) -> list[Any]:
            return [values[place] for place in places]

        ids, gaps = of_task(cohort.ids), of_task(cohort.gaps)
        return PhaseTask(
            round=self.server.round,
            phase=phase,
            blocks=blocks,
            members=len(cohort.ids),
            work=sum(of_task(self.work)),
            lr=self.server.lr,
            ids=ids,
            weights=of_task(cohort.weights),
            steps=of_task(cohort.steps),
            gaps=gaps,
            broadcasts=tuple(broadcasts),
            scalars=[{name: of_task(values) for name, values in each.items()} for each in scalars],
            states=[self.states.get(client) for client in ids] if self.algorithm.stateful else (),
            received=[self.past.get(self.server.round - gap) if gap else None for gap in gaps]
            if self.algorithm.needs_received
            else (),
        )

    def _reduce(
        self, tasks: list[PhaseTask], phase: int, results: _RoundResults
    ) -> tuple[dict[str, Vector], dict[str, list[float]]]:
        """Run a phase's tasks, after what is left to evaluate of the round before; the reduced uploads (float32) and
        the clients' scalars in id order."""
        members, device = len(self.server.cohort.ids), self.worker.device
        trees: dict[str, TreeSum] = {}
        columns: dict[str, list[float]] = {}
        scales: dict[str, list[float]] = {}
        models: set[str] = set()
        left = self.unfinished.evaluation if self.unfinished is not None and not phase else None
        for task, result in self._map([*(left.tasks if left else ()), *tasks], sticky=phase > 0):
            if left and not isinstance(task, PhaseTask):
                left.take(task, result)
                continue
            for name, partial in result.sums.items():
                # results may lie read-only in shared memory
                tree = trees.setdefault(name, TreeSum(members, in_place=False))
                for node, value in partial.nodes.items():
                    tree.add(node, tensor_over(value).to(device))
                if partial.is_model:
                    models.add(name)
                if partial.scale is not None:
                    column = scales.setdefault(name, [math.nan] * members)
                    for place, scale in zip(task.positions, partial.scale, strict=True):
                        column[place] = scale
            results.seconds += sum(result.seconds.values())
            for found, kept in ((result.scalars, columns), (result.log, results.log)):
                for name, values in found.items():
                    column = kept.setdefault(name, [math.nan] * members)
                    for place, value in zip(task.positions, values, strict=True):
                        column[place] = value
            given = dict(zip(task.ids, result.states, strict=False))
            self.pool.drop([results.states[client] for client in given if client in results.states])
            results.states |= given
        sums: dict[str, Vector] = {}
        for name, tree in trees.items():
            total = self._scaled(tree.total(), scales.get(name), name in models).float()
            sums[name] = self.worker.network.layout.model(total) if name in models else total
        return sums, columns

    def _scaled(self, total: Tensor, scale: list[float] | None, is_model: bool) -> Tensor:
        """A sum over the cohort, divided by that of the clients' ``scale`` if there is one; but not counts, which are
        one client's."""
        if scale is None:
            return total
        scaled = total / math.fsum(scale)
        for place in self.worker.network.layout.whole_numbers if is_model else ():
            scaled[place] = total[place]
        return scaled

    def _inputs(self, server: ServerState, size: int, source: str) -> Tensor:
        samples = self.worker.train if source == "public" else self.worker.test
        indices = self.data.public if source == "public" else np.arange(len(self.data.y_test))
        if size < len(indices):
            rng = seeds.stream(server.seed, Purpose.PROBE, server.round)
            indices = np.sort(rng.choice(indices, size, replace=False))
        return samples.gather(indices)[0]

    def checkpoint(self) -> None:
        """Write a checkpoint, after everything that was recorded up to it; nothing if the round has one already."""
        if self.saved_round == self.server.round:
            return
        self.recorder.sync()
        handles = {file.name: file for file in self.states.values()}
        handles |= {f"model-{seen}": handle for seen, handle in self.past.items()}
        record = {
            "table": self.server.table,
            "costs": self.costs,
            "wall_seconds": self._wall(),
        }
        checkpoints.save(
            self.recorder.folder.checkpoints,
            self.server.round,
            Packed.of(self.server.vectors),
            record,
            states={client: self.states[client].name for client in sorted(self.states)},
            past={seen: f"model-{seen}" for seen in self.past},
            store=lambda name, path: self.pool.store(handles[name], path),
            keep=self.config.run.keep_checkpoints,
        )
        self.saved_round = self.server.round

    def _finish(self, status: str) -> None:
        model = self.algorithm.eval_model(self.server)
        layout = self.worker.network.layout
        named = {**frozen(self.worker.network.module), **layout.named(model)}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in named.items()}
        path = self.recorder.folder.path / ".model.safetensors"
        save_file(tensors, path)
        checkpoints.sync(path)
        path.rename(path.with_name("model.safetensors"))
        self.recorder.withdraw_promise(nondeterministic_operations())
        self.recorder.finish(
            status,
            parameters=layout.parameters,
            model_sha256=flat_sha256(layout.named(model)),
            partition_hash=self.data.partition_hash,
            **({} if self.data.class_names is None else {"class_names": self.data.class_names}),
        )


@dataclass
class _Finished:
    """A round that is trained: its row and its clients' rows, what is left to evaluate, and where the time went."""

    row: dict[str, Any]
    log: dict[str, Any]
    evaluation: Evaluation | None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class _RoundResults:
    """What is collected over the phases of a round: the clients' log columns in id order, their new states, and the
    seconds that all workers took."""

    log: dict[str, list[float]]
    states: dict[int, StateFile]
    seconds: float = 0.0
