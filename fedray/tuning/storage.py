"""Where studies are kept: a journal in the sweep's folder, or any storage of Optuna's by its URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from fedray.errors import UserError, first_line
from fedray.tracking.lock import PATIENCE, folder_lock
from fedray.tuning.spec import SweepSpec

JOURNAL = "study.journal"
"""The file of a study in its sweep's folder, unless ``tune.storage`` names another place."""


def study_name(spec: SweepSpec) -> str:
    """The name of a sweep's study in its storage.

    A storage of the user's may hold other studies, so that there it is the sweep's name. In a journal of its own it is
    always ``sweep``, because the folder may be renamed.
    """
    return spec.name if spec.tune.storage else "sweep"


def storage_of(spec: SweepSpec) -> BaseStorage:
    """The storage of a sweep's study, opened for writing."""
    return open_storage(spec.tune.storage) if spec.tune.storage else open_journal(spec.folder / JOURNAL)


def study_of(spec: SweepSpec) -> optuna.Study:
    """The study of a sweep, to be read only: another process may be writing it.

    Raises :class:`UserError` if there is none, or if it can't be read.
    """
    if spec.tune.storage:
        return load_study(open_storage(spec.tune.storage), study_name(spec), spec.tune.storage)
    return read_study(spec.folder / JOURNAL, study_name(spec))


@contextlib.contextmanager
def hold_study(folder: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """Keep other processes out of a sweep's folder, as :func:`fedray.tracking.lock.folder_lock` does.

    Raises :class:`UserError` if another process has the folder, or if it can't be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder, "is a sweep that another process runs", say, patience))
        except OSError as error:
            raise UserError(f"can't write to {folder.parent}: {error.strerror}") from None
        yield


def open_journal(path: Path) -> BaseStorage:
    """The storage in a journal file, opened for writing; it is created if it is missing.

    Only the process that holds the folder (:func:`hold_study`) may call this, because it repairs what a process that
    was killed has left: the journal's lock, and a last line that was not written to its end.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    with _explain_errors(path):
        _cut_torn_line(path)
    return _load_journal(path)


def _load_journal(path: Path) -> BaseStorage:
    with _explain_errors(path):
        storage = JournalStorage(JournalFileBackend(str(path)))
        optuna.get_all_study_names(storage)
    return storage


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that has no end: the next record would be appended to it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
        os.fsync(file.fileno())


def open_storage(url: str) -> BaseStorage:
    """The storage at an Optuna URL. Raises :class:`UserError` if it can't be read."""
    with _explain_errors(f"tune.storage={url}"):
        storage = get_storage(url)
        optuna.get_all_study_names(storage)
    return storage


def read_study(path: Path, name: str) -> optuna.Study:
    """The study ``name`` in a journal file, to be read only: another process may be writing it."""
    if not path.exists():
        raise UserError(f"there is no study {path}")
    return load_study(_load_journal(path), name, path)


def load_study(storage: BaseStorage, name: str, where: object) -> optuna.Study:
    """The study ``name`` of a storage; ``where`` names the storage in the error if there is no such study."""
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        raise UserError(f"there is no study {name!r} in {where}") from None


def has_study(storage: BaseStorage, name: str) -> bool:
    """Whether a storage has a study of that name."""
    return name in optuna.get_all_study_names(storage)


@contextlib.contextmanager
def _explain_errors(where: object) -> Iterator[None]:
    """Turn any error into a :class:`UserError`. Optuna raises errors of all types for a storage that it can't read,
    and the reason is always a damaged file or a wrong URL."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{where} can't be read as a study: {type(error).__name__}: {first_line(error)}") from None
