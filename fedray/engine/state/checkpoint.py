"""Writes and reads checkpoints, from which an interrupted run continues.

A checkpoint is never incomplete: its files are written to a temporary folder, flushed to disk, and then renamed. Every
file has a checksum, and nothing is pickled. ``round-N/`` has the data that change in every round. Files that many
rounds share (a client's state, a model of an earlier round) are in ``shared/``. Each is written once, and kept as long
as a checkpoint refers to it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedray.engine.state.packing import Packed, on_host
from fedray.errors import UserError
from fedray.util.files import move_whole, sha256_of_file

FORMAT = 3
"""The version of a checkpoint's files. A run can't continue from a checkpoint of another version."""

PIN = "pinned"
"""An empty file in a checkpoint that is not removed when further ones are written."""

THREADS = 4
"""The number of a checkpoint's files that are linked or checked at the same time. Threads help, because most of the
time goes to the disk or to checksums, neither of which holds Python's global lock."""


@dataclass
class Checkpoint:
    """Everything that a run needs to continue after round ``round``.

    ``vectors`` are the server's models and tensors, packed into plain arrays. ``states`` maps each client's number to
    the file with its state. ``past`` maps numbers of earlier rounds to the files with the models with which these
    rounds began; it has only models that clients or the server still need. ``record`` has the values that are stored as
    JSON, such as the server's numbers for each client and the costs so far.
    """

    round: int
    vectors: Packed
    states: Mapping[int, Path] = field(default_factory=dict)
    past: Mapping[int, Path] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path,
    round: int,
    vectors: Packed,
    record: Mapping[str, Any],
    states: Mapping[int, str],
    past: Mapping[int, str],
    store: Callable[[str, Path], None],
    keep: int,
) -> Path:
    """Writes a checkpoint, from which an interrupted run can continue, and removes older ones. Returns the path of the
    new one.

    Args:
        folder: The folder for all checkpoints of the run.
        round: The round after which the run can continue.
        vectors: The server's models and tensors.
        record: Further values, which JSON can store.
        states: Maps each client's number to the name of the file with its state.
        past: Maps the numbers of earlier rounds to the names of the files with the models of these rounds.
        store: ``store(name, path)`` must write the file ``name`` (one of those in ``states`` or ``past``) to ``path``,
            which is in the subfolder ``shared``. It is called only for files that no earlier checkpoint has.
        keep: How many checkpoints to keep, including the new one, besides those that are pinned (:func:`pin`).
    """
    shared = folder / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    target = folder / f"round-{round:08d}"
    staging = folder / f".{target.name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    known = {name: checksum for old in _rounds(folder) for name, checksum in _checksums(old).items()}

    def place(name: str) -> tuple[str, str]:
        path = shared / name
        if f"shared/{name}" in known and path.exists():
            return f"shared/{name}", known[f"shared/{name}"]
        fresh = shared / f".{name}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        store(name, fresh)
        checksum = sha256_of_file(fresh)
        fresh.rename(path)
        return f"shared/{name}", checksum

    save_file(
        {name: on_host(tensor).contiguous() for name, tensor in vectors.arrays.items()}, staging / "server.safetensors"
    )
    whole = {"format": FORMAT, "round": round, "widths": vectors.widths, "states": states, "past": past, **record}
    (staging / "record.json").write_text(json.dumps(whole))
    sums = {path.name: sha256_of_file(path) for path in staging.iterdir()}
    with ThreadPoolExecutor(THREADS) as pool:
        sums |= dict(pool.map(place, [*states.values(), *past.values()]))
    (staging / "checksums.json").write_text(json.dumps(sums))
    _flush(folder)
    if target.exists():
        shutil.rmtree(target)
    move_whole(staging, target)
    for old in [path for path in _rounds(folder) if not (path / PIN).exists()][:-keep]:
        shutil.rmtree(old)
    _sweep(folder)
    return target


def pin(folder: Path, round: int) -> None:
    """Marks the checkpoint of ``round`` as one that stays when further ones are written."""
    (folder / f"round-{round:08d}" / PIN).touch()


