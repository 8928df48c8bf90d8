"""Ray clusters on hosts that are reached by ssh, for points that are measured on several hosts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedray.errors import UserError

PORT = 6379
KEPT = ("PYTHONPATH", "FEDRAY_DATA")
"""Environment variables of this process that processes on the hosts have too."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are reached by ssh without a password, on which this Python and this checkout have the same paths.

    ``names`` are addresses as ssh takes them, such as ``root@10.77.0.11``, and the part after the @ is also how the
    hosts reach each other. ``ssh`` is the command with its options.
    """

    names: Sequence[str]
    ssh: Sequence[str] = ("ssh",)
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def head(self) -> str:
        """The address of the cluster's head, which is the first host."""
        return f"{self.names[0].rpartition('@')[2]}:{PORT}"

    @contextlib.contextmanager
    def cluster(self, count: int) -> Iterator[None]:
        """A context in which the first ``count`` hosts are a Ray cluster. Ray lives on a host for as long as the
        connection to it, so that nothing is left there if this process dies. Raises :class:`UserError` if this Python
        has no command ``ray`` beside it."""
        program = Path(sys.executable).with_name("ray")
        if not program.exists():
            raise UserError(f"{program} is not there: hosts start Ray with the command of the Python that runs this")
        ray = shlex.quote(str(program))
        head = f"exec {ray} start --head --port={PORT} --include-dashboard=false --disable-usage-stats --block"
        worker = f"{self._await_head()}; exec {ray} start --address={self.head} --disable-usage-stats --block"
        with contextlib.ExitStack() as connections:
            for place, name in enumerate(self.names[:count]):
                connections.enter_context(self._kept_up(name, head if place == 0 else worker))
            yield

    @contextlib.contextmanager
    def _kept_up(self, name: str, command: str) -> Iterator[None]:
        """A context in which ``command`` runs on the host ``name``."""
        # job control, without which a job in the background would ignore the interrupt; upon a termination Ray would
        # first ask its head, which may have gone, whether it may leave
        script = (
            f"set -m\n{self._exports()}({command}) < /dev/null > /dev/null 2>&1 & cat > /dev/null; kill -INT $!; wait\n"
        )
        connection = subprocess.Popen([*self.ssh, name, "bash", "-s"], stdin=subprocess.PIPE, text=True)
        assert connection.stdin is not None
        try:
            connection.stdin.write(script)
            connection.stdin.flush()
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                connection.stdin.close()
            connection.wait()

    def run(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` on the cluster's head, in the folder in which this process is, and returns its output."""
        # the script is sent as input, because the token would be seen in the list of processes
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)} < /dev/null"
        script = f"{self._exports()}{self._await_head()}\n{there}\n"
        connection = [*self.ssh, self.names[0], "bash", "-s"]
        return subprocess.run(connection, input=script, capture_output=True, text=True, timeout=timeout)

    def _await_head(self) -> str:
        """Returns a command of bash that waits until the cluster's head listens, for two minutes at most."""
        listens = f"(exec 3<> /dev/tcp/{self.head.replace(':', '/')}) 2> /dev/null"
        return f"for _ in {{1..600}}; do {listens} && break; sleep 0.2; done"

    def _exports(self) -> str:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        wanted = {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_worker_niceness": "0"}
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in wanted.items())
