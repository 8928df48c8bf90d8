"""The source ``csv``: the user's tables in csv files, with a column of targets and perhaps one of clients."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedray.config import IGNORE_INDEX
from fedray.data.sources.columns import Columns, divide
from fedray.data.sources.source import Source, from_fields
from fedray.data.sources.tables import read_frame, with_columns_of
from fedray.data.sources.targets import AUTO
from fedray.errors import UserError, first_sentence
from fedray.util.files import in_home

WHOLE = r"-?(?:0|[1-9]\d{0,17})"
"""A text that is a whole number in its only usual form. Other texts, such as 007, are names."""

WHOLE_CLIENT, WHOLE_FLOAT = r"0|[1-9]\d{0,17}", r"(?:0|[1-9]\d{0,14})\.0*"
"""The number of a client, and the form that pandas gives it when it writes a column that once had gaps: 7.0."""

PANDAS = tuple(map(int, pd.__version__.split(".")[:2]))

EXACT: dict[str, Any] = {} if PANDAS > (3, 0) else {"float_precision": "round_trip"}
"""Makes pandas read a number exactly as Python does. Later versions of pandas do so by themselves."""


def csv(root: str | None, columns: Columns, kind: str = AUTO, ignored: int = IGNORE_INDEX) -> Source:
    """Loads the user's tables from csv files. In a table each row is a sample.

    Raises :class:`UserError` if a file or a column is missing, or holds something that can't be used. The message names
    the file and, where possible, the column and the row.

    Args:
        root: a folder with ``train.csv`` and ``test.csv``, or a single csv file. In a single file every fifth row is a
            test row; if there are clients, every fifth row of each client.
        columns: the columns that hold the targets, the clients and the inputs. Inputs must be numeric, and become
            float32.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target of tokens that do not count (``task.ignore_index``).
    """
    if root is None:
        raise UserError("data.source=csv needs data.root: the folder with train.csv and test.csv, or one csv file")
    place = in_home(root)
    notes: tuple[str, ...] = ()
    names = None
    if place.is_dir():
        paths = (place / "train.csv", place / "test.csv")
        train, test = (_read(path, columns, has_clients=path == paths[0]) for path in paths)
        if columns.inputs is None:
            test = with_columns_of(train, test, columns, (str(paths[0]), str(paths[1])))
    else:
        paths = (place, place)
        table = _read(place, columns)
        client = columns.find_client(list(table.columns), str(place), needed=True)
        owners = None if client is None else table[client]
        tests, note = divide(len(table), owners, place, "test set of its own")
        if place.name == "train.csv" and (place.parent / "test.csv").is_file():
            note += f"; {place.parent / 'test.csv'} is not read, unless data.root is the folder of both"
        train, test = (table[rows].reset_index(drop=True) for rows in (~tests, tests))
        notes = (note,)
    train, test = _with_values(train, test, columns)
    if place.is_file() and train[columns.target].dtype.kind not in "biuf":
        # a class with few rows may be missing from one of the two sets
        names = sorted({*train[columns.target], *test[columns.target]})
    given: dict[str, Any] = {"class_names": names} if names and kind in (AUTO, "classification") else {}
    for part, path, frame in (("train", paths[0], train), ("test", paths[1], test)):
        found = read_frame(frame, str(path), columns, part == "train")
        given |= dict(zip((f"x_{part}", f"y_{part}", f"client_{part}"), found, strict=False))
    source = from_fields(place.stem, given, str(place), kind, ignored)
    return replace(source, notes=(*source.notes, *notes))


def _read(path: Path, columns: Columns, has_clients: bool = True) -> pd.DataFrame:
    """Reads a csv file. Targets and clients stay texts. Raises :class:`UserError` if a target or a client is empty."""
    there = _header(path)
    client, inputs = columns.find(there, str(path), has_clients)
    if "" in inputs:
        raise UserError(
            f"{path}: column {there.index('')} has no name, as the index that pandas' to_csv writes; write it with "
            "index=False, or name the columns of inputs (data.input_columns)"
        )
    others = list(dict.fromkeys([columns.target, *([] if client is None else [client])]))
    # read as texts, so that 007 and 7 stay different clients; the "=" keeps pandas from reading NA as a gap
    texts = {there.index(column): "={}".format for column in others}
    table = _parse(path, converters=texts, low_memory=False, **EXACT)
    if not len(table):
        raise UserError(f"{path} has no rows")
    table.columns = pd.Index(there)
    for column in others:
        table[column] = table[column].str[1:]
        empty = table[column].str.strip() == ""
        if empty.any():
            raise UserError(
                f"{path}: column {column!r} has nothing in row {int(empty.argmax())} ({int(empty.sum())} such rows)"
            )
    chosen: pd.DataFrame = table[[*inputs, *others]].astype(dict.fromkeys(others, object))
    return chosen


def _header(path: Path) -> list[str]:
    # if all rows are longer than the first line, pandas would take their first values for an index
    names, *_ = _parse(path, header=None, nrows=2, dtype=str, keep_default_na=False).to_numpy().tolist()
    for separator in (";", "\t", "|"):
        if len(names) == 1 and separator in names[0]:
            raise UserError(f"{path} separates its columns by {separator!r}; data.source=csv needs commas")
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UserError(f"{path} has two columns {name!r}")
    return names


def _parse(path: Path, **options: Any) -> pd.DataFrame:
    try:
        found: pd.DataFrame = pd.read_csv(path, encoding="utf-8-sig", **options)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} (data.root)") from None
    except pd.errors.EmptyDataError:
        raise UserError(f"{path} is empty") from None
    except (OSError, ValueError, EOFError) as error:
        reason = ValueError(str(error).replace("Error tokenizing data. C error: ", ""))
        raise UserError(f"{path} can't be read as csv: {first_sentence(reason)}") from None
    return found


def _with_values(train: pd.DataFrame, test: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns both tables, with numbers in place of texts in the columns of targets and clients.

    A column is changed only if all of its texts, in both tables, stand for numbers.
    """
    client = columns.find_client(list(train.columns), "", needed=False)
    # one column may hold both
    for column, read in {client: _clients, columns.target: _targets}.items():
        if column is None:
            continue
        frames = [frame for frame in (train, test) if column in frame]
        values = read(pd.concat([frame[column] for frame in frames], ignore_index=True))
        train = train.assign(**{column: values[: len(train)]})
        if len(frames) > 1:
            test = test.assign(**{column: values[len(train) :]})
    return train, test


def _targets(texts: pd.Series) -> np.ndarray:
    if texts.str.fullmatch(WHOLE).all():
        return texts.astype(np.int64).to_numpy()
    # Python's own numbers may have marks between digits: 1_000
    if not texts.str.contains("_").any():
        with contextlib.suppress(ValueError):
            return np.array([float(text) for text in texts])
    return texts.to_numpy(object)


def _clients(texts: pd.Series) -> np.ndarray:
    if texts.str.fullmatch(WHOLE_CLIENT).all():
        return texts.astype(np.int64).to_numpy()
    # pandas writes whole numbers as floats in a column with a gap, so that one of two files may have both
    if texts.str.fullmatch(f"{WHOLE_CLIENT}|{WHOLE_FLOAT}").all():
        return texts.str.partition(".")[0].astype(np.int64).to_numpy()
    return texts.to_numpy(object)
