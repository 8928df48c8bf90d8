"""UCI-HAR, in the publisher's text files: windows of 2.56 s of a phone's sensors, of 30 people.

D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz: A Public Domain Dataset for Human Activity Recognition Using
Smartphones. ESANN 2013.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedray.data.sources.find import PartlyThere, file_stamp, find_files
from fedray.data.sources.source import Source
from fedray.errors import UserError, first_sentence

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
FOLDERS = ("UCI HAR Dataset", "UCI_HAR_Dataset", "UCI_HAR", ".")
FEATURES, LENGTH = 561, 128


def har(root: str | None, variant: str) -> Source:
    """Loads the ``features`` [561] or the nine ``signals`` [9, 128] (``data.variant``), float32, in 6 classes.

    The division into training and test samples is the publisher's: they are of different people. The people of the
    training samples are clients 0, 1, ..., in the order of their numbers. Raises :class:`UserError` for files that are
    missing or damaged.
    """
    folder = find_files(
        "har",
        root,
        look=lambda place: _look(place, variant),
        download=None,
        wanted="the unpacked folder 'UCI HAR Dataset' of the publisher's archive "
        f"(data.variant={variant} needs {'X_train.txt' if variant == 'features' else 'Inertial Signals'})",
        address="https://archive.ics.uci.edu/dataset/240",
    )
    read, paths = {}, []
    for part in ("train", "test"):
        y, subject = (_table(folder, part, name, 1)[:, 0] for name in ("y", "subject"))
        if variant == "signals":
            names = [f"Inertial Signals/{name}" for name in SIGNALS]
            tables = {name: _table(folder, part, name, LENGTH) for name in names}
            for name, table in tables.items():
                if len(table) != len(y):
                    raise UserError(f"{folder / part}: {len(table)} windows in {name}_{part}.txt, {len(y)} activities")
            x = np.stack(list(tables.values()), axis=1)
        else:
            x, names = _table(folder, part, "X", FEATURES), ["X"]
        if not len(x) == len(y) == len(subject):
            raise UserError(f"{folder / part}: {len(x)} windows, {len(y)} activities and {len(subject)} subjects")
        if not np.isin(y, np.arange(1, 7)).all():
            row = int(np.argmax(~np.isin(y, np.arange(1, 7))))
            raise UserError(f"{folder / part}/y_{part}.txt has {y[row]:g} in row {row}; activities are 1 to 6")
        read[part] = x, y.astype(np.int64) - 1, subject.astype(np.int64)
        paths += [folder / part / f"{name}_{part}.txt" for name in (*names, "y", "subject")]
    (x, y, who), (x_test, y_test, _) = read["train"], read["test"]
    people, client = np.unique(who, return_inverse=True)
    return Source(
        "har", x, y, x_test, y_test, len(ACTIVITIES), client_train=client, class_names=ACTIVITIES,
        client_names=tuple(f"subject {number}" for number in people.tolist()), files=tuple(map(file_stamp, paths)),
    )  # fmt: skip


def _look(place: Path, variant: str) -> Path:
    for folder in FOLDERS:
        if (place / folder / "train" / "y_train.txt").is_file():
            wanted = "X_train.txt" if variant == "features" else f"Inertial Signals/{SIGNALS[0]}_train.txt"
            if not (place / folder / "train" / wanted).is_file():
                other = "signals" if variant == "features" else "features"
                raise PartlyThere(f"{place / folder} lacks train/{wanted}; data.variant={other} needs other files")
            return place / folder
    raise UserError(f"data.root={place} lacks train/y_train.txt (nor is it in 'UCI HAR Dataset')")


def _table(folder: Path, part: str, name: str, width: int) -> np.ndarray:
    """Returns the numbers in a text file as float32 ``[rows, width]``."""
    path = folder / part / f"{name}_{part}.txt"
    try:
        found = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32).to_numpy()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    except Exception as error:  # pandas raises many kinds for what is no table of numbers
        raise UserError(f"{path} is damaged ({first_sentence(error)}); get the file again") from None
    if found.shape[1] != width or not np.isfinite(found).all():
        raise UserError(f"{path} must have {width} numbers in each row; it has {found.shape[1]}, or some are missing")
    return found
