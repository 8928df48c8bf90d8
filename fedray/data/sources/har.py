"""UCI-HAR in the publisher's text files: windows of 2.56 s from the sensors of a phone, carried by 30 people.

D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz: A Public Domain Dataset for Human Activity Recognition Using
Smartphones. ESANN 2013.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedray.data.sources.find import Layout, find_files, reading
from fedray.data.sources.source import Source
from fedray.errors import UserError

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
FOLDERS = ("UCI HAR Dataset", "UCI_HAR_Dataset", "UCI_HAR", ".")
FEATURES, LENGTH = 561, 128
PARTS = ("train", "test")


def har(root: str | None, variant: str) -> Source:
    """Loads UCI-HAR: recordings of a phone's sensors, cut into windows of 2.56 s, with 6 activities as classes.

    The training and test sets are the publisher's, and no person is in both. The people of the training set are the
    clients 0, 1, ..., in the order of their numbers. Raises :class:`UserError` for files that are missing or damaged.

    Args:
        root: the folder with the files. If it is None, they are looked for on this machine.
        variant: which inputs to load, as float32 (``data.variant``): the publisher's ``features`` [561], or the nine
            recorded ``signals`` [9, 128].
    """
    wanted = {"X": FEATURES} if variant == "features" else {f"Inertial Signals/{name}": LENGTH for name in SIGNALS}
    names = {**wanted, "y": 1, "subject": 1}
    other = "signals" if variant == "features" else "features"
    found = find_files(
        "har", root, [Layout(FOLDERS, tuple(f"{part}/{name}_{part}.txt" for part in PARTS for name in names))],
        f"the unpacked folder 'UCI HAR Dataset' of the publisher's archive (data.variant={variant} needs "
        f"{next(iter(wanted))}_train.txt)", "https://archive.ics.uci.edu/dataset/240",
        hint=f"; data.variant={other} needs other files",
    )  # fmt: skip
    read = []
    for part in PARTS:
        tables = [_table(found.folder / part / f"{name}_{part}.txt", width) for name, width in names.items()]
        *inputs, y, subject = tables
        for name, table in zip(names, tables, strict=True):
            if len(table) != len(y):
                raise UserError(f"{found.folder / part}: {len(table)} rows in {name}_{part}.txt, {len(y)} activities")
        wrong = ~np.isin(y[:, 0], np.arange(1, 7))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UserError(f"{found.folder / part}/y_{part}.txt has {y[row, 0]:g} in row {row}; activities are 1 to 6")
        x = np.stack(inputs, axis=1) if variant == "signals" else inputs[0]
        read.append((x, y[:, 0].astype(np.int64) - 1, subject[:, 0].astype(np.int64)))
    (x, y, who), (x_test, y_test, _) = read
    people, client = np.unique(who, return_inverse=True)
    return Source(
        "har", x, y, x_test, y_test, len(ACTIVITIES), client_train=client, class_names=ACTIVITIES,
        client_names=tuple(f"subject {number}" for number in people.tolist()), files=found.stamps,
    )  # fmt: skip


def _table(path: Path, width: int) -> np.ndarray:
    """Returns the numbers in a text file as float32 ``[rows, width]``."""
    with reading(path, "table of numbers", Exception):  # pandas raises errors of many types
        found = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32).to_numpy()
    if found.shape[1] != width or not np.isfinite(found).all():
        raise UserError(f"{path} must have {width} numbers in each row; it has {found.shape[1]}, or some are missing")
    return found
