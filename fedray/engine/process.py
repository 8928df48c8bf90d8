"""Sets up the processes that compute, so that they are fast and give the same bits everywhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedray.core.precision import TENSOR_CORES
from fedray.core.torch_state import neutral
from fedray.engine.determinism import deterministic, unchanged_determinism
from fedray.engine.environment import ALLOCATOR, PORTABLE
from fedray.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@contextlib.contextmanager
def computing_process(threads: int, portable: bool, precision: str = "fp32") -> Iterator[None]:
    """A context in which this process is set up to train and evaluate: with ``threads`` threads, deterministic kernels
    and ``precision`` (``train.precision``). Afterwards torch's global settings are restored.

    Raises :class:`UserError` if ``portable`` (``engine.portable_bits``) is true, torch is already imported, and the
    environment variables for portable bits were not set before Python started.
    """
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
    """A context within :func:`computing_process` in which the user's code, such as a callback, may change torch's
    settings. Afterwards the settings on which the bits of results depend are restored."""
    import torch

    threads = torch.get_num_threads()
    try:
        with unchanged_determinism():
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def return_free_memory() -> None:
    """Gives the memory that this process has freed back to the operating system, except for memory below a block that
    is still in use."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL("libc.so.6") if platform.libc_ver()[0] == "glibc" else None


def require_device(device: str, precision: str = "fp32") -> None:
    """Checks that this process can compute on ``device`` ("cpu" or "cuda") in ``precision`` (``train.precision``).

    Raises :class:`UserError` if torch can't use the device here, even though Ray may have counted a GPU, or if the
    device does not support the precision.
    """
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
    """Returns a description of this process as a dict. ``node`` is the machine's name, and ``pid`` the number of the
    process. The bits of its results depend on the others: ``device`` (the model of the GPU or CPU), ``instructions``
    (the CPU's instruction set, empty for a GPU) and ``torch`` (its version). The argument ``device`` is "cpu" or
    "cuda"."""
    import torch

    kind = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {
        "node": platform.node(),
        "pid": os.getpid(),
        "device": kind,
        "instructions": "" if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def same_kind(machines: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether all processes of a run give the same bits, because they have the same device, instruction set and
    torch version. ``machines`` has a description of each process, made by :func:`describe`."""
    return len({(m["device"], m["instructions"], m["torch"]) for m in machines}) <= 1


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
