"""What other users of this machine get from Ray clusters that fedray starts or joins: neither a token nor a file."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_process import run

from fedray.config import EngineConfig
from fedray.engine.ray.cluster import existing_cluster
from fedray.errors import UserError

psutil = pytest.importorskip("psutil")

AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's view takes root")

START = """
import sys
from fedray.config import EngineConfig
from fedray.engine.ray.start import RayStart
with RayStart(EngineConfig(address="local"), lambda line: None, at_once=True) as start:
    start.ready()
    import ray
    print(ray._private.worker.global_worker.node.get_session_dir_path(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def ray_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which `ray start` keeps its files, as Ray makes it: all may write to it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # with a short name, because of Ray's sockets
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)
        Path(place).chmod(0o755)
        folder = Path(place, "ray")
        folder.mkdir()
        folder.chmod(0o777)
        yield folder


def test_a_cluster_that_may_be_somebody_elses_is_sent_nothing(ray_files: Path) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (ray_files / "ray_current_cluster").write_text(address)
        assert existing_cluster(EngineConfig(), said.append) is None
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""
        [line] = said
        assert line.startswith(f"the Ray cluster at {address} (named by {ray_files}/ray_current_cluster) is not used")
        assert line.endswith(f"set engine.address={address}")
        with pytest.raises(UserError, match="belongs to no Ray cluster of yours"):
            existing_cluster(EngineConfig(address="auto"))
    # of one that is dead nothing is said
    assert existing_cluster(EngineConfig(), said.append) is None
    assert len(said) == 1


def test_a_pipe_in_place_of_the_address_is_not_waited_for(ray_files: Path) -> None:
    os.mkfifo(ray_files / "ray_current_cluster")
    assert existing_cluster(EngineConfig()) is None


@pytest.mark.slow
def test_a_cluster_of_plain_ray_start_is_found_and_shown_the_token(ray_files: Path, tmp_path: Path) -> None:
    ray_files.rmdir()
    home: dict[str, str | None] = {"HOME": str(tmp_path), "RAY_AUTH_MODE": None}
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0123456789abcdef" * 4)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--port=0", "--num-cpus=1", "--block"]
    environment = {name: value for name, value in {**os.environ, **home}.items() if value is not None}
    with subprocess.Popen(
        [*command, "--include-dashboard=false"], stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        assert started.stdout is not None
        try:
            for line in started.stdout:
                if "will now block" in line:
                    break
            address = (ray_files / "ray_current_cluster").read_text()
            assert existing_cluster(EngineConfig()) == address
            assert existing_cluster(EngineConfig(address="auto")) == address
            # it asks for the user's token
            done = run(tmp_path, "engine.kind=ray", "engine.actors=1", change={**home, "RAY_ADDRESS": None})
            assert f"connecting to the Ray cluster at {address}" in done.stdout
            assert done.returncode == 0, done.stderr
            # a cluster that the user names gets it only if the user says so; one that wants another is told in a line
            other = tmp_path / "another"
            other.write_text("fedcba9876543210" * 4)
            strange = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(other)}
            for change, remedy in [
                (home, "RAY_AUTH_MODE=token, set before Ray is imported, shows it yours"),
                (home | {"HOME": str(tmp_path / "nobody")}, "copy it from there to ~/.ray/auth_token"),
                (home | strange, "the token that you show is another one"),
            ]:
                done = run(tmp_path, "engine.kind=ray", f"engine.address={address}", "run.output=x", change=change)
                assert done.returncode == 2
                (line,) = done.stderr.splitlines()
                assert f"engine.address={address} asks for a token: {remedy}" in line
        finally:
            started.terminate()


@contextlib.contextmanager
def cluster_of_fedray(home: Path) -> Iterator[Path]:
    """Starts a cluster as a run does, for a user with this home folder, and yields the folder of its session."""
    with subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "HOME": str(home)},
    ) as started:  # fmt: skip
        assert started.stdin is not None
        assert started.stdout is not None
        try:
            yield Path(started.stdout.readline().strip())
        finally:
            started.stdin.close()


def ports_of(session: Path) -> set[int]:
    """Returns the TCP ports at which processes of a session of Ray listen."""
    ports = set()
    for process in psutil.process_iter(["cmdline"]):
        if session.name in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                ports |= {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return ports


@needs_root
@pytest.mark.slow
def test_other_users_read_no_file_and_no_metrics_of_a_cluster_that_fedray_starts(
    ray_files: Path, tmp_path: Path
) -> None:
    with cluster_of_fedray(tmp_path) as session:
        # Ray's token is there, which Ray lets everybody read
        assert stat.S_IMODE((tmp_path / ".ray").stat().st_mode) == 0o700
        assert session.is_relative_to(ray_files.parent / f"fedray-{os.getuid()}")
        # Ray opens its own folders to all
        assert stat.S_IMODE((session / "logs").stat().st_mode) == 0o777
        for command in ("ls", "cat"):
            target = session / "logs" / ("raylet.out" if command == "cat" else "")
            other = subprocess.run([*AS_NOBODY, command, str(target)], capture_output=True, text=True, check=False)
            assert "Permission denied" in other.stderr
            assert not other.stdout
        ports = ports_of(session)
        assert ports
        for port in ports:
            # a refusal, or an answer of another protocol
            with pytest.raises((OSError, http.client.HTTPException)):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
