"""Finds what runs have left behind on this machine, and removes what nobody uses any more (``fedray clean``)."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedray.engine.ray.local_cluster import OTHER, SHORT_PLACES, private_folder, ray_folder
from fedray.engine.state.states import FOLDER_PREFIX, OF_SERVER
from fedray.util.cache import cache_folder
from fedray.util.folder_use import FolderUse, in_use, owner_of
from fedray.util.uris import WORKING

UNFINISHED_SECONDS = 24 * 3600.0
"""For how long nobody must have written to an unfinished file until it counts as left behind. Its writer may be on
another machine that shares the disk."""

QUIET_SECONDS = 60.0
"""For how long a living cluster of Ray writes nothing at most: its processes may be hidden from this one, in another
container that shares the disk."""

UNFINISHED = re.compile(r"\..+\.\d+")
"""The names of files that are being written, as fedray gives them in folders that it has made: ``.NAME.PROCESS``."""

UNFINISHED_RECORD = re.compile(r"\..+\.[a-z]+\.\d+")
"""The names of such files in the folder of a run, sweep or suite itself, where each NAME has an ending."""

UNFINISHED_CHECKPOINT = re.compile(r"\.round-\d{8}\.\d+")
"""The names of checkpoints that are being written. No other folder has such a name."""

OF_RESULTS = ({"config.yaml", "inputs.json"}, {"sweep.yaml", "trials"}, {"suite.yaml", "suite.csv"})
"""What the folders of runs, sweeps and suites have in them, by which they are known. One of a pair alone may be the
user's."""

OF_RUNS = re.compile(r"checkpoints|shared|round-\d{8}|local|personal|.+\.parquet")
"""The names of folders that runs make in their folders. Others there are the user's."""

SCRATCH = "fedray-tune-"
"""The beginning of the names of a sweep's folders for temporary files; eight characters follow."""

OF_JOBS = "fedray-??????"
"""A pattern for the names of the folders that a job of ``cluster/slurm.sbatch`` makes for Ray."""

DIGEST = "[0-9a-f]" * 16
"""A pattern for the digests in names of folders and links."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that a run has made for its own use on the machine ``host``, and may have left behind.

    ``kind`` says what it is, such as "clients' states" or "unfinished file". ``run`` names the run or process to which
    it belongs, and is empty if that is not known. ``used`` says whether anybody still uses it, and is None if that
    can't be known. ``size`` is in bytes, ``changed`` is the time of the last change in seconds since 1970, and
    ``removed`` says that it has been removed since it was found.
    """

    kind: str
    path: str
    run: str
    used: bool | None
    size: int = 0
    changed: float = 0.0
    host: str = ""
    removed: bool = False


def find_leftovers(outputs: Sequence[str | Path], spill_dir: str | None, remove: bool = False) -> list[Leftover]:
    """Returns the files and folders that runs have made for their own use on this machine, of ended and of living runs.

    ``outputs`` are the paths of folders below which run folders are looked for, besides the working copies of runs at
    URIs in the user's cache. ``spill_dir`` is the folder of the
    setting ``engine.spill_dir``, where clients' states are looked for too, or None. With ``remove`` everything is
    removed that certainly nobody uses any more, and marked as removed in the result.
    """
    commands = _command_lines()
    places = [*outputs, cache_folder() / WORKING]
    found = [*_states(spill_dir), *_in_outputs(places), *_of_ray(commands), *_of_sweeps(), *_in_cache()]
    unique = {each.path: each for each in found if _is_own(each.path)}
    measured = [_measured(each) for each in unique.values()]
    return [_removed(each) if remove and each.used is False else each for each in measured]


def _states(spill_dir: str | None) -> Iterator[Leftover]:
    for place in (tempfile.gettempdir(), *([spill_dir] if spill_dir else [])):
        for path in Path(place).absolute().glob(FOLDER_PREFIX + DIGEST):
            yield Leftover("clients' states", str(path), owner_of(path), in_use(path))


