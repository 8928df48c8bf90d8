"""The environment variables of the processes that train and evaluate.

This module imports neither torch nor Ray, because a process needs its variables before it imports these.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedray.engine.interrupting import let_children_end

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc's memory allocator with which a training step returns no memory to the system. Setting only one of
the two thresholds is worse than setting none. Larger values make no step faster, and let every process keep more
unused memory."""

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment variable that gives cuBLAS a workspace of a fixed size. It must be set before a process first
uses cuBLAS."""

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""Environment variables that make ATen, oneDNN and MKL use the same instruction set on every CPU that has AVX2."""

PROCESS = "FEDRAY_PROCESS"
"""The environment variable with what a Ray process does before it imports torch, as a JSON object: ``variables`` that
it sets, and folders of the user's modules for its import path, ``first`` (before Python's own) and ``last``. The
process that starts Ray must not have these variables, not even for a moment, and Ray's daemons must not import what
lies in these folders."""

_of_cluster: dict[str, str] = {}
"""The variables that all processes have of the Ray cluster that this process has started."""


def user_import_path() -> list[str]:
    """Returns the entries of ``sys.path`` at which this process finds the user's modules, so that other processes can
    look there, too."""
    return [entry for entry in sys.path if entry and not _is_of_libraries(entry)]


def _is_of_libraries(folder: str) -> bool:
    """Returns whether ``folder`` belongs to this Python or its environment, which other processes have, too."""
    prefixes = (os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    return os.path.join(folder, "").startswith(tuple(prefixes))


def environment(threads: int, portable: bool) -> dict[str, str]:
    """Returns the environment variables, as a dict, with which a process that trains or evaluates must be started. They
    set the memory allocator, and say where fedray is. :data:`PROCESS` has what sets the number of ``threads``,
    deterministic kernels and, if ``portable``, the same instruction set on all CPUs, and what lets the process find the
    user's modules where this process finds them."""
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **CUBLAS}
    entries = user_import_path()
    first = [entry for entry in sys.path[: _place_of_python()] if entry in entries]
    process = {
        "variables": variables | PORTABLE if portable else variables,
        "first": first,
        "last": [entry for entry in entries if entry not in first],
    }
    # of a checkout, installed or not: Ray's processes look first in the working directory, where they would take a
    # folder `fedray`, such as the checkout itself, for the package
    home = str(Path(__file__).parents[2])
    return {
        **ALLOCATOR,
        "PYTHONPATH": "" if _is_of_libraries(home) else home,
        PROCESS: json.dumps(process),
    }


def _place_of_python() -> int:
    """Returns the place of Python's own modules in ``sys.path``."""
    python = sysconfig.get_path("stdlib")
    return sys.path.index(python) if python in sys.path else 0


@contextlib.contextmanager
def given_to_cluster(threads: int, portable: bool) -> Iterator[None]:
    """A context in which a Ray cluster is started whose processes all have the variables of :func:`environment`. Ray
    starts a process seconds faster if it needs no other variables than its cluster."""
    variables = environment(threads, portable)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
        _of_cluster.update(variables)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def forget_cluster() -> None:
    """Must be called when the cluster of :func:`given_to_cluster` is gone."""
    _of_cluster.clear()


def runtime_env(threads: int, portable: bool) -> dict[str, Any] | None:
    """Returns Ray's option ``runtime_env`` for a process that trains or evaluates: None if the cluster's processes have
    the variables of :func:`environment`."""
    variables = environment(threads, portable)
    # a process that Ray has started passes on its own variables
    inherited = os.environ if "RAY_RAYLET_PID" in os.environ else _of_cluster
    if all(inherited.get(name) == value for name, value in variables.items()):
        return None
    return {"env_vars": variables}


def enter_ray_process() -> None:
    """Does in a process that Ray has started what :data:`PROCESS` says, and lets its children be ended.

    Ray puts the driver's working directory first in the import path. A file there with the name of a module of Python
    or of a library, such as profile.py, would be imported instead of that module. So it is moved to the end.
    """
    let_children_end()
    given = json.loads(os.environ.get(PROCESS, "{}"))
    os.environ.update(given.get("variables", {}))
    last = given.get("last", [])
    if sys.path[:1] == [os.getcwd()]:
        last = [sys.path.pop(0), *last]
    place = _place_of_python()
    sys.path[place:place] = [entry for entry in given.get("first", []) if entry not in sys.path]
    sys.path.extend(entry for entry in last if entry not in sys.path)
