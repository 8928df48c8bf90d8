"""Decides on which device clients are trained, and whether client actors share GPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fedray.config import EngineConfig
from fedray.errors import UserError

Device = Literal["cpu", "cuda"]

AutoDevice = Callable[[Path], Device]
"""A function that returns the device that ``engine.device: auto`` stands for, for a run in a folder."""


def device_here(folder: Path) -> Device:
    """Returns the device that ``engine.device: auto`` stands for on one machine: its GPU, if torch can use it.

    ``folder``, the run's folder, is not used; it is there because this function is an :data:`AutoDevice`.
    """
    return "cuda" if torch.cuda.is_available() else "cpu"


def missing_compiler(device: Device = "cpu") -> str | None:
    """Returns what this machine lacks to compile gradients for ``device``, such as ``no C++ compiler (g++)``, or None
    if nothing is missing."""
    if device == "cuda":
        # Triton calls a C compiler, for the code that starts its kernels
        if importlib.util.find_spec("triton") is None:
            return "no Triton (pip install triton)"
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
        if not any(map(shutil.which, names)):
            return f"no C compiler ({' or '.join(names)})"
    else:
        name = os.environ.get("CXX") or "g++"
        if shutil.which(name) is None:
            return f"no C++ compiler ({name})"
    headers = sysconfig.get_paths()["include"]
    if not (Path(headers) / "Python.h").is_file():
        return f"no Python.h in {headers} (Debian's package is python3-dev)"
    return None


@dataclass(frozen=True)
class Surroundings:
    """Answers questions about the machines of a run and about the run's folder. Settings in ``engine`` whose value is
    ``auto`` depend on the answers.

    ``device(folder)`` returns the device that ``engine.device: auto`` stands for. ``begun(folder)`` returns the values
    of ``engine.compile`` and ``engine.channels_last`` with which the run in this folder began, and an empty mapping for
    a new run. ``missing_compiler(folder, device)`` returns a text that says what one of the machines lacks to compile
    gradients for the device. It returns None if nothing is missing, or if the run in the folder is finished.
    """

    device: AutoDevice = device_here
    begun: Callable[[Path], Mapping[str, bool]] = lambda folder: {}
    missing_compiler: Callable[[Path, Device], str | None] = lambda folder, device: missing_compiler(device)


def device_of_cluster(gpus: float, is_this_machine: bool) -> Device:
    """Returns the device that ``engine.device: auto`` stands for on a Ray cluster with ``gpus`` GPUs.

    ``is_this_machine`` says whether the cluster is only this machine; torch must then be able to use its GPUs. For
    other machines this is assumed, because only a process there could check it; a client actor that finds no usable GPU
    ends the run with an error.
    """
    return "cuda" if gpus and (torch.cuda.is_available() or not is_this_machine) else "cpu"


def place(engine: EngineConfig, folder: Path, auto: AutoDevice) -> tuple[Device, dict[str, Any], tuple[str, ...]]:
    """Decides on which device clients are trained, and whether several client actors (Ray processes that train clients)
    share a GPU.

    Returns the device; the values of ``engine`` keys that follow from it, by name; and lines for the user. ``folder``
    is the run's folder, and ``auto(folder)`` returns the device that ``engine.device: auto`` stands for. On a Ray
    cluster with GPUs, as many client actors share each GPU as fit, unless the user sets their number. Raises
    :class:`UserError` if clients should be trained on a GPU without Ray and this machine has none.
    """
    on_ray, device = engine.kind == "ray", engine.device
    has_share = on_ray and bool(engine.gpus_per_actor or engine.actors_per_gpu)
    notes: tuple[str, ...] = ()
    if device == "auto":
        device = "cuda" if has_share else auto(folder)
        if device == "cuda" and not has_share:
            how = "client actors share the GPUs of the cluster" if on_ray else "clients are trained on the GPU"
            notes = (f"engine.device=auto: {how}; engine.device=cpu trains on CPUs",)
    if device == "cuda" and not on_ray and not torch.cuda.is_available():
        raise UserError("engine.device=cuda: there is no usable GPU here; use cpu")
    share = {"actors_per_gpu": "auto"} if device == "cuda" and on_ray and not has_share else {}
    return device, {"device": device, **share}, notes
