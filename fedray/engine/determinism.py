"""Makes torch choose deterministic kernels, and records the operations that have no deterministic version.

On a GPU the same operations can give different bits each time. To prevent this, cuBLAS needs a workspace of a fixed
size, cuDNN must not choose its kernels by measuring which is fastest, and TF32, which rounds the factors of a product
to 10 bits, must be set explicitly. On a CPU these settings change nothing. :mod:`fedray.core.torch_state` decides which
kernels attention may use.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from fedray.core import torch_state
from fedray.engine.environment import CUBLAS
from fedray.warning import FedrayWarning

FLASH = "Flash Attention defaults to a non-deterministic algorithm"
"""torch's warning about flash attention in the mode that only warns about operations without a deterministic version.
Flash attention has a deterministic version, but torch uses it only in the mode in which such operations raise."""

_met: set[str] = set()


@contextlib.contextmanager
def deterministic(tf32: bool = False) -> Iterator[None]:
    """A context in which this process computes deterministically as far as torch can. Afterwards torch's settings are
    restored. With ``tf32``, GPUs compute products and convolutions in TF32, otherwise in float32.

    Operations without a deterministic version still run, and :func:`nondeterministic_operations` returns their names.
    """
    import torch

    determinism: Any = torch.utils.deterministic
    environment = {name: os.environ.get(name) for name in CUBLAS}
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = determinism.fill_uninitialized_memory
    with _gpu_switches(tf32), warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            # fedray's own warnings, which may name an operation, are shown as usual
            operation = None if issubclass(category, FedrayWarning) else _operation(str(message))
            if operation is None:
                shown(message, category, *where, **more)
            else:
                _met.add(operation)

        warnings.filterwarnings("always", ".*deterministic")
        warnings.showwarning = show
        os.environ.update(CUBLAS)
        _met.clear()
        _set_mode(True, warn_only=True)
        # deterministic mode would fill every fresh tensor with NaN, which costs time and hides nothing here
        determinism.fill_uninitialized_memory = False
        try:
            yield
        finally:
            _set_mode(mode[0], warn_only=mode[1])
            determinism.fill_uninitialized_memory = fill
            for name, value in environment.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def unchanged_determinism() -> Iterator[None]:
    """A context for the user's code within :func:`deterministic`. Afterwards the settings of :func:`deterministic` are
    restored, even if the user's code has changed them."""
    with _gpu_switches(torch_state.tf32):
        try:
            yield
        finally:
            _set_mode(True, warn_only=True)


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """A context within :func:`deterministic` in which operations without a deterministic version raise RuntimeError
    instead of being recorded. In this mode torch uses its deterministic flash attention."""
    _set_mode(True, warn_only=False)
    try:
        yield
    finally:
        _set_mode(True, warn_only=True)


def note(operation: str) -> None:
    """Records that this process has run ``operation`` (its name), which is not deterministic.
    :func:`nondeterministic_operations` then returns it."""
    _met.add(operation)


def is_refused(error: BaseException) -> bool:
    """Returns whether ``error`` is torch's refusal to run an operation because it has no deterministic version. Within
    :func:`strictly` torch refuses all such operations."""
    return isinstance(error, RuntimeError) and "use_deterministic_algorithms" in str(error)


def nondeterministic_operations() -> tuple[str, ...]:
    """Returns the names of the operations without a deterministic version that this process has run since the last
    call, within :func:`deterministic`."""
    found = tuple(sorted(_met))
    _met.difference_update(found)
    return found


def _operation(warning: str) -> str | None:
    """Returns the name of the operation that a warning of torch's calls not deterministic, or None for any
    other warning."""
    if "deterministic" not in warning.lower():
        return None
    if "CuBLAS" in warning:
        return "cuBLAS was used before fedray could set CUBLAS_WORKSPACE_CONFIG=:4096:8"
    return warning.splitlines()[0].split(", but ")[0].split(". ")[0]


@contextlib.contextmanager
def _gpu_switches(tf32: bool) -> Iterator[None]:
    """A context in which GPUs compute products in float32 or in TF32, and in which cuDNN uses only kernels that always
    add in the same order."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches: list[tuple[Any, str, Any]] = [
        (torch_state, "tf32", tf32),
        (matmul, "allow_tf32", tf32),
        (cudnn, "allow_tf32", tf32),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
    ]
    # torch 2.9 has these beside allow_tf32, which can't be read if a user has set them
    newer = [(each, "fp32_precision") for each in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))]
    before: list[tuple[Any, str, Any]] = []
    general = _matmul_precision()
    for where, name in [*((where, name) for where, name, _ in switches), *newer]:
        with contextlib.suppress(AttributeError, RuntimeError):
            before.append((where, name, getattr(where, name)))
    for where, name, value in switches:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        if general is not None and _matmul_precision() != general:
            torch.set_float32_matmul_precision(general)


def _matmul_precision() -> str | None:
    """Returns torch's setting for the precision of float32 products, or None if it is not the same for CPUs
    and GPUs."""
    import torch

    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _set_mode(mode: bool, warn_only: bool) -> None:
    """Turns torch's deterministic mode on or off, as torch.use_deterministic_algorithms does, but without importing
    torch's compiler, which takes a second and is not needed here."""
    import torch

    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
