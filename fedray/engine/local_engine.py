"""The local engine, which runs an experiment without Ray. The server runs in this process, and the clients too unless
``engine.kind`` names a user-defined pool of workers. The code and the bits of the results are the same as on Ray."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.driver import Driver, Event, Events, Order, Started, copying
from fedray.engine.opening import back_to, open_run
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import computing_process, require_device, unchanged_settings
from fedray.engine.worker import Worker
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.usercode.extensions import find
from fedray.usercode.importing import as_user_error


class LocalEngine:
    """Runs ``experiment`` on ``data`` (the samples, and which client holds each) with the server in this process and
    without Ray. The clients run here too, unless ``engine.kind`` names a user-defined pool of workers."""

    def __init__(self, experiment: Experiment, data: FederatedData) -> None:
        self.experiment, self.data = experiment, data

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context in which the events of :meth:`run` must be asked for, because this process computes."""
        engine = self.experiment.config.engine
        return computing_process(engine.threads, engine.portable_bits, self.experiment.precision)

    def user_code(self) -> AbstractContextManager[None]:
        """Returns a context, within that of :meth:`computing`, for code of the user's that the run waits for."""
        return unchanged_settings()

    def run(self, driver: Driver) -> Events:
        """Runs the experiment to its end, or until ``driver`` asks for a stop. Yields the run's events."""
        self.experiment = self.experiment.with_fixed_place()
        while (number := (yield from self._rounds(driver))) is not None:
            self.experiment = back_to(self.experiment, number)

    def _rounds(self, driver: Driver) -> Generator[Event, Order | None, int | None]:
        """Yields the events of the run until it ends, or an order wants it to go back to a checkpoint. Returns the
        round of this checkpoint then."""
        with open_run(self.experiment, self.data, self._pool, False, say=driver.say) as run:
            if run is None:
                return None
            run.stopping = driver.stopping

            @neutral()
            def ask(method: str, *arguments: Any) -> Any:
                return getattr(run, method)(*arguments)

            rounds = run.rounds()
            event: Event | None = Started(run.state.server.round, ask)
            while event is not None:
                with run.waiting():
                    order = (yield event) or Order()
                if order.back_to is not None:
                    return order.back_to
                run.obey(order)
                # resets torch's state, which a callback may have changed
                with neutral():
                    report = next(rounds, None)
                event = None if report is None else replace(report, look=copying(self.experiment, ask))
            return None

    def _pool(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        experiment = self.experiment
        if experiment.device != experiment.server_device:
            require_device(experiment.device, experiment.precision)
            worker = Worker(Clients(experiment, self.data, worker.clients.states, experiment.device))
        return make_pool(experiment.config.engine.kind, worker), [worker.describe()]


def make_pool(kind: str, worker: Worker) -> Pool:
    """Returns the pool of workers that ``kind``, the value of ``engine.kind``, names: "local" for the pool of this
    process, or ``file.py:Class`` for an instance of a user-defined class. The class is called with ``worker``, which
    does tasks in this process.

    Raises :class:`UserError` if there is no such class, or it can't be instantiated, or its instance lacks a method.
    """
    found = find(kind, "engine.kind", {"local": LocalPool})
    with as_user_error(f"engine.kind={kind} can't be made"):
        pool: Pool = found(worker)
    missing = [name for name in vars(Pool) if not name.startswith("_") and not hasattr(pool, name)]
    if missing:
        raise UserError(f"engine.kind={kind} is no pool: it has no {missing[0]!r} (see fedray.engine.pool.Pool)")
    return pool
