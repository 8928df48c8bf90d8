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
from typing import Any

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc's memory allocator with which a training step returns no memory to the system. Setting only one of
the two thresholds is worse than setting none. Larger values make no step faster, and let every process keep more
unused memory."""

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment variable that gives cuBLAS a workspace of a fixed size. It must be set before a process first
uses cuBLAS."""

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""Environment variables that make ATen, oneDNN and MKL use the same instruction set on every CPU that has AVX2."""

LATER = "FEDRAY_VARIABLES"
"""The environment variable with those variables, as a JSON object, that a Ray process sets itself before it imports
torch. The process that starts Ray must not have them, not even for a moment."""

_of_cluster: dict[str, str] = {}
"""The variables that all processes have of the Ray cluster that this process has started."""


def user_import_path() -> list[str]:
    """Returns the entries of ``sys.path`` at which this process finds the user's modules, so that other processes can
    look there, too."""
    return [entry for entry in sys.path if entry and not entry.startswith((sys.prefix, sys.base_prefix))]


def _import_path() -> dict[str, str]:
    """Returns environment variables with which a Ray process finds the user's modules where this process finds them.
    Folders that stand before Python's own modules in ``sys.path`` do so there, too; :func:`enter_ray_process` adds the
    others at the end."""
    entries = user_import_path()
    python = sysconfig.get_path("stdlib")
    first = [entry for entry in sys.path[: sys.path.index(python) if python in sys.path else 0] if entry in entries]
    last = [entry for entry in entries if entry not in first]
    return {"PYTHONPATH": os.pathsep.join(first), "FEDRAY_PATH": os.pathsep.join(last)}


def environment(threads: int, portable: bool) -> dict[str, str]:
    """Returns the environment variables, as a dict, with which a process that trains or evaluates must be started. They
    set the memory allocator, and say where the user's modules are. In :data:`LATER` are those that set the number of
    ``threads``, deterministic kernels and, if ``portable``, the same instruction set on all CPUs."""
    later = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **CUBLAS,
        **(PORTABLE if portable else {}),
    }
    return {**ALLOCATOR, **_import_path(), LATER: json.dumps(later)}


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
    """Sets the variables of :data:`LATER` in a process that Ray has started, and moves the folders of the user's
    modules to the end of the import path, so that they hide no other module.

    Ray puts the driver's working directory first. A file there with the name of a module of Python or of a library,
    such as profile.py, would be imported instead of that module.
    """
    os.environ.update(json.loads(os.environ.get(LATER, "{}")))
    if sys.path[:1] == [os.getcwd()]:
        sys.path.append(sys.path.pop(0))
    further = os.environ.get("FEDRAY_PATH", "").split(os.pathsep)
    sys.path.extend(entry for entry in further if entry and entry not in sys.path)
