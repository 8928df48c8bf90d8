"""Opens a run: locks its folder, reads its last checkpoint, and makes the objects that run its rounds."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedray.client.phase import stacks
from fedray.data.federated import FederatedData
from fedray.data.partitions.holdings import Holdings
from fedray.engine.clients import Clients
from fedray.engine.evaluation.accuracies import further_columns
from fedray.engine.evaluation.client_scores import Scoring
from fedray.engine.gathering import lines_on_memory
from fedray.engine.pool import Pool
from fedray.engine.process import require_device, same_kind
from fedray.engine.run import Run
from fedray.engine.server_rules import further_models
from fedray.engine.state import checkpoint as checkpoints
from fedray.engine.state.run import RunState
from fedray.engine.state.states import StateFolder
from fedray.engine.worker import Worker
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.experiment.named import selection_name
from fedray.experiment.resolve import dump
from fedray.selection import NOTED
from fedray.tracking.failure import write_failure
from fedray.tracking.folder import LOCAL, FoundRun, RunFolder
from fedray.tracking.recorder import Recorder
from fedray.tracking.records import KEY
from fedray.tracking.tables import check_numbers
from fedray.warning import WARNING


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    data: FederatedData,
    make_pool: Callable[[Worker], tuple[Pool, Sequence[Mapping[str, Any]]]],
    concurrent: bool,
    overlap: bool = False,
    say: Callable[[str], None] = lambda line: None,
    node: str = "",
    close_pool: bool = True,
) -> Iterator[Run | None]:
    """Opens the run of ``experiment`` on ``data`` as a context: locks the run folder and starts the workers. At the end
    everything is closed. If an error ends the context, it is written into the folder.

    The context's value is the run, which continues from its last checkpoint if it has one, or None if another process
    finished it while this one waited for the folder. Raises :class:`UserError` if the folder can't be used.

    Args:
        make_pool: Takes the server's own worker. Returns the pool, and a description (a dict) of each process.
        concurrent: Whether the server trains a model of its own while the clients train.
        overlap: Whether a round is evaluated while the next one begins to train.
        say: ``say(line)`` shows a line to the user.
        node: Ray's id of this node; empty without Ray.
        close_pool: Whether the pool is closed at the end, or stays open for another run.
    """
    folder = RunFolder(experiment.config, experiment.inputs, experiment.defaults)
    with folder.lock(say), contextlib.ExitStack() as stack:
        found = folder.look(experiment.stepped)
        if found.status == "finished":
            yield None
            return
        warnings = [found.line] if found.line else []
        saved = _last_checkpoint(folder, found, experiment, warnings) if found.status == "unfinished" else None
        after = saved.round if saved else 0
        for name in ("metrics.csv", "profile.csv"):
            check_numbers(folder.path / name, after)
        require_device(experiment.server_device, experiment.precision)
        states = StateFolder.of_run(experiment.config, node, node)
        worker = Worker(Clients(experiment, data, states, experiment.server_device))
        pool, machines = make_pool(worker)
        stack.callback(states.clear)
        if close_pool:
            stack.callback(pool.close)
        # removes states that a killed run has left behind
        states.clear()
        # a rule that fails before the first round leaves no folder behind
        state, scoring = RunState.first(experiment, data, worker, pool), Scoring.from_config(experiment, data)
        warnings += lines_on_memory(experiment, state, worker.clients)
        columns = further_columns(experiment, scoring, list(further_models(experiment.algorithm, state.server)))
        folder.prepare(anew=experiment.config.run.resume is False or bool(found.line))
        checkpoints.discard(folder.checkpoints, after)
        stack.push(_failure_written(folder.path, states))
        unsure = sorted({operation for each in machines for operation in each.get("nondeterministic", ())})
        recorder = _recorder(folder, experiment, columns, scoring, machines, after)
        stack.callback(recorder.close)
        Holdings.of(data).write(folder.path / "partition.parquet")
        recorder.note(f"server: pid {os.getpid()} on {platform.node()}")
        warnings += [*_warnings(recorder, saved), *_on_operations(unsure), *_on_idle_workers(experiment, pool.slots)]
        recorder.withdraw_promise(unsure)
        for line in (*warnings, *experiment.notes):
            recorder.note(line)
            if line in warnings:
                say(line)
        run = Run(experiment, data, worker, pool, state, scoring, recorder, concurrent, overlap, say)
        if saved is not None:
            run.restore(saved)
            if state.by_hand:
                recorder.by_hand(state.by_hand)
        yield run


def back_to(experiment: Experiment, number: int) -> Experiment:
    """Lets the run of ``experiment``, which is not open, continue from its checkpoint of round ``number`` when it is
    opened next. Its later checkpoints are removed. Returns the experiment with which it is opened."""
    experiment = experiment.with_run_settings(resume="auto")
    folder = RunFolder(experiment.config, experiment.inputs, experiment.defaults)
    checkpoints.discard(folder.checkpoints, number)
    for path in (folder.path / LOCAL).glob("round-*"):
        if int(path.name.removeprefix("round-")) > number:
            shutil.rmtree(path)
    return experiment


def _failure_written(path: Path, states: StateFolder) -> Callable[..., None]:
    """Returns a function for the end of a context, which writes into the run folder ``path`` which error has ended the
    run, if any. Clients' ``states`` on this node, which are removed at the end anyway, are removed before, because
    they may fill the disk."""

    def at_end(kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            states.clear()
            write_failure(path, error)

    return at_end


def _recorder(
    folder: RunFolder,
    experiment: Experiment,
    columns: Sequence[str],
    scoring: Scoring,
    machines: Sequence[Mapping[str, Any]],
    after: int,
) -> Recorder:
    """Returns the recorder that writes the run folder of a run that continues after round ``after``. ``columns`` are
    those of metrics.csv that not every run has, and ``machines`` has descriptions of the run's processes."""
    processes = [{key: fact for key, fact in each.items() if key != "nondeterministic"} for each in machines]
    return Recorder(
        folder,
        dump(experiment.config),
        {"bits_promised": same_kind(processes), "processes": processes},
        columns,
        after=after,
        hyper_parameters=experiment.hyper_parameters,
        with_scores=scoring.wanted,
    )


