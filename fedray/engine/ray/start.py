"""Starts Ray in a thread while torch and the data are loaded, because each of these takes seconds. So this module
imports neither torch nor Ray."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what it does at a fork must not begin between a fork's two halves
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from types import TracebackType

from fedray.config import EngineConfig
from fedray.engine.environment import forget_cluster
from fedray.engine.ray.tokens import authentication
from fedray.errors import RayNotStarted

LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_raylet_client_num_connect_attempts": "60",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
}
"""How long Ray's processes wait for each other while they start, as environment variables. Ray's default limits of 10
to 60 seconds are too short on a machine with 20 busy processes per core. Variables that the user has set keep their
values."""

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|marked dead"}
"""An environment variable with a pattern of lines that Ray does not print in the user's terminal. These are about
processes and nodes that died, by ids; fedray says itself what was lost, and on which host."""

PATIENCE = 15.0
"""The seconds after which the user is told that fedray waits for Ray. Further lines come at intervals of four
times this."""


class _Connection:
    """The connection of this process to Ray, where fedray has made it. All that need Ray at the same time share it, and
    the last of them closes it. ``is_new`` says whether the cluster was started here.

    The attributes may be read and changed only while :attr:`changing` is held.
    """

    changing = threading.Condition()
    current: _Connection | None = None

    def __init__(self, is_new: bool) -> None:
        self.is_new = is_new
        self.users = 0
        self.failed = False
        self.is_open = True

    @classmethod
    def joined(cls, engine: EngineConfig, say: Callable[[str], None], wanted: Callable[[], bool]) -> _Connection | None:
        """Returns the connection, with one more user, after making it if there is none. ``wanted()`` returns whether it
        is still needed. The result is None if it is not, or if the process was connected by others."""
        if not wanted():
            return None
        # set before the import, because Ray reads some of them then
        for name, value in (LIMITS | QUIET | authentication(engine)).items():
            os.environ.setdefault(name, value)
        from fedray.engine.ray.cluster import connect

        is_new = connect(engine, say, wanted)
        if is_new is not None:
            cls.current = cls(is_new)
        if cls.current is not None:
            cls.current.users += 1
        return cls.current

    def leave(self, failed: bool) -> None:
        """Makes the connection one user poorer. ``failed`` says that an exception has ended what the user did."""
        self.users -= 1
        self.failed |= failed
        self.changing.notify_all()

    def close(self) -> None:
        """Waits until nobody uses the connection, and closes it. Must be called by the thread that has made it."""
        import ray

        from fedray.engine.ray.local_cluster import remove_files, shut_down

        self.changing.wait_for(lambda: not self.users)
        self.is_open = False
        self.changing.notify_all()
        if _Connection.current is not self:
            return
        if self.is_new:
            shut_down()
        else:
            ray.shutdown()
        forget_cluster()
        if self.is_new and not self.failed:
            remove_files()
        _Connection.current = None


def how_busy() -> str:
    """Returns a text for messages about processes that do not start: ``9 processes want this machine's 2
    processors``."""
    return f"{os.getloadavg()[0]:.0f} processes want this machine's {os.cpu_count()} processors"


class RayStart:
    """A context manager that connects this process to Ray in a separate thread, so that torch and the data can be
    loaded meanwhile. It closes the connection at its end.

    ``engine`` is the section ``engine`` of the configuration, and ``say(line)`` shows a line to the user. With
    ``at_once`` the thread starts immediately, otherwise when the connection is first needed. At the end of the context
    a cluster that was started here is shut down, and its files are removed. If an exception ends the context, the files
    stay, because of their logs, and a connection that is still being made is not waited for. Contexts in several
    threads share a connection, which is closed at the end of the last one. If this process was connected before by
    others, that connection is used and stays open.
    """

    def __init__(self, engine: EngineConfig, say: Callable[[str], None], at_once: bool) -> None:
        self.engine, self._tell = engine, say
        self._found: Future[_Connection | None] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._connected, name="ray", daemon=True)
        if at_once:
            self._thread.start()

    def say(self, line: str) -> None:
        """Shows a line to the user, unless the context has ended."""
        if not self._over.is_set():
            self._tell(line)

    def _connected(self) -> None:
        with _Connection.changing, suppress(InvalidStateError):
            before = _Connection.current
            try:
                connection = _Connection.joined(self.engine, self.say, lambda: not self._over.is_set())
            except BaseException as error:
                self._found.set_exception(error)
                return
            try:
                self._found.set_result(connection)
            finally:
                if connection is not None:
                    if self._found.cancelled():
                        connection.leave(failed=True)
                    if connection is not before:
                        # Linux ends Ray's daemons together with the thread that started them
                        connection.close()

    def ready(self) -> bool:
        """Waits for the connection to Ray, and tells the user if that takes long.

        Returns True if the cluster was started here, so that no other node can join it, and False if it was there
        already. Raises :class:`fedray.errors.RayNotStarted` if Ray could not be started.
        """
        if self._thread.ident is None:
            self._thread.start()
        patience, waited = PATIENCE, 0.0
        while wait([self._found], timeout=patience).not_done:
            waited += patience
            self.say(f"Ray has not started for {waited:.0f} s; waiting for its processes ({how_busy()}) ...")
            patience = 4 * PATIENCE
        try:
            connection = self._found.result()
        except RayNotStarted as error:
            raise RayNotStarted(f"{error}; {how_busy()}") from None
        return connection is not None and connection.is_new

    def gpus(self) -> float:
        """Waits for the connection to Ray, and returns the number of GPUs in the whole cluster."""
        self.ready()
        from fedray.engine.ray.cluster import resources

        return resources().get("GPU", 0.0)

    def missing(self, check: Callable[[], str | None]) -> str | None:
        """Waits for the connection to Ray, and finds out whether a node of the cluster lacks something that the run
        needs, such as a compiler. For this, ``check()`` is called on all nodes; it returns a text that says what is
        missing, or None. Returns the first text, followed by the node's name, or None if no node lacks anything."""
        self.ready()
        from fedray.engine.ray.cluster import missing_on_nodes

        return missing_on_nodes(check, self.engine.start_timeout, self.say)

    def __enter__(self) -> RayStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._over.set()
        if self._thread.ident is None or (kind is not None and self._found.cancel()):
            return
        if self._found.exception() is None and (connection := self._found.result()) is not None:
            with connection.changing:
                connection.leave(failed=kind is not None)
                connection.changing.wait_for(lambda: connection.users or not connection.is_open)
