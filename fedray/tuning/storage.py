"""Opens the storage in which Optuna records the trials of a sweep: a file in its folder, or any Optuna storage by
URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from fedray.errors import UserError, first_line
from fedray.tracking.lock import PATIENCE, folder_lock
from fedray.tuning.spec import SweepSpec
from fedray.util.files import room_for

JOURNAL = "study.journal"
"""The default file of a study, in its sweep's folder. ``tune.storage`` can name another place."""


def study_name(spec: SweepSpec) -> str:
    """Returns the name under which Optuna keeps the record of a sweep in a storage. Optuna calls such a record a
    "study".

    In a storage that the user names (``tune.storage``), the study has the sweep's name, because other studies may be
    there too. In the default storage, a file in the sweep's folder, the study is always called ``sweep``, because the
    folder may be renamed.
    """
    return spec.name if spec.tune.storage else "sweep"


@contextlib.contextmanager
def hold_study(folder: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """A context in which the folder of a sweep is locked, so that no other process runs or changes the same sweep.

    ``say`` shows a line to the user while this process waits for the lock. Raises :class:`UserError` if another process
    holds the lock for longer than ``patience`` seconds, or if the folder can't be written to.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder, "is a sweep that another process runs", say, patience))
        except OSError as error:
            raise UserError(f"can't write to {folder.parent}: {error.strerror}") from None
        yield


def storage_of(spec: SweepSpec) -> BaseStorage:
    """Returns the Optuna storage in which the trials of a sweep are recorded, opened for writing: the one that
    ``tune.storage`` names, or else a file in the sweep's folder (:func:`open_journal`)."""
    return open_storage(spec.tune.storage) if spec.tune.storage else open_journal(spec.folder / JOURNAL)


def open_storage(url: str) -> BaseStorage:
    """Opens the Optuna storage at ``url``, such as ``sqlite:///studies.db``, and returns it. Raises :class:`UserError`
    if it can't be read."""
    return _checked(lambda: get_storage(url), f"tune.storage={url}")


def open_journal(path: Path) -> BaseStorage:
    """Opens the journal, the file ``path`` in which Optuna records the trials of a sweep, for writing, and returns it
    as a storage. The file is created if it is missing.

    Only the process that holds the lock of the sweep's folder (:func:`hold_study`) may call this, because it repairs
    what a killed process left behind: the journal's lock, and an incomplete last line. Raises :class:`UserError` if the
    file can't be read.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists():
        with open(path, "r+b") as file:
            # otherwise the next record would be appended to an incomplete line
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())
    return _journal(path)


class _Journal(JournalFileBackend):
    """A journal that says in one line that its disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with room_for(self.path):
            super().append_logs(logs)


def _journal(path: Path) -> BaseStorage:
    return _checked(lambda: JournalStorage(_Journal(path)), path)


def _checked(opened: Callable[[], BaseStorage], where: object) -> BaseStorage:
    """Calls ``opened`` and returns the storage that it opens. Raises :class:`UserError`, with a message that begins
    with ``where``, if the storage can't be opened and read."""
    try:
        storage = opened()
        optuna.get_all_study_names(storage)
    except Exception as error:
        # Optuna raises errors of all types, and the reason is always a damaged file or a wrong URL
        raise UserError(f"{where} can't be read as a study: {type(error).__name__}: {first_line(error)}") from None
    return storage


def has_study(storage: BaseStorage, name: str) -> bool:
    """Returns whether an Optuna ``storage`` already contains a study (the record of a hyper-parameter search) with this
    ``name``."""
    return name in optuna.get_all_study_names(storage)


def rename_study(url: str, old: str, new: str) -> None:
    """Gives the study ``old`` in the storage at ``url`` the name ``new``, with all of its trials."""
    optuna.copy_study(from_study_name=old, from_storage=url, to_storage=url, to_study_name=new)
    optuna.delete_study(study_name=old, storage=url)


def study_of(spec: SweepSpec) -> optuna.Study:
    """Returns Optuna's record of a sweep, its "study", which has all trials. Use it for reading only, because another
    process may be writing the record at the same time.

    Raises :class:`UserError` if there is no study, or if it can't be read.
    """
    where = spec.tune.storage or spec.folder / JOURNAL
    if isinstance(where, Path) and not where.exists():
        raise UserError(f"there is no study {where}")
    storage = _journal(where) if isinstance(where, Path) else open_storage(where)
    try:
        return optuna.load_study(study_name=study_name(spec), storage=storage)
    except KeyError:
        raise UserError(f"there is no study {study_name(spec)!r} in {where}") from None