def _warnings(recorder: Recorder, saved: checkpoints.Checkpoint | None) -> Iterator[str]:
    """Yields warnings for the user about damaged files of a run that continues from the checkpoint ``saved`` (None for
    a new run), and about nodes that may give different bits."""
    if saved is not None:
        if recorder.rows_lost > 0:
            yield f"warning: metrics.csv lacks {recorder.rows_lost} of the rows up to round {saved.round}"
        known, found = saved.record.get(KEY, {}), recorder.digests()
        for name in known.keys() & found.keys():
            if known[name] != found[name] and not (name == "metrics.csv" and recorder.rows_lost > 0):
                yield f"warning: {name} was damaged or changed: up to round {saved.round} it is not what was recorded"
    if not recorder.machine["bits_promised"]:
        yield "warning: the nodes differ in device, instruction set or torch version: bits are not promised"


def _on_operations(operations: Sequence[str]) -> list[str]:
    """Returns a list with a warning about ``operations``, which have no deterministic version; the list is empty if
    there are none."""
    if not operations:
        return []
    return [f"warning: bits are not promised, because they may differ from run to run: {'; '.join(operations)}"]


def _on_idle_workers(experiment: Experiment, workers: int) -> list[str]:
    """Returns a list with a line for the user if some of the ``workers`` have nothing to train because a cohort makes
    fewer stacks; otherwise the list is empty. The number of stacks can't follow that of the workers by itself, because
    it changes the bits of the results."""
    if not experiment.vectorize or experiment.chunk is None:
        return []
    members = experiment.cohort_size
    made = len(stacks(members, experiment.chunk))
    if made >= workers:
        return []
    return [
        f"{made} of the {workers} actors train at a time, because clients are trained in stacks, of which a cohort of "
        f"{members} makes {made} (a smaller engine.chunk makes more, and changes the bits)"
    ]


def _last_checkpoint(
    folder: RunFolder, found: FoundRun, experiment: Experiment, warnings: list[str]
) -> checkpoints.Checkpoint | None:
    """Returns the checkpoint from which the run continues, or None if the run has not finished a round yet. A line
    about each damaged checkpoint is added to ``warnings``.

    Raises :class:`UserError` if all checkpoints are lost, or ``experiment`` can't continue from the last one.
    """
    saved = checkpoints.load_last(folder.checkpoints, warnings.append)
    if saved is None:
        if warnings:
            what = warnings[-1].removeprefix(WARNING).split(";")[0]
            raise UserError(f"{what}, and no other is left: use run.resume=false to start over")
        if found.summary is not None and found.summary["rounds"]:
            raise UserError(f"{folder.path} has no checkpoint to go on from: use run.resume=false to start over")
        return None
    # a run that was to be longer has perhaps not been evaluated after the round that would now be its last
    if saved.round > experiment.rounds or saved.round == experiment.rounds < found.rounds:
        raise UserError(
            f"{folder.path} has gone on to round {saved.round} of {found.rounds} already: "
            f"run.rounds={experiment.rounds} can't end it there"
        )
    following = saved.round + 1
    needed = range(max(1, following - experiment.algorithm.earlier_models), following)
    if missing := set(needed) - saved.past.keys():
        raise UserError(
            f"the checkpoint of round {saved.round} in {folder.path} lacks the model of round {min(missing)}, as "
            "another version of fedray wrote it: use run.resume=false to start over"
        )
    noted = [name for name in experiment.selection.columns if name in NOTED]
    # nothing is noted of clients before one has taken part
    if saved.record["last_round"] and (lost := [name for name in noted if name not in saved.record["table"]]):
        raise UserError(
            f"the checkpoint of round {saved.round} in {folder.path} does not know clients' {lost[0]}, by which "
            f"train.sampling={selection_name(experiment.config.train.sampling)} chooses, as another version of fedray "
            "wrote it: go on with that version, or use run.resume=false to start over"
        )
    return saved
