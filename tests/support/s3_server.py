"""A server that speaks S3, as a process of its own, which a test can freeze: moto's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from pyarrow.fs import S3FileSystem

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    # otherwise the machine's place in Amazon's cloud is looked for
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """A running server with the bucket ``bucket``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def uri(self, path: str) -> str:
        return f"s3://bucket/{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which connections are accepted, but nothing is answered."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(process, port)
        files = S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True)
        files.create_dir("bucket")
        yield S3Server(process, port)
    finally:
        process.kill()
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server of S3 did not start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError("the server of S3 did not start in a minute")
