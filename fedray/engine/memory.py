"""Estimates and measures how much memory the training of clients takes, for error messages and for sharing a GPU."""

from __future__ import annotations

import contextlib
import math
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedray.core.batches import Batch
from fedray.core.rounding import whole_units
from fedray.core.structure import leaves
from fedray.gradients.network import Network

VECTORS = 5
"""How many vectors as long as a model a client's training holds in memory at once, in addition to the client's state:
parameters, gradient, direction, the carry from step to step, and a sum over clients in double precision."""

HEADROOM = 0.9
"""The fraction of a device's free memory that may be used. Memory allocators can't use the remaining part."""

CONTEXT = 600_000_000
"""The bytes that the CUDA context of a process takes on a GPU. This is an assumption, because a process can't measure
its own context."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` means that there was not enough memory. torch raises different types of errors for
    different devices."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def activations(network: Network, x: Any) -> int:
    """Returns how many bytes a forward pass of ``network`` with the inputs ``x [b, ...]`` keeps for the backward pass,
    not counting the model's parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in network.module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    network.training_mode(x, len(leaves(x)[0]))
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = network.outputs(x, features=False).logits
    del logits
    return sum(kept.values())


def memory_of_client(network: Network, x: Any, state_width: int) -> int:
    """Estimates how many bytes of memory the training of one client takes. ``x [b, ...]`` are the inputs of a
    mini-batch, and ``state_width`` is the number of floats that the client keeps between rounds. The estimate is the
    sum of a few vectors as long as the model, these floats, and twice the activations that a forward pass keeps,
    because the backward pass needs as much memory again."""
    return 4 * (VECTORS * network.layout.row_width + state_width) + 2 * activations(network, x)


def available(device: torch.device) -> int:
    """Returns how many bytes of memory this process can still get on ``device``. On a GPU this includes memory that
    torch has reserved but does not use. On a CPU it is the smallest of three amounts: the machine's free memory, the
    free memory of its container, and what the process may still take up to its own limit (``ulimit -v``)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = [int(fields["MemAvailable"].split()[0]) * 1024]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        left.append(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        left.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(left))


def too_large(network: Network, clients: int, batch: Any, state_width: int, reason: str) -> str:
    """Returns the error message for clients that were trained together and did not fit into memory. It shows how much
    memory they need, and names a setting with which they may fit.

    ``clients`` is the number of these clients, ``batch [b, ...]`` the inputs of one client's mini-batch, and
    ``state_width`` the number of floats that each client keeps between rounds. ``reason`` is the original error's
    message.
    """
    vectors = 4 * (VECTORS * network.layout.row_width + state_width)
    each = memory_of_client(network, batch, state_width)
    there = available(network.device)
    fits = clients
    while fits > 1 and fits * each > HEADROOM * there:
        fits //= 2
    # the estimate may be too low, but the number of clients that failed certainly does not fit
    fits = min(fits, clients // 2)
    remedy = f"engine.chunk={fits}" if fits else "a smaller train.batch_size or model"
    at_once = f"{clients} client{'s' if clients > 1 else ''} at once"
    samples = f"activations of {len(leaves(batch)[0])} samples and their gradients"
    parts = f"vectors {_size(vectors)}, {samples} {_size(each - vectors)}"
    return (
        f"out of memory on {_device_name(network.device)}: {at_once} x about {_size(each)} ({parts}) = "
        f"{_size(clients * each)}, and {_size(there)} are free ({reason}); {remedy} may fit"
    )


@dataclass(frozen=True)
class Footprint:
    """The memory that one client actor, a process that trains clients, takes on a GPU, in bytes. ``context`` is the
    memory of its CUDA context and of the data set, and ``chunk`` the most that is added while it trains a stack.
    ``device`` is the GPU's name, ``total`` its whole memory, and ``free`` what was free of it before the actor
    started."""

    device: str
    context: int
    chunk: int
    free: int
    total: int

    @property
    def whole(self) -> int:
        """The bytes of GPU memory that the actor takes while it trains."""
        return self.context + self.chunk

    @property
    def fits(self) -> int:
        """How many actors with this footprint fit together into the free memory of the GPU."""
        return int(HEADROOM * self.free // self.whole)

    def arithmetic(self, actors: int) -> str:
        """Returns a text that shows whether ``actors`` such actors fit into the free memory, such as
        ``2 x 3 GB (context and data 1 GB, a chunk 2 GB) = 6 GB of 80 GB free on NVIDIA H100``."""
        return (
            f"{actors} x {_size(self.whole)} (context and data {_size(self.context)}, a chunk {_size(self.chunk)}) = "
            f"{_size(actors * self.whole)} of {_size(self.free)} free on {self.device}"
        )

    def warning(self) -> str | None:
        """Returns a warning for the user if other processes used a fifth of the GPU's memory or more before the actor
        started, or else None."""
        used = self.total - self.free
        if used < 0.2 * self.total:
            return None
        return f"warning: {self.device} is busy: {_size(used)} of its {_size(self.total)} were taken before this run"


def processes_per_gpu(footprint: Footprint, cpus: float, most: int) -> int:
    """Returns how many processes that train clients should share a GPU. ``footprint`` is the memory that one of them
    takes, and the result is the number that fits into the GPU's memory. But it is at most ``most``, at most ``cpus``,
    and at least one. ``cpus`` says for how many processes there are enough CPUs for each GPU; it is rounded down."""
    return max(1, min(footprint.fits, most, whole_units(cpus)))


def footprint(network: Network, batch: Batch, state_width: int) -> Footprint:
    """Measures the GPU memory that this process takes to train C clients together, by computing their gradients for
    ``batch [C, b, ...]`` once. ``state_width`` is the number of floats that each client keeps between rounds."""
    free, total = torch.cuda.mem_get_info(network.device)
    data = torch.cuda.memory_reserved(network.device)
    clients = len(batch.y)
    vectors = [torch.zeros(clients, VECTORS * network.layout.width + state_width, device=network.device)]
    at = network.layout.model(network.loaded().row.expand(clients, -1).clone())
    network.gradients(at, batch)
    torch.cuda.synchronize(network.device)
    chunk = torch.cuda.max_memory_reserved(network.device) - data
    del vectors
    name = torch.cuda.get_device_name(network.device)
    # the free memory was read after this process had taken its context and its data
    return Footprint(name, CONTEXT + data, chunk, free + data + CONTEXT, total)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _size(count: float) -> str:
    power = 0 if count < 1000 else min(3, int(math.log10(count) // 3))
    return f"{count / 1000**power:.3g} {('bytes', 'KB', 'MB', 'GB')[power]}"
