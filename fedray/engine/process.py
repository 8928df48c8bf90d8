"""How a computing process is set up, so that it is fast and its results are the same everywhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

from fedray.engine.determinism import CUBLAS, deterministic
from fedray.errors import UserError

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_ARENA_MAX": "1"}
"""glibc's settings under which a training step returns no memory to the system: either threshold alone is worse than
neither. Larger ones make no step faster, and every process may keep as much that it does not use, in each arena."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""One instruction set for ATen, oneDNN and MKL on every CPU that has AVX2."""


def own_path() -> list[str]:
    """Where this process finds the user's own modules; others find them there too, as far as their node has them."""
    return [entry for entry in sys.path if entry and not entry.startswith((sys.prefix, sys.base_prefix))]


def _import_path() -> dict[str, str]:
    """Environment variables with which a process of Ray's looks for the user's modules where this one does: ahead of
    Python's own modules, or, by ``fedray/__init__.py``, after all others."""
    own = own_path()
    python = sysconfig.get_path("stdlib")
    ahead = [entry for entry in sys.path[: sys.path.index(python) if python in sys.path else 0] if entry in own]
    last = [entry for entry in own if entry not in ahead]
    return {"PYTHONPATH": os.pathsep.join(ahead), "FEDRAY_PATH": os.pathsep.join(last)}


def environment(threads: int, portable: bool) -> dict[str, str]:
    """Environment variables of a computing process, to be set before it starts."""
    count = str(threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **_import_path(), **ALLOCATOR, **CUBLAS}
    return variables | PORTABLE if portable else variables


@contextlib.contextmanager
def settled(threads: int, portable: bool) -> Iterator[None]:
    """This process as a computing process; torch's global settings are put back afterwards."""
    if portable and "torch" in sys.modules and any(os.environ.get(k) != v for k, v in PORTABLE.items()):
        raise UserError(
            "engine.portable_bits=true with engine.kind=local needs these set before Python starts: "
            + " ".join(f"{k}={v}" for k, v in PORTABLE.items())
        )
    import torch

    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, int(ALLOCATOR["MALLOC_MMAP_THRESHOLD_"]))
        libc.mallopt(_M_TRIM_THRESHOLD, int(ALLOCATOR["MALLOC_TRIM_THRESHOLD_"]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with deterministic():
            yield
    finally:
        torch.set_num_threads(before)


def require_device(device: str) -> None:
    """Raises :class:`UserError` if torch can't use ``device`` in this process, whatever Ray takes the node to have."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UserError(
            f"engine.device=cuda: torch {torch.__version__} ({built}) can't use a GPU on {platform.node()}, though Ray "
            "counts one there: use engine.device=cpu, or install a torch and a driver that fit together"
        )


def describe(device: str) -> dict[str, Any]:
    """What decides the bits of a result on this node, and which node it is."""
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
    """Whether results on these nodes are equal to the bit: device kind, instruction set and torch version agree."""
    return len({(m["device"], m["instructions"], m["torch"]) for m in machines}) <= 1


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
