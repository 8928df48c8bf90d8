"""Machines of their own for tests: those that the script in $FEDRAY_TEST_HOSTS makes.

`up N` prints their addresses and leaves their ssh key as $TEST_HOSTS_DIR/id, `ssh I COMMAND` runs a command on one,
`cut I` and `mend I` pull its network cable and plug it in again, `down` removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Hosts:
    script: str
    folder: Path
    addresses: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        # the launcher's state and caches go to the folder too, and `ray` is that of this Python
        return os.environ | {
            "TEST_HOSTS_DIR": str(self.folder),
            "TMPDIR": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, *command: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """What a user would type, in the root of the checkout."""
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as expired:
            print(f"$ {' '.join(command)}  # not ended after {timeout} s\n{(expired.stdout or b'').decode()}")
            raise
        # the remote end is a terminal, with its line ends
        output = done.stdout.decode(errors="replace").replace("\r\n", "\n")
        print(f"$ {' '.join(command)}  # exit code {done.returncode}\n{output}")
        return subprocess.CompletedProcess(command, done.returncode, output)

    def ssh(self, host: int, command: str, timeout: float = 60) -> str:
        done = self.run(self.script, "ssh", str(host), command, timeout=timeout)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def ray_processes(self, host: int) -> str:
        return self.ssh(host, "pgrep -af '[r]aylet|[g]cs_server|ray:[:]|[l]og_monitor|[f]edray' || true")


@contextlib.contextmanager
def machines_up(count: int) -> Iterator[Hosts]:
    """Skips the test if there are no machines for it."""
    script = os.environ.get("FEDRAY_TEST_HOSTS")
    if not script:
        pytest.skip("no machines for a cluster: FEDRAY_TEST_HOSTS names no script that makes some")
    if os.geteuid() != 0 or not shutil.which("rsync") or not shutil.which("ssh"):
        pytest.skip("a cluster of test machines takes root, ssh and rsync")
    with tempfile.TemporaryDirectory(prefix="hosts", ignore_cleanup_errors=True) as name:
        machines = Hosts(script, Path(name), ())
        up = machines.run(script, "up", str(count))
        if up.returncode and "File exists" in up.stdout:
            pytest.skip("other tests have machines up, and they are not ours to remove")
        try:
            assert up.returncode == 0
            machines = Hosts(script, Path(name), tuple(re.findall(r"^host \d: (\S+)$", up.stdout, re.MULTILINE)))
            give_homes(machines)
            yield machines
        finally:
            machines.run(script, "down")


def give_homes(hosts: Hosts) -> None:
    """Each machine gets an empty home folder of its own, at one path, one for Ray's files, and the names of all.

    The machines share their disk with this one: without, they would share the token and write to the user's real home.
    """
    folder, numbers = hosts.folder, range(1, len(hosts.addresses) + 1)
    (folder / "home").mkdir()
    root = re.compile(r"^(root:(?:[^:]*:){4})[^:]*", re.MULTILINE)
    (folder / "passwd").write_text(root.sub(rf"\g<1>{folder}/home", Path("/etc/passwd").read_text()))
    names = [hosts.ssh(host, "hostname").strip() for host in numbers]
    lines = [f"{address} {name}\n" for address, name in zip(hosts.addresses, names, strict=True)]
    (folder / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))
    ray_files = Path("/tmp", f"fedray-{os.getuid()}")
    ray_files.mkdir(mode=0o700, exist_ok=True)
    for host in numbers:
        for name in ("home", "ray"):
            (folder / f"{name}{host}").mkdir()
        mounts = {f"home{host}": f"{folder}/home", f"ray{host}": str(ray_files), "passwd": "/etc/passwd",
                  "names": "/etc/hosts"}  # fmt: skip
        hosts.ssh(host, " && ".join(f"mount --bind {folder}/{source} {target}" for source, target in mounts.items()))
