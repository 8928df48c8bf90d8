"""Starts a Ray cluster on this machine, with its files in a folder that only this user can enter, even if the machine
is busy or the path of its temporary folder is long."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from fedray.config import EngineConfig
from fedray.engine.environment import given_to_cluster
from fedray.engine.interrupting import starting_helpers
from fedray.errors import RayNotStarted, UserError, first_line, first_sentence

INLINE_BYTES = 4 << 20
"""Results up to this size are sent together with an actor's answer. Ray's default limit is 100 kB. A larger result goes
through the object store, which takes several requests, and answers slowly while all cores train."""

OF_CLUSTER = {
    # by default Ray would start client actors, which do the main work, at a lower priority than other processes
    "RAY_worker_niceness": "0",
    # processes for as many tasks as there are processors would stay idle, if the run has fewer actors
    "RAY_prestart_worker_first_driver": "0",
    "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    # Ray serves its metrics on all of the machine's addresses, to anyone. -1 is no port: Ray logs that it can't serve
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Ray's settings for a cluster that is started on this machine, as environment variables. Variables that the user has
set keep their values."""

SOCKETS = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket below the folder of Ray's files. 4194304 stands for the largest number of a process."""

SOCKET_BYTES = 103
"""The largest number of bytes that every system allows in the path of a socket."""

OTHER = "ray-"
"""The beginning of the name of the folder that is made for a second try to start Ray."""

SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")

_sessions: list[Path] = []
"""The folders with the files of the clusters that this process has started."""


def start_cluster(engine: EngineConfig, say: Callable[[str], None], wanted: Callable[[], bool], **options: Any) -> None:
    """Starts a Ray cluster on this machine and connects to it. ``options`` are further arguments of ``ray.init``.

    If the start fails, there is a second attempt in another folder, unless ``wanted()`` returns false, because nobody
    needs the cluster any more. ``say(line)`` shows a line about the attempt to the user. No process of a failed start
    is left running. Raises :class:`RayNotStarted` if the last attempt fails, and :class:`UserError` if
    ``engine.spill_dir`` is the cause.
    """
    for name, value in OF_CLUSTER.items():
        os.environ.setdefault(name, value)
    try:
        Path.home()
    except RuntimeError:  # Ray keeps a token in the user's home folder
        os.environ["HOME"] = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        # where Ray keeps its token, which by itself it lets everybody read
        _make_private(Path.home() / ".ray")
    folder = private_folder()
    failure = _failure(engine, folder, options)
    if failure and wanted():
        folder = _other_folder(folder)
        say(f"Ray did not start ({failure}); trying once more, in {folder} ...")
        failure = _failure(engine, folder, options)
    if failure:
        raise RayNotStarted(f"Ray did not start on this machine: {failure} (Ray's logs are in {folder})")