def _in_outputs(outputs: Sequence[str | Path]) -> Iterator[Leftover]:
    for output in outputs:
        inside: set[str] = set()
        for place, folders, files in os.walk(Path(output).absolute()):
            if OF_SERVER in folders:
                path = Path(place, OF_SERVER)
                yield Leftover("clients' states", str(path), owner_of(path) or place, in_use(path))
            is_of_results = any(names <= {*files, *folders} for names in OF_RESULTS)
            if is_of_results or place in inside:
                inside |= {os.path.join(place, name) for name in filter(OF_RUNS.fullmatch, folders)}
                names = UNFINISHED_RECORD if is_of_results else UNFINISHED
                left = filter(UNFINISHED_CHECKPOINT.fullmatch, folders)
                for name in (*left, *filter(names.fullmatch, files)):
                    yield _unfinished(Path(place, name), place)
            folders[:] = [name for name in folders if not name.startswith(".")]


def _of_ray(commands: str) -> Iterator[Leftover]:
    """Yields the files of Ray clusters in the folder that fedray and ``ray up`` with its configuration use, those of
    other jobs of Slurm, and the short links to them. A cluster's processes have its folder in their commands."""
    for path in private_folder().glob("session_[0-9]*"):
        yield _of_cluster(path, path.name in commands)
    for place in map(Path, dict.fromkeys((str(ray_folder().parent), *SHORT_PLACES))):
        # what a second try to start Ray has made, and jobs of Slurm
        for path in (*place.glob(f"{OTHER}????????"), *place.glob(OF_JOBS)):
            if (path / "ray").is_dir() and path not in private_folder().parents and not path.name[7:].isdigit():
                yield _of_cluster(path, str(path) in commands)
        for path in place.glob(f"fedray-{os.getuid()}/{DIGEST}"):
            if path.is_symlink():
                yield Leftover("link to Ray's files", str(path), "", str(path) in commands)


def _of_cluster(path: Path, seen: bool) -> Leftover:
    return Leftover("Ray's files", str(path), "", seen or _idle(path) < QUIET_SECONDS)


def _of_sweeps() -> Iterator[Leftover]:
    for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}????????"):
        yield Leftover("files of a sweep", str(path), owner_of(path), in_use(path))


def _in_cache() -> Iterator[Leftover]:
    cache = cache_folder()
    for path in (*cache.glob("mapped/*.copy"), *cache.glob("mapped/*.partial"), *cache.glob("tmp????????")):
        yield _unfinished(path, "")


def _unfinished(path: Path, run: str) -> Leftover:
    return Leftover("unfinished file", str(path), run, _idle(path) < UNFINISHED_SECONDS)


def _idle(path: Path) -> float:
    """Returns for how many seconds nobody has written to a file or folder."""
    return time.time() - _measure(str(path))[1]


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False


def _measured(leftover: Leftover) -> Leftover:
    size, changed = _measure(leftover.path)
    return replace(leftover, host=platform.node(), size=size, changed=changed)


def _measure(path: str) -> tuple[int, float]:
    """Returns how many bytes of the disk a file or folder takes, and the time of its last change."""
    size, changed = 0, 0.0
    inside = (os.path.join(place, name) for place, _, files in os.walk(path) for name in (".", *files))
    for each in (path, *inside):
        with contextlib.suppress(OSError):
            found = os.lstat(each)
            size, changed = size + found.st_blocks * 512, max(changed, found.st_mtime)
    return size, changed


def _removed(leftover: Leftover) -> Leftover:
    path = Path(leftover.path)
    if leftover.kind == "clients' states":
        # only if nobody has begun to use it meanwhile
        FolderUse(path).remove(patience=0)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return replace(leftover, removed=not os.path.lexists(path))


def _command_lines() -> str:
    """Returns the commands of all processes on this machine, one a line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)
