"""Sets up the processes that compute, so that they are fast and give the same bits everywhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

from fedray.core.precision import TENSOR_CORES
from fedray.core.torch_state import neutral
from fedray.engine.determinism import CUBLAS, deterministic, unchanged_determinism
from fedray.errors import UserError

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc's allocator under which a training step returns no memory to the system. One of the two thresholds
alone is worse than none. Larger values make no step faster, and let every process keep more memory that it does not
use."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""Environment variables that give ATen, oneDNN and MKL the same instruction set on every CPU that has AVX2."""


def user_import_path() -> list[str]:
    """Returns the entries of ``sys.path`` at which this process finds the user's modules."""
    return [entry for entry in sys.path if entry and not entry.startswith((sys.prefix, sys.base_prefix))]


def _import_path() -> dict[str, str]:
    """Returns environment variables with which a Ray process finds the user's modules at the same places as this
    process. Entries that come before Python's own modules stay there; the others are added at the end, by
    ``fedray/__init__.py``."""
    entries = user_import_path()
    python = sysconfig.get_path("stdlib")
    first = [entry for entry in sys.path[: sys.path.index(python) if python in sys.path else 0] if entry in entries]
    last = [entry for entry in entries if entry not in first]
    return {"PYTHONPATH": os.pathsep.join(first), "FEDRAY_PATH": os.pathsep.join(last)}


def environment(threads: int, portable: bool) -> dict[str, str]:
    """Returns the environment variables of a computing process. They must be set before the process starts."""
    count = str(threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **_import_path(), **ALLOCATOR, **CUBLAS}
    return variables | PORTABLE if portable else variables


@contextlib.contextmanager
def computing_process(threads: int, portable: bool, precision: str = "fp32") -> Iterator[None]:
    """A context in which this process is set up to compute in ``train.precision``. torch's global settings are put back
    afterwards."""
    if portable and "torch" in sys.modules and any(os.environ.get(k) != v for k, v in PORTABLE.items()):
        raise UserError(
            "engine.portable_bits=true with engine.kind=local needs these set before Python starts: "
            + " ".join(f"{k}={v}" for k, v in PORTABLE.items())
        )
    import torch

    if libc := _glibc():
        libc.mallopt(_M_MMAP_THRESHOLD, int(ALLOCATOR["MALLOC_MMAP_THRESHOLD_"]))
        libc.mallopt(_M_TRIM_THRESHOLD, int(ALLOCATOR["MALLOC_TRIM_THRESHOLD_"]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with deterministic(tf32=precision == "tf32"), neutral():
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def unchanged_settings() -> Iterator[None]:
    """A context within :func:`computing_process` in which the user's code may change torch's settings on which bits
    depend. They are put back."""
    import torch

    threads = torch.get_num_threads()
    try:
        with unchanged_determinism():
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def return_free_memory() -> None:
    """Returns to the system what this process has freed. The allocator keeps what lies below something in use."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL("libc.so.6") if platform.libc_ver()[0] == "glibc" else None


def require_device(device: str, precision: str = "fp32") -> None:
    """Raises :class:`UserError` if torch can't use ``device`` in this process, or it has no such ``precision``. Ray may
    count a GPU that torch can't use."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UserError(
            f"engine.device=cuda: torch {torch.__version__} ({built}) can't use a GPU on {platform.node()}, though Ray "
            "counts one there: use engine.device=cpu, or install a torch and a driver that fit together"
        )
    if device == "cuda" and precision == "tf32" and torch.cuda.get_device_capability() < TENSOR_CORES:
        raise UserError(
            f"train.precision=tf32: {torch.cuda.get_device_name()} on {platform.node()} has no TF32, which came with "
            "compute capability 8.0: use fp32 or fp16"
        )


def describe(device: str) -> dict[str, Any]:
    """Describes this process: which node it is on, and everything on which the bits of its results depend."""
    import torch

    kind = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {
        "node": platform.node(),
        "pid": os.getpid(),
        "device": kind,
        "instructions": "" if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def same_kind(machines: list[dict[str, Any]]) -> bool:
    """Returns whether all these processes give the same bits: their devices, instruction sets and torch versions are
    equal."""
    return len({(m["device"], m["instructions"], m["torch"]) for m in machines}) <= 1


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
