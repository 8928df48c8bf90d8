"""Opens the storage of studies: a journal in the sweep's folder, or any storage of Optuna's by its URL."""

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
    """Returns the name of a sweep's study in its storage.

    In a storage that the user names it is the sweep's name, because that storage may hold other studies. In the sweep's
    own journal it is always ``sweep``, because the folder may be renamed.
    """
    return spec.name if spec.tune.storage else "sweep"


def storage_of(spec: SweepSpec) -> BaseStorage:
    """Returns the storage of a sweep's study, opened for writing."""
    return open_storage(spec.tune.storage) if spec.tune.storage else open_journal(spec.folder / JOURNAL)


def study_of(spec: SweepSpec) -> optuna.Study:
    """Returns the study of a sweep, which must only be read: another process may be writing it.

    Raises :class:`UserError` if there is none, or if it can't be read.
    """
    if spec.tune.storage:
        return load_study(open_storage(spec.tune.storage), study_name(spec), spec.tune.storage)
    return read_study(spec.folder / JOURNAL, study_name(spec))


@contextlib.contextmanager
def hold_study(folder: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """A context in which other processes are kept out of a sweep's folder (:func:`fedray.tracking.lock.folder_lock`).

    Raises :class:`UserError` if another process has the folder for longer than ``patience`` seconds, or if it can't be
    written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder, "is a sweep that another process runs", say, patience))
        except OSError as error:
            raise UserError(f"can't write to {folder.parent}: {error.strerror}") from None
        yield


def open_journal(path: Path) -> BaseStorage:
    """Returns the storage in a journal file, opened for writing; it is created if it is missing.

    Only the process that holds the folder (:func:`hold_study`) may call this, because it repairs what a process that
    was killed has left: the journal's lock, and a last line that was not written to its end. Raises :class:`UserError`
    if the file can't be read.
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
    """Removes a last line that has no end, because the next record would be appended to it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
        os.fsync(file.fileno())


def open_storage(url: str) -> BaseStorage:
    """Returns the storage at an Optuna URL. Raises :class:`UserError` if it can't be read."""
    with _explain_errors(f"tune.storage={url}"):
        storage = get_storage(url)
        optuna.get_all_study_names(storage)
    return storage


def read_study(path: Path, name: str) -> optuna.Study:
    """Returns the study ``name`` in a journal file, which must only be read: another process may be writing it.

    Raises :class:`UserError` if there is none, or if it can't be read.
    """
    if not path.exists():
        raise UserError(f"there is no study {path}")
    return load_study(_load_journal(path), name, path)


def load_study(storage: BaseStorage, name: str, where: object) -> optuna.Study:
    """Returns the study ``name`` of a storage.

    Raises :class:`UserError` if there is no such study; the error names the storage as ``where``.
    """
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        raise UserError(f"there is no study {name!r} in {where}") from None


def has_study(storage: BaseStorage, name: str) -> bool:
    """Returns whether a storage has a study of that name."""
    return name in optuna.get_all_study_names(storage)


@contextlib.contextmanager
def _explain_errors(where: object) -> Iterator[None]:
    """A context in which any error becomes a :class:`UserError` about ``where``.

    Optuna raises errors of all types for a storage that it can't read, and the reason is always a damaged file or a
    wrong URL.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{where} can't be read as a study: {type(error).__name__}: {first_line(error)}") from None
