"""Shields fedray's computations from the torch settings of the caller.

A user may call fedray within ``torch.autocast``, ``torch.no_grad`` or ``torch.inference_mode``, or after
``torch.set_default_dtype(torch.float64)``. These settings do not reach Ray's processes, and a run must give the same
bits in the user's process and on Ray.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

ATTENTION = {"flash": True, "mem_efficient": False, "math": True, "cudnn": False}
"""The kernels that attention may use. CPUs have two of them: flash and math.

On a GPU, math is deterministic in every precision. Flash is for half precision;
:func:`fedray.engine.determinism.strictly` says where its backward pass is deterministic. The memory-efficient and cuDNN
kernels are not deterministic in the mode in which torch only warns of operations without a deterministic version.
"""

tf32 = False
"""Whether GPUs currently compute products in TF32 (:func:`fedray.engine.determinism.deterministic`)."""

_lock = threading.Lock()
_users = 0
_before: list[tuple[Callable[[Any], Any], Any]] = []


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """A context in which fedray computes the same numbers, whatever settings of torch the caller has. In it torch has
    the settings of a new process, except that attention uses only the kernels that :data:`ATTENTION` allows. For
    example, a surrounding ``torch.no_grad()`` or ``torch.set_default_dtype(torch.float64)`` has no effect.

    After the context the thread's settings are restored. Settings of the whole process are restored when no thread is
    in such a context any more. The function can also be used as a decorator.
    """
    import torch

    with contextlib.ExitStack() as stack:
        _enter()
        stack.callback(_leave)
        device = torch.empty(0).device
        if device.type != "cpu":
            # torch.set_default_device fails in a `with torch.device(...)` around which there is a default device
            if _device_contexts() == 1:
                torch.set_default_device(None)
            if torch.empty(0).device.type == "cpu":
                stack.callback(torch.set_default_device, device)
            else:
                # what `with torch.device(...)` says is only overridden by an inner context
                stack.enter_context(torch.device("cpu"))
        # inference mode first, because leaving or entering it also changes the gradient mode
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if _within_autocast():
            # torch keeps what it has cast until the outermost autocast ends, and fedray's weights change before that
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        yield


def _enter() -> None:
    """Sets torch's settings of this process to the values that :func:`_settings` lists, and notes the former values if
    this is the first thread to enter a neutral context."""
    global _users
    with _lock:
        for getter, setter, value in _settings():
            before = getter()
            if before != value:
                if not _users:
                    _before.append((setter, before))
                setter(value)
        _users += 1


def _leave() -> None:
    """Restores torch's former settings of this process if this was the last thread in a neutral context."""
    global _users
    with _lock:
        _users -= 1
        while not _users and _before:
            setter, value = _before.pop()
            setter(value)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Returns the settings of torch on which results depend, as a list of (getter, setter, value): functions that read
    and set the setting, and the value that it has in a neutral context."""
    import torch
    from torch.nn.utils import parametrize

    backends: Any = torch.backends
    settings: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        (_flushes_denormals, torch.set_flush_denormal, False),
        (lambda: backends.mkldnn.enabled, lambda on: backends.mkldnn.set_flags(on), True),
        (lambda: backends.nnpack.set_flags(True)[0], lambda on: backends.nnpack.set_flags(on), True),
        # in `with parametrize.cached()` a weight would stay that of the first model
        (partial(getattr, parametrize, "_cache_enabled"), partial(setattr, parametrize, "_cache_enabled"), 0),
        (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True),
    ]
    units = [backends, backends.mkldnn, *(getattr(backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn"))]
    # before torch 2.9 there is one setting for all of them
    newer = [unit for unit in units if hasattr(unit, "fp32_precision")]
    for unit in newer:
        settings.append((partial(getattr, unit, "fp32_precision"), partial(setattr, unit, "fp32_precision"), "none"))
    if not newer:
        general = "high" if tf32 else "highest"
        settings.append((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, general))
    for kind, allowed in ATTENTION.items():
        read, write = (getattr(backends.cuda, name, None) for name in (f"{kind}_sdp_enabled", f"enable_{kind}_sdp"))
        if read is not None and write is not None:
            settings.append((read, write, allowed))
    return settings


def _device_contexts() -> int:
    """Returns how many devices are set for new tensors: a default device, and each ``with torch.device(...)``."""
    from torch import overrides
    from torch.utils._device import DeviceContext

    modes: Any = overrides
    return sum(isinstance(mode, DeviceContext) for mode in modes._get_current_function_mode_stack())


def _within_autocast() -> bool:
    """Returns whether the caller is in a ``with torch.autocast(...)``, even one that is not enabled."""
    import torch

    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting > 1


def _flushes_denormals() -> bool:
    import torch

    return not bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul(1.0).item())
