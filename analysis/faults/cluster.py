"""Three hosts with a Ray node each, disks of their own that can be filled, and a storage that can be frozen."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = HEAD, OTHER, VICTIM = 1, 2, 3
PORT, STORAGE_PORT = 6379, 5055
NETWORK = os.environ.get("FEDRAY_TEST_NETWORK", "10.77.0")
"""The beginning of the hosts' addresses: that of this machine is NETWORK.1, and that of host 3 is NETWORK.13."""

NAMESPACE = os.environ.get("FEDRAY_TEST_NAMESPACE", "th")
"""The beginning of the names of the hosts' network namespaces, which a number follows."""

HERE = f"{NETWORK}.1"

DISK = 96 << 20
"""The bytes of a host's disk for clients' states."""

S3 = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": f"http://{HERE}:{STORAGE_PORT}",
}


def keep_hardware_address(address: str) -> None:
    """Lets this machine's interface with ``address`` keep its hardware address. That of a bridge is the lowest of those
    of its ports: when a port is added for a delayed wire, it may change, and the hosts, which know the old one, then
    send nothing to this machine for a minute."""
    (line,) = subprocess.check_output(["ip", "-o", "-4", "addr", "show", "to", address], text=True).splitlines()
    interface = line.split()[1]
    hardware = Path(f"/sys/class/net/{interface}/address").read_text().strip()
    subprocess.run(["ip", "link", "set", "dev", interface, "address", hardware], check=True)


class Hosts:
    """The hosts of the script in $FEDRAY_TEST_HOSTS, which has its files in ``folder``. ``storage`` is where runs write
    that are told a URI; whoever starts it sets it."""

    storage: ObjectStorage

    def __init__(self, folder: Path) -> None:
        self.script, self.folder = os.environ["FEDRAY_TEST_HOSTS"], folder / "hosts"
        self.environment = os.environ | {"TEST_HOSTS_DIR": str(self.folder)}
        self.address = address_of(HEAD)
        self.disks = {host: folder / "disks" / str(host) for host in HOSTS}
        self.nodes: dict[int, str] = {}
        for disk in self.disks.values():
            disk.mkdir(parents=True, exist_ok=True)
            # before the hosts, whose own mount tables are copies of this machine's
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], check=True)
        print(self("up", str(len(HOSTS))), end="", flush=True)
        keep_hardware_address(HERE)

    def __call__(self, *words: str, timeout: float = 120) -> str:
        done = subprocess.run(
            [self.script, *words], env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        return done.stdout + done.stderr

    def down(self) -> None:
        self("down")
        for disk in self.disks.values():
            subprocess.run(["umount", "-l", disk], check=False)

    def shell(self, host: int, command: str) -> str:
        """The command for a shell on ``host`` that runs ``command`` with what fedray and Ray need there."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(self.disks[host]),
            "RAY_TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.folder / f"cache-of-{host}"),
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", **S3,
        }  # fmt: skip
        return f"env {' '.join(f'{name}={shlex.quote(value)}' for name, value in variables.items())} {command}"

    def ssh(self, host: int, command: str, timeout: float = 120) -> str:
        return self("ssh", str(host), self.shell(host, command), timeout=timeout)

    def make_nodes(self, nodes: dict[int, str]) -> None:
        """Makes those of ``nodes`` the only Ray nodes, each started with the words in front of its command."""
        if self.nodes == nodes:
            return
        self.stop()
        for host, prefix in nodes.items():
            self.start(host, prefix)
        self.nodes = nodes

    def start(self, host: int, prefix: str = "") -> None:
        where = f"--address={self.address}:{PORT}"
        if host == HEAD:
            where = f"--head --port={PORT} --include-dashboard=false"
        self.ssh(host, f"{prefix} ray start {where} --num-cpus=1 --node-ip-address={address_of(host)}")

    def stop(self) -> None:
        for host in HOSTS:
            self.ssh(host, "ray stop --force")
        self.nodes = {}

    def signal(self, host: int, pattern: str, number: str = "-9") -> None:
        """Sends a signal to the first process on ``host`` whose command has ``pattern``."""
        self.ssh(host, f"sh -c {shlex.quote(f'pgrep -f {shlex.quote(pattern)} | head -1 | xargs -r kill {number}')}")

    def left(self) -> str:
        """What a run has left on the hosts: actors, and files on the disks for clients' states."""
        found = []
        for host, disk in self.disks.items():
            # Ray's own processes are called idle or agents
            processes = self("ssh", str(host), "pgrep -fa '^ray::[A-Z][a-z]' || true").splitlines()
            if actors := [line for line in processes if "Agent" not in line]:
                found.append(f"{len(actors)} actors on host{host}")
            if folders := list(disk.glob("fedray-*")):
                found.append(f"{len(folders)} folders on host{host}")
        return "; ".join(found)


def address_of(host: int) -> str:
    return f"{NETWORK}.1{host}"


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """A context in which the disk of ``folder`` has no byte left."""
    path = folder / "filler"
    try:
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        yield
    finally:
        path.unlink(missing_ok=True)


class ObjectStorage:
    """A server that speaks S3, with the bucket ``bucket``, on this machine."""

    def __init__(self) -> None:
        os.environ.update(S3)
        command = [sys.executable, "-m", "moto.server", "-H", HERE, "-p", str(STORAGE_PORT)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((HERE, STORAGE_PORT), timeout=1):
                break
            time.sleep(0.1)
        from pyarrow.fs import S3FileSystem

        S3FileSystem(allow_bucket_creation=True, endpoint_override=S3["AWS_ENDPOINT_URL"]).create_dir("bucket")

    def freeze(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
