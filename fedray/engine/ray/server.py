"""The Ray actor that is the server of a run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import ray

from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData
from fedray.engine.driver import Order
from fedray.engine.opening import back_to, open_run
from fedray.engine.pool import Pool
from fedray.engine.process import computing_process, same_kind
from fedray.engine.ray.pool import RayPool
from fedray.engine.ray.stored import StoredData
from fedray.engine.run import Run
from fedray.engine.worker import Worker
from fedray.errors import StateLost, first_line
from fedray.experiment.experiment import Experiment
from fedray.tracking.recorder import Recorder

BATCH_SECONDS = 0.1
"""If rounds take less than this many seconds, the server reports several rounds to the driver at a time."""


class ServerActor:
    """The Ray actor that runs the rounds. The driver (the user's process) creates it, and calls :meth:`run`. Meanwhile
    it calls :meth:`next` repeatedly, to learn what has happened in the run.

    ``data`` is the data set in Ray's object store. ``actors`` are Ray's handles of the client actors, which the driver
    starts before the server to save time.
    """

    def __init__(self, experiment: Experiment, data: StoredData, actors: list[Any]) -> None:
        self.experiment, self.data, self.actors = experiment, data, actors
        self.events: queue.Queue[list[Any] | None] = queue.Queue()
        self.orders: queue.Queue[Order] = queue.Queue()
        self.stop_asked = threading.Event()
        self.opened: Run | None = None
        self.pool: RayPool | None = None
        self.unrecorded: list[str] = []

    def run(self, lockstep: bool) -> None:
        """Runs the experiment to its end. With ``lockstep`` the server waits before each round until the driver has
        given an order for it, by calling :meth:`next`."""
        try:
            for events in self._run(lockstep):
                self.events.put(events)
        finally:
            self.events.put(None)

    def next(self, order: Order | None) -> list[Any] | None:
        """Waits for the next events of the run. Returns them as a list of pairs ``(kind, value)``, or None at the end
        of the run.

        The events are ("said", a line for the user), ("started", number of rounds that are already done) and ("round",
        :class:`~fedray.engine.callbacks.Report`). ``order`` says what the driver wants of the next round. It is None if
        the run does not wait for an order.
        """
        if order is not None:
            self.orders.put(order)
        return self.events.get()

    def _run(self, lockstep: bool) -> Iterator[list[Any]]:
        """Opens the run and yields lists of events, as :meth:`next` returns them. If clients' states are lost, the run
        goes back to its last checkpoint, with the actors that are there; if that happens more than
        ``engine.max_retries`` times in a row without a further round, it ends."""
        engine, run = self.experiment.config.engine, self.experiment.config.run
        data = self.data.get()
        with computing_process(engine.threads, engine.portable_bits, self.experiment.precision):
            try:
                lost, furthest = 0, -1
                while True:
                    try:
                        back = yield from self._rounds(data, lockstep)
                        if back is None:
                            return
                        furthest = back
                        self.experiment = back_to(self.experiment, back)
                    except StateLost as error:
                        reached = self.opened.state.server.round if self.opened else -1
                        lost, furthest = (0 if reached > furthest else lost) + 1, max(reached, furthest)
                        if lost > engine.max_retries or not run.checkpoint_every:
                            raise
                        self._say(f"{first_line(error)}; going back to the last checkpoint")
                        self.experiment = self.experiment.with_run_settings(resume="auto")
            finally:
                # the log is closed, so what is said from now on is only shown
                self.opened = None
                if self.pool is not None:
                    self.pool.close()

    def _rounds(self, data: FederatedData, lockstep: bool) -> Generator[list[Any], None, int | None]:
        """Yields lists of events until the run ends, or an order wants it to go back to a checkpoint. Returns the round
        of this checkpoint then."""
        here = ray.get_runtime_context().get_node_id()
        with open_run(
            self.experiment, data, self._pool_for, True, not lockstep, self._say, here, close_pool=False
        ) as run:
            if run is None:
                return None
            assert self.pool is not None
            self.opened, run.stopping = run, self.stop_asked
            for line in self.unrecorded:
                run.recorder.note(line)
            self.unrecorded.clear()
            self.pool.joined = partial(self._joined, run.recorder)
            if self.experiment.config.run.checkpoint_every:
                self.pool.nodes.saved_at = lambda: run.checkpoints.saved_at
            rounds, sent = run.rounds(), time.monotonic()
            event: tuple[str, Any] | None = ("started", run.state.server.round)
            pending: list[Any] = []
            while event is not None:
                pending.append(event)
                now = time.monotonic()
                if lockstep or now - sent >= BATCH_SECONDS or event[0] == "started":
                    yield pending
                    pending, sent = [], now
                if lockstep:
                    with run.waiting():
                        order = self.orders.get()
                    if order.back_to is not None:
                        return order.back_to
                    run.obey(order)
                report = next(rounds, None)
                event = None if report is None else ("round", report)
            yield pending
            return None

    def _pool_for(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        """Returns the pool of the client actors, and descriptions of their processes. If the run has gone back to a
        checkpoint, it is the pool that the run had before."""
        if self.pool is None:
            states = worker.clients.states
            self.pool = RayPool(self.experiment, self.data, self.actors, states, self._tell, self._note)
        else:
            self.pool.start_over()
        return self.pool, self.pool.machines

    def _joined(self, recorder: Recorder, machine: dict[str, Any]) -> None:
        """Records that a client actor has started, whose process is described by ``machine``."""
        recorder.add_process({key: fact for key, fact in machine.items() if key != "nondeterministic"})
        recorder.withdraw_promise(machine.get("nondeterministic", ()))
        if recorder.machine["bits_promised"] and not same_kind(recorder.machine["processes"]):
            recorder.machine["bits_promised"] = False
            self._tell(
                f"warning: {machine['node']} differs in device, instruction set or torch version: bits are not "
                "promised any more"
            )

    @neutral()
    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the run for the driver, and returns the result. It can be called while the run waits for an
        order."""
        assert self.opened is not None
        return getattr(self.opened, method)(*arguments)

    def _say(self, line: str) -> None:
        self.events.put([("said", line)])

    def _tell(self, line: str) -> None:
        """Shows ``line`` to the user, and writes it into the run's log."""
        self._say(line)
        self._note(line)

    def _note(self, line: str) -> None:
        if self.opened is None:
            self.unrecorded.append(line)
        else:
            self.opened.recorder.note(line)

    def stop(self) -> None:
        """Ends the run after the round in progress. The driver calls it when the user has asked for that."""
        self.stop_asked.set()
