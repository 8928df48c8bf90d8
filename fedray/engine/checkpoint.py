"""Checkpoints that are whole or not there: written beside, fsynced, renamed; checksummed; never pickled."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, NDArray[np.float32]]

FILES = ("server.safetensors", "clients.safetensors", "past.safetensors", "record.json")


@dataclass
class Checkpoint:
    """Everything that a run continues from after round ``round``.

    ``vectors``: the server's tensors; ``states``: the clients' own, by client and name; ``past``: models of earlier
    rounds that clients still refer to; ``record``: JSON (the server's
    table, cumulative costs, fingerprints).
    """

    round: int
    vectors: Mapping[str, Tensor]
    states: Mapping[int, State] = field(default_factory=dict)
    past: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint below ``folder`` and remove all but the last ``keep``; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"round-{checkpoint.round:08d}"
    staging = folder / f".{target.name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in checkpoint.vectors.items()}, staging / "server.safetensors"
    )
    flat = {
        f"{client}/{name}": np.ascontiguousarray(value)
        for client, state in checkpoint.states.items()
        for name, value in state.items()
    }
    save_arrays(flat, staging / "clients.safetensors")
    save_arrays(
        {str(seen): np.ascontiguousarray(x) for seen, x in checkpoint.past.items()}, staging / "past.safetensors"
    )
    (staging / "record.json").write_text(json.dumps({"round": checkpoint.round, **checkpoint.record}))
    sums = {name: _checksum(staging / name) for name in FILES}
    (staging / "checksums.json").write_text(json.dumps(sums))
    for path in staging.iterdir():
        sync(path)
    sync(staging)
    if target.exists():
        shutil.rmtree(target)
    staging.rename(target)
    sync(folder)
    for old in _rounds(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_last(folder: Path, warn: Any) -> Checkpoint | None:
    """The newest checkpoint that is whole; ``warn(line)`` is told of each that is damaged. None if there is none."""
    for path in reversed(_rounds(folder)):
        try:
            return _load(path)
        except Exception as error:  # a damaged file can make a reader raise anything
            warn(f"checkpoint {path} is damaged ({error}); trying the one before it")
    return None


def discard(folder: Path) -> None:
    """Remove what interrupted writers left behind."""
    for path in folder.glob(".round-*"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("round-" + "[0-9]" * 8) if path.is_dir())


def _load(path: Path) -> Checkpoint:
    sums = json.loads((path / "checksums.json").read_text())
    for name in FILES:
        if _checksum(path / name) != sums[name]:
            raise ValueError(f"{name} does not match its checksum")
    record = json.loads((path / "record.json").read_text())
    states: dict[int, State] = {}
    for key, value in load_arrays(path / "clients.safetensors").items():
        client, _, name = key.partition("/")
        states.setdefault(int(client), {})[name] = value
    vectors = {name: tensor.clone() for name, tensor in load_file(path / "server.safetensors").items()}
    past = {int(seen): x for seen, x in load_arrays(path / "past.safetensors").items()}
    return Checkpoint(record.pop("round"), vectors, states, past, record)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flat_sha256(named: Mapping[str, Tensor]) -> str:
    """sha256 of the float32 bytes of a model's trainable parameters, one after another in the module's order."""
    digest = hashlib.sha256()
    for tensor in named.values():
        digest.update(tensor.detach().cpu().to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