def ray_folder() -> Path:
    """Returns the folder in which ``ray start`` keeps its files on this machine, such as ``/tmp/ray``. Ray lets all
    users write to it."""
    # follows Ray's own rule, for which Ray has no public function
    place = next((os.environ[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "/tmp")
    return Path(place, "ray").absolute()


def private_folder() -> Path:
    """Returns the folder in which the clusters that fedray starts keep their files, such as ``/tmp/fedray-1000/ray``.

    If no other user can enter the folder that contains :func:`ray_folder`, the result is :func:`ray_folder` itself.
    Otherwise it is in a folder of this user's, which :func:`start_cluster` makes, and which nobody else can enter.
    """
    folder = ray_folder()
    with contextlib.suppress(OSError):
        place = folder.parent.stat()
        if place.st_uid == os.getuid() and not place.st_mode & 0o077:
            return folder
    return folder.parent / f"fedray-{os.getuid()}" / folder.name


def _make_private(folder: Path) -> None:
    """Makes ``folder`` with mode 700, or gives it this mode. Raises OSError if it belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # a symbolic link may belong to somebody else, who can let it point elsewhere later
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _failure(engine: EngineConfig, folder: Path, options: dict[str, Any]) -> str | None:
    """Starts a Ray cluster with its files in ``folder`` and further ``options`` of ``ray.init``. Returns the reason why
    it did not start, or None if it did."""
    try:
        # Ray itself lets all users read and write its folder, so the folder around it keeps them out
        _make_private(folder.parent)
        with starting_helpers(), given_to_cluster(engine.threads, engine.portable_bits):
            started: Any = ray.init(
                address="local", include_dashboard=False, object_spilling_directory=engine.spill_dir,
                _temp_dir=str(_short(folder)), **options,
            )  # fmt: skip
        _sessions.append(Path(started.address_info["session_dir"]))
        return None
    except Exception as error:  # of all kinds; some are plain Exceptions
        shut_down()
        if engine.spill_dir is not None and isinstance(error, (OSError, ValueError)):
            raise UserError(
                f"Ray did not start with engine.spill_dir={engine.spill_dir}: {first_line(error)}"
            ) from None
        return first_sentence(error).rstrip(".")


def shut_down() -> None:
    """Closes the connection to Ray, and kills all processes of the Ray clusters that this process has started. Returns
    when they are gone."""
    # Ray would ask each of them to end by SIGTERM, which does not reach it, and wait for a second. The GCS server is
    # what Ray says goodbye to
    _end_processes(but="gcs_server")
    ray.shutdown()
    _end_processes()


def _end_processes(but: str = "") -> None:
    """Kills the processes of the Ray clusters that this process has started, and all that they have started, and waits
    until they are gone. Processes with the name ``but`` stay."""
    import psutil  # it comes with Ray, and is found once Ray is imported

    # the name of a cluster's folder contains the number of the process that started it
    ours = re.compile(rf"/session_[\d_-]+_{os.getpid()}(/|$)", re.MULTILINE)

    def left() -> set[Any]:
        found = set()
        for each in psutil.process_iter(["cmdline", "name"]):
            if each.info["name"] != but and ours.search("\n".join(each.info["cmdline"] or ())):
                with contextlib.suppress(psutil.Error):
                    # workers have other command lines
                    found |= {each, *each.children(recursive=True)}
        return found

    while found := left():
        # all are stopped before the first is killed, because they tell the user about each other's deaths
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for each in found:
                with contextlib.suppress(psutil.Error):
                    end(each)
        psutil.wait_procs(found, timeout=10)


def remove_files() -> None:
    """Removes the files, such as logs, of the Ray clusters that this process has started. Must be called after
    :func:`shut_down`."""
    while _sessions:
        session = _sessions.pop()
        shutil.rmtree(session, ignore_errors=True)
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)
        if session.parent.parent.name.startswith(OTHER):
            shutil.rmtree(session.parent.parent, ignore_errors=True)


def _other_folder(folder: Path) -> Path:
    """Returns a folder for Ray's files in a new folder near ``folder``, or in one of :data:`SHORT_PLACES` if that
    fails. Returns ``folder`` if no new folder can be made."""
    for place in (ray_folder().parent, *SHORT_PLACES):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=OTHER, dir=place), folder.name)
    return folder


def _short(folder: Path) -> Path:
    """Returns ``folder``, or a symbolic link to it if the paths of sockets in the folder would be too long for
    the system.

    A user always gets the same link for the same folder. Raises OSError if the link can't be made.
    """
    if len(os.fsencode(folder)) + len(SOCKETS) <= SOCKET_BYTES:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    for place in SHORT_PLACES:
        links = Path(place, f"fedray-{os.getuid()}")
        with contextlib.suppress(OSError):
            _make_private(links)
            link = links / name
            with contextlib.suppress(FileExistsError):
                link.symlink_to(folder)
            if link.resolve() == folder.resolve():
                return link
    raise OSError(f"the path of a socket in {folder} is longer than {SOCKET_BYTES} bytes; let RAY_TMPDIR be short")
