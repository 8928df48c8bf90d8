"""Keeps the state of the caller's torch away from what fedray computes.

A user may call fedray within ``torch.autocast``, ``torch.no_grad`` or ``torch.inference_mode``, or after
``torch.set_default_dtype(torch.float64)``. Ray's processes know nothing of that, and a run must give the same bits in
this process as in those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """A context in which torch is as in a new process. Afterwards it is as before. It can be a decorator, too."""
    import torch

    with contextlib.ExitStack() as stack:
        for getter, setter, value in _settings():
            before = getter()
            if before != value:
                stack.callback(setter, before)
                setter(value)
        _reset_default_device(stack)
        # inference mode first, as it brings a mode of gradients with it
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        yield


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Returns the settings on which results depend: how each is read and set, and its value in a new process."""
    import torch

    backends: Any = torch.backends
    settings: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        (_flushes_denormals, torch.set_flush_denormal, False),
        (lambda: backends.mkldnn.enabled, lambda on: backends.mkldnn.set_flags(on), True),
        (lambda: backends.nnpack.set_flags(True)[0], lambda on: backends.nnpack.set_flags(on), True),
    ]
    units = [backends, backends.mkldnn, *(getattr(backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn"))]
    # before torch 2.9 there is one setting for all of them
    newer = [unit for unit in units if hasattr(unit, "fp32_precision")]
    for unit in newer:
        settings.append((partial(getattr, unit, "fp32_precision"), partial(setattr, unit, "fp32_precision"), "none"))
    if not newer:
        settings.append((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"))
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        # the kernels of attention; those of CPUs follow these settings too
        read, write = (getattr(backends.cuda, name, None) for name in (f"{kind}_sdp_enabled", f"enable_{kind}_sdp"))
        if read is not None and write is not None:
            settings.append((read, write, True))
    return settings


def _flushes_denormals() -> bool:
    import torch

    return not bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul(1.0).item())


def _reset_default_device(stack: contextlib.ExitStack) -> None:
    """Has new tensors made on the CPU in the contexts of ``stack``."""
    import torch

    if torch.get_default_device().type == "cpu":
        return
    before = torch.get_default_device()
    torch.set_default_device(None)
    if torch.get_default_device().type == "cpu":
        stack.callback(torch.set_default_device, before)
    else:
        # that of `with torch.device(...)`, in which an inner one counts
        stack.enter_context(torch.device("cpu"))
