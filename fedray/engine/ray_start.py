"""Starts Ray in a thread while torch and the data are loaded, because each takes seconds. This module imports neither
of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from fedray.config import EngineConfig


class RayStart:
    """A connection to Ray, made in a thread of its own. With ``at_once`` it is begun immediately, otherwise when it is
    first needed. It is closed at the end of the context.

    A connection that this process had before is used, and stays open.
    """

    def __init__(self, engine: EngineConfig, say: Callable[[str], None], at_once: bool) -> None:
        self.engine, self.say = engine, say
        self._found: Future[bool | None] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._connected, name="ray", daemon=True)
        if at_once:
            self._thread.start()

    def _connected(self) -> None:
        try:
            import ray

            from fedray.engine.ray_cluster import connect

            self._found.set_result(connect(self.engine, self.say))
        except BaseException as error:
            self._found.set_exception(error)
            return
        # Linux ends Ray's daemons together with the thread that started them
        self._over.wait()
        if self._found.result() is not None:
            ray.shutdown()

    def ready(self) -> bool:
        """Waits for the connection. Returns whether the cluster was started here, so that no other node can join it."""
        if self._thread.ident is None:
            self._thread.start()
        return bool(self._found.result())

    def gpus(self) -> float:
        """Waits for the connection. Returns how many GPUs all nodes of the cluster have together."""
        self.ready()
        import ray

        return ray.cluster_resources().get("GPU", 0)

    def missing(self, check: Callable[[], str | None]) -> str | None:
        """Waits for the connection. Returns what ``check()`` returns on the first node where it is not None, with the
        node's name; None if there is none."""
        self.ready()
        from fedray.engine.ray_cluster import missing_on_nodes

        return missing_on_nodes(check, self.engine.start_timeout)

    def __enter__(self) -> RayStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
