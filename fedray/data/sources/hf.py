"""The source ``hf``: Hugging Face data sets from the hub, from a folder written by ``save_to_disk``, or in Parquet
files.

No code of a data set is ever run: the versions of ``datasets`` that fedray works with do not support scripts any more.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from fedray.config import IGNORE_INDEX
from fedray.data.sources.columns import Columns, divide
from fedray.data.sources.hf_items import INSTALL, clients_of, fields_of
from fedray.data.sources.source import Source, from_fields
from fedray.data.sources.targets import AUTO
from fedray.data.storage.cache import file_stamp
from fedray.errors import UserError, first_sentence, near_miss
from fedray.util.cache import cache_folder
from fedray.util.files import in_home

TRAIN, TESTS = "train", ("test", "validation", "val", "valid")
"""The name of the training set, and the possible names of the test set. The first one that exists is the test set."""

ON_HUB = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
"""The name of a data set on the hub."""


class Found(NamedTuple):
    """A Hugging Face data set that was found on the disk or on the hub.

    ``sets`` maps the name of each set, such as ``train``, to its ``datasets.Dataset``. ``stamps`` is a list with the
    paths, sizes and times of the files that hold the sets, which shows later whether a file has changed. It is None for
    sets in memory.
    """

    sets: dict[str, Any]
    stamps: list[Any] | None


def hf(
    root: str | None,
    columns: Columns,
    kind: str = AUTO,
    ignored: int = IGNORE_INDEX,
    image_size: int | None = None,
    access: str = AUTO,
) -> Source:
    """Loads a data set of Hugging Face from the disk or from the hub.

    If it has no test set, every fifth row is a test row; if there are clients, every fifth row of each client. Raises
    :class:`UserError` if the library ``datasets`` is not installed, if the data set can't be found, downloaded or read,
    or if something in it is wrong.

    Args:
        root: a folder written by ``save_to_disk``, a Parquet file, a folder of Parquet files, or else a name on the
            hub.
        columns: the columns that hold the targets, the clients and the inputs.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).
        image_size: the height and width in pixels to which images are scaled; None keeps their size.
        access: where samples are read from (``data.access``). With ``lazy`` a row is read only when it is used.
    """
    if root is None:
        raise UserError("data.source=hf needs data.root: a name on the hub, a folder of save_to_disk, or Parquet files")
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source=hf needs Hugging Face datasets: {INSTALL}") from None
    if int(datasets.__version__.split(".")[0]) < 4:
        raise UserError(
            f"data.source=hf needs datasets 4 or later, which run no code of data sets, not {datasets.__version__}: "
            f"{INSTALL}"
        )
    found = _find(datasets, root)
    sets, notes, division = _divided(found.sets, root, columns)
    stamps = None if found.stamps is None else [*found.stamps, division]
    fields = fields_of(sets, columns, kind, access, image_size, root, stamps)
    source = from_fields(Path(root).name, fields, root, kind, ignored)
    return replace(source, notes=(*source.notes, *notes))


@contextlib.contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _find(datasets: Any, root: str) -> Found:
    place = in_home(root)
    if place.is_file():
        if place.suffix != ".parquet":
            raise UserError(
                f"data.root={place} is no Parquet file (.parquet), the only files that data.source=hf reads"
            )
        return _of_parquet(datasets, {TRAIN: [place]}, place)
    if not place.is_dir():
        if root.startswith(("/", "~", ".")) or not re.fullmatch(ON_HUB, root):
            raise UserError(f"there is no file or folder {place}, and data.root={root} is no name on the hub")
        return _of_hub(datasets, root)
    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        return _of_disk(datasets, place)
    for folder in (place, place / "data"):
        files = {name: _parts(folder, name) for name in (TRAIN, *TESTS)}
        if files[TRAIN]:
            return _of_parquet(datasets, {name: paths for name, paths in files.items() if paths}, place)
    script = next(place.glob("*.py"), None)
    if script is not None:
        raise UserError(
            f"{script} is a script that makes a data set; fedray never runs those: save it with save_to_disk"
        )
    raise UserError(
        f"data.root={place} has neither files train*.parquet, nor dataset_dict.json or state.json, which save_to_disk "
        "writes"
    )


def _parts(folder: Path, name: str) -> list[Path]:
    """Returns the Parquet files of the set ``name``: ``NAME.parquet``, or its parts ``NAME-00000-of-00002.parquet``."""
    begins = sorted(path for path in folder.glob(f"{name}*.parquet"))
    for path in begins:
        if not re.fullmatch(rf"{name}(-\d+.*)?\.parquet|(valid|validation)(-\d+.*)?\.parquet", path.name):
            raise UserError(
                f"{path} is named like the set {name!r}, but neither {name}.parquet nor {name}-00000....parquet: "
                "rename it, or move it away"
            )
    found = [path for path in begins if re.fullmatch(rf"{name}(-\d+.*)?\.parquet", path.name)]
    numbers = [re.fullmatch(r".*-(\d+)-of-(\d+).*", path.name) for path in found]
    counted = [(int(each[1]), int(each[2])) for each in numbers if each]
    first = min((number for number, _ in counted), default=0)
    if counted and (first > 1 or sorted(counted) != [(first + place, len(found)) for place in range(len(found))]):
        raise UserError(
            f"{folder}: the parts of the set {name!r} are not complete, or there are others beside them: "
            f"{', '.join(path.name for path in found)}"
        )
    return found


def _of_hub(datasets: Any, root: str) -> Found:
    try:
        sets = datasets.load_dataset(root)
    except Exception as error:  # datasets passes on the errors of the libraries that it uses
        raise UserError(
            f"data.root={root} is no file or folder here, and could not be downloaded from the hub of Hugging Face: "
            f"{first_sentence(error)}"
        ) from None
    return Found(dict(sets), _stamps(dict(sets)))


def _of_disk(datasets: Any, place: Path) -> Found:
    try:
        with _no_progress_bars(datasets):
            loaded = datasets.load_from_disk(str(place), keep_in_memory=False)
    except Exception as error:
        raise UserError(f"{place} can't be read as a data set of Hugging Face: {first_sentence(error)}") from None
    sets = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {TRAIN: loaded}
    return Found(sets, _stamps(sets))


def _of_parquet(datasets: Any, files: dict[str, list[Path]], place: Path) -> Found:
    """Converts Parquet files to Arrow files in the cache, which can be mapped into memory, and opens these."""
    for path in (path for paths in files.values() for path in paths):
        try:
            pq.read_schema(path)
        except Exception as error:
            raise UserError(f"{path} can't be read as a Parquet file: {first_sentence(error)}") from None
    stamps = {name: [file_stamp(path) for path in paths] for name, paths in files.items()}
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
    named = {name: [glob.escape(str(path)) for path in paths] for name, paths in files.items()}
    try:
        with _no_progress_bars(datasets):
            sets = datasets.load_dataset("parquet", data_files=named, cache_dir=str(cache_folder() / "parquet" / key))
    except Exception as error:
        raise UserError(f"{place} can't be read as Parquet: {first_sentence(error.__cause__ or error)}") from None  # type: ignore[arg-type]
    return Found(dict(sets), [stamps])


def _stamps(sets: dict[str, Any]) -> list[Any] | None:
    if not all(each.cache_files for each in sets.values()):
        return None
    return [[file_stamp(Path(file["filename"])) for file in each.cache_files] for each in sets.values()]


def _divided(sets: dict[str, Any], root: str, columns: Columns) -> tuple[dict[str, Any], Sequence[str], str]:
    """Returns the training and test set under the names ``train`` and ``test``, messages for the user, and a digest.

    If there is only a training set, it is divided, and the digest shows which rows are test rows. Otherwise it is
    empty.
    """
    if TRAIN not in sets:
        raise UserError(f"{root} has no set {TRAIN!r}{near_miss(TRAIN, sets)}")
    train = sets[TRAIN]
    test = next((name for name in TESTS if name in sets), None)
    if test is not None:
        notes = [] if test == "test" else [f"warning: {root} has no set 'test': its set {test!r} is the test set"]
        notes += _note_on_others(root, set(sets) - {TRAIN, test})
        return {TRAIN: train, "test": sets[test]}, notes, ""
    there = list(train.column_names)
    client = columns.find_client(there, root, needed=True)
    owners = None if client is None else clients_of(train, client, root)
    rows, note = divide(len(train), owners, root, "test set")
    parts = {TRAIN: train.select(np.flatnonzero(~rows)), "test": train.select(np.flatnonzero(rows))}
    return parts, [note, *_note_on_others(root, set(sets) - {TRAIN})], hashlib.sha256(rows.tobytes()).hexdigest()


def _note_on_others(root: str, others: set[str]) -> list[str]:
    if not others:
        return []
    return [f"warning: {root}: {', '.join(sorted(others))} of its sets {'is' if len(others) == 1 else 'are'} not read"]