def load_last(folder: Path, warn: Any) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint in ``folder``, or None if there is none. ``warn(line)`` is called for
    each damaged one. Raises :class:`UserError` if the checkpoint was written by another version of fedray."""
    for path in reversed(_rounds(folder)):
        try:
            return _load(path)
        except UserError:
            raise
        except Exception as error:  # a damaged file can make a reader raise anything
            warn(f"warning: checkpoint {path} is damaged ({error}); trying the one before it")
    return None


def require_whole(folder: Path, round: int) -> None:
    """Raises :class:`UserError` if the checkpoint of ``round`` in ``folder`` is damaged, or of another version."""
    path = folder / f"round-{round:08d}"
    try:
        _load(path)
    except UserError:
        raise
    except Exception as error:  # a damaged file can make a reader raise anything
        raise UserError(f"checkpoint {path} is damaged ({error}); the run stays where it is") from None


def discard(folder: Path, after: int) -> None:
    """Removes from ``folder`` all checkpoints after round ``after``, and the unfinished files of interrupted writers.

    It is called when a run continues after that round because later checkpoints were damaged. The run repeats their
    rounds and writes files with the same names, so all of the old files must be removed.
    """
    damaged = [path for path in _rounds(folder) if int(path.name.removeprefix("round-")) > after]
    for path in [*folder.glob(".round-*"), *damaged]:
        shutil.rmtree(path, ignore_errors=True)
    if folder.exists():
        _sweep(folder)


def _flush(folder: Path) -> None:
    """Flushes everything that was written to the disk of ``folder`` in one call, because an fsync for each of many
    small files takes far longer."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f"can't flush {folder} to disk")
    finally:
        os.close(descriptor)


def _rounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("round-" + "[0-9]" * 8) if path.is_dir())


def _sweep(folder: Path) -> None:
    """Removes the files in ``folder``'s subfolder ``shared`` that no checkpoint refers to any more."""
    named = {name for path in _rounds(folder) for name in _checksums(path)}
    for path in (folder / "shared").glob("*"):
        if f"shared/{path.name}" not in named:
            path.unlink()


def _checksums(path: Path) -> dict[str, str]:
    """Returns the sha256 of each file of the checkpoint in ``path``, by the file's name. The dict is empty if the sums
    can't be read."""
    try:
        sums = json.loads((path / "checksums.json").read_text())
    except (OSError, ValueError):
        return {}
    return sums if isinstance(sums, dict) else {}


def _load(path: Path) -> Checkpoint:
    sums = json.loads((path / "checksums.json").read_text())

    def check(name: str) -> None:
        if sha256_of_file(_place(path, name)) != sums[name]:
            raise ValueError(f"{name} does not match its checksum")

    _each(check, ["server.safetensors", "record.json", *sums])
    record = json.loads((path / "record.json").read_text())
    if record.pop("format", 1) != FORMAT:
        raise UserError(
            f"checkpoint {path} was written by another version of fedray: go on with that version, or use "
            "run.resume=false to start over"
        )
    states, past = (
        {int(key): _place(path, f"shared/{name}") for key, name in record.pop(part).items()}
        for part in ("states", "past")
    )
    vectors = Packed(load_file(path / "server.safetensors"), record.pop("widths"))
    return Checkpoint(record.pop("round"), vectors, states, past, record)


def _place(path: Path, name: str) -> Path:
    return path.parent / name if name.startswith("shared/") else path / name


def _each(do: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(do, names):
            pass


def flat_sha256(named: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of a model as hexadecimal digits, which is ``model_sha256`` in summary.json. ``named`` has the
    model's tensors by name; the digest is computed from their bytes, as float32, one tensor after another.

    In ``named`` the trainable parameters come first, in the module's order. The buffers (such as running statistics)
    follow, also in the module's order; whole-number buffers are converted to float32 too.
    """
    digest = hashlib.sha256()
    for tensor in named.values():
        digest.update(tensor.detach().cpu().to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
