"""Starts Ray in a thread while torch and the data are loaded, because each of these takes seconds. So this module
imports neither torch nor Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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

_given_up: list[threading.Thread] = []
"""Threads that are still making a connection to Ray that nobody needs any more. Each closes its connection once it
is made."""


def _busy() -> str:
    return f"{os.getloadavg()[0]:.0f} processes want this machine's {os.cpu_count()} processors"


class RayStart:
    """A context manager that connects this process to Ray in a separate thread, so that torch and the data can be
    loaded meanwhile. It closes the connection at its end.

    ``engine`` is the section ``engine`` of the configuration, and ``say(line)`` shows a line to the user. With
    ``at_once`` the thread starts immediately, otherwise when the connection is first needed. At the end of the context
    a cluster that was started here is shut down, and its files are removed. If an exception ends the context, the files
    stay, because of their logs, and a connection that is still being made is not waited for. If this process was
    connected before, that connection is used and stays open.
    """

    def __init__(self, engine: EngineConfig, say: Callable[[str], None], at_once: bool) -> None:
        self.engine, self._tell = engine, say
        self._found: Future[bool | None] = Future()
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._connected, name="ray", daemon=True)
        if at_once:
            self._thread.start()

    def say(self, line: str) -> None:
        """Shows a line to the user, unless the context has ended."""
        if not self._over.is_set():
            self._tell(line)

    def _connected(self) -> None:
        try:
            while _given_up:
                _given_up.pop().join()
            if self._over.is_set():
                self._found.set_result(None)
                return
            # set before the import, because Ray reads some of them then
            for name, value in (LIMITS | QUIET | authentication(self.engine)).items():
                os.environ.setdefault(name, value)
            import ray

            from fedray.engine.ray.cluster import connect

            self._found.set_result(connect(self.engine, self.say, lambda: not self._over.is_set()))
        except BaseException as error:
            self._found.set_exception(error)
            return
        # the thread must stay alive, because Linux ends Ray's daemons together with the thread that started them
        self._over.wait()
        if self._found.result() is None:
            return
        ray.shutdown()
        forget_cluster()
        if self._found.result() and not self._failed:
            from fedray.engine.ray.local_cluster import remove_files

            remove_files()

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
            self.say(f"Ray has not started for {waited:.0f} s; waiting for its processes ({_busy()}) ...")
            patience = 4 * PATIENCE
        try:
            return bool(self._found.result())
        except RayNotStarted as error:
            raise RayNotStarted(f"{error}; {_busy()}") from None

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
        self._failed = kind is not None
        self._over.set()
        if self._thread.ident is None:
            return
        if kind is not None and not self._found.done():
            _given_up.append(self._thread)
            return
        self._thread.join()
