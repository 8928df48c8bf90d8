"""The samples of a Hugging Face Dataset: its columns as arrays, or its rows, which are read from Arrow when they are
used.

Nothing here imports the optional library ``datasets``: whoever passes a Dataset has already imported it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedray.core.structure import map_leaves
from fedray.data.sources.arrow import column_array
from fedray.data.sources.columns import Columns, in_order_of
from fedray.data.sources.images import decode_image
from fedray.data.sources.targets import AUTO
from fedray.data.sources.texts import texts_among, tokenized
from fedray.data.storage.cache import file_stamp, remembered
from fedray.data.storage.lazy import LazyItems, is_much
from fedray.errors import UserError, first_sentence

INSTALL = "pip install 'fedray[hf]'"
"""The command that installs ``datasets``."""

ROWS = 1000
"""The number of rows that are hashed at a time."""


def is_table(data: Any) -> bool:
    """Returns whether ``data``, which a user hands over as training or test set, is a Hugging Face Dataset.

    Raises :class:`UserError` for a DatasetDict and for streamed data sets, which fedray can't use directly.
    """
    library = sys.modules.get("datasets")
    for name, instead in (
        ("DatasetDict", "data=d['train'], test=d['test']"),
        ("IterableDataset", "a Dataset that is not streamed"),
        ("IterableDatasetDict", "Datasets that are not streamed"),
    ):
        if isinstance(getattr(library, name, None), type) and isinstance(data, getattr(library, name)):
            raise UserError(f"data=... is a {name}; hand over {instead}")
    kind = getattr(library, "Dataset", None)
    return isinstance(kind, type) and isinstance(data, kind)


def fields_of(
    sets: Mapping[str, Any],
    columns: Columns,
    kind: str = AUTO,
    access: str = AUTO,
    image_size: int | None = None,
    where: str = "",
    stamps: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Reads a training and a test set of Hugging Face. Returns a dict of fields of a :class:`Source`, by field name.

    The values are not yet checked. The fields are ``x_train``, ``y_train``, ``x_test``, ``y_test`` and, where they
    exist, ``client_train``, ``client_test``, ``class_names``, ``column_names`` and ``classes``. Images, inputs that
    take much memory, and all inputs if ``access`` is ``lazy`` become a :class:`LazyItems`, which reads a row only when
    it is used; other inputs become arrays. Raises :class:`UserError`, which names column and row, for anything that
    can't be used.

    Args:
        sets: the two Datasets under the names ``train`` and ``test``, in this order.
        columns: the columns that hold the targets, the clients and the inputs.
        kind: the kind of task (``task.kind``), such as ``regression``, or ``auto``.
        access: where samples are read from (``data.access``).
        image_size: the height and width in pixels to which images are scaled; None keeps their size.
        where: what error messages put before the names of the sets.
        stamps: a list that differs if the files of the sets have changed; None if the sets are not in files.
    """
    given: dict[str, Any] = {}
    inputs: Sequence[str] = ()
    if columns.tokenizer is not None:
        sets, columns, stamps = *_with_tokens(sets, columns, where), None
    shown = {"train": f"{where} (train)", "test": f"{where} (test)"} if where else {"train": "data", "test": "test"}
    for part, dataset in sets.items():
        name = shown[part]
        there = list(dataset.column_names)
        client, found = columns.find(there, name, part == "train")
        if not len(dataset):
            raise UserError(f"{name} has no rows")
        if dataset.format["type"] == "custom":
            raise UserError(f"{name} has a transform (set_transform): use data.transform, or map()")
        given[f"y_{part}"] = read_column(dataset, columns.target, name)
        if client is not None:
            given[f"client_{part}"] = clients_of(dataset, client, name)
        inputs = in_order_of(inputs, found, (shown["train"], name)) if inputs else found
        _refuse_texts(dataset, inputs, name, columns)
        items = Rows(dataset, inputs, image_size, name, None if stamps is None else [part, *stamps])
        lazy = LazyItems(items, name)
        is_lazy = items.images or access == "lazy" or is_much(lazy.bytes_each * len(lazy))
        given[f"x_{part}"] = lazy if is_lazy else items.arrays()
        if len(items.numbers) == len(items.inputs):
            given["column_names"] = items.inputs
    names = [getattr(dataset.features[columns.target], "names", None) for dataset in sets.values()]
    if names[0] is not None and kind in (AUTO, "classification"):
        if names[-1] != names[0]:
            raise UserError(f"{where or 'data'}: the classes of train and test have not the same names")
        given |= {"class_names": names[0], "classes": len(names[0])}
    return given


def _with_tokens(sets: Mapping[str, Any], columns: Columns, where: str) -> tuple[Mapping[str, Any], Columns]:
    """Returns the ``sets`` with tokens in place of the texts among their inputs, and the columns that they have then.
    Raises :class:`UserError` if there are no texts."""
    first = next(iter(sets.values()))
    _, found = columns.find(list(first.column_names), where or "data", True)
    texts = texts_among(first, found)
    if not texts:
        raise UserError(f"data.tokenizer={columns.tokenizer}: no column of inputs holds texts in {where or 'data'}")
    assert columns.tokenizer is not None
    if taken := [name for name in ("input_ids", "attention_mask") if name in first.column_names]:
        raise UserError(f"data.tokenizer={columns.tokenizer}: {where or 'data'} has a column {taken[0]!r} already")
    made, new = tokenized(sets, texts, columns.tokenizer, columns.length)
    if columns.inputs is None:
        return made, columns
    return made, replace(columns, inputs=(*(name for name in columns.inputs if name not in texts), *new))


def read_column(dataset: Any, column: str, name: str) -> np.ndarray:
    """Reads the column with the name ``column`` of a Hugging Face Dataset into an array.

    The array is ``[n]``, or ``[n, ...]`` for a column of sequences. Raises :class:`UserError` for a missing value, or
    if :func:`column_array` can't convert the column. Error messages call the Dataset ``name``.
    """
    return column_array(_as_arrow(dataset, [column])[:][column], f"{name}: column {column!r}")


def clients_of(dataset: Any, column: str, name: str) -> np.ndarray:
    """Returns the client of each row of a Hugging Face Dataset as an array [n], which is read from the column
    ``column``.

    If the column is a ClassLabel, which stores numbers for names, the array has the names. Error messages call the
    Dataset ``name``.
    """
    found, names = read_column(dataset, column, name), getattr(dataset.features[column], "names", None)
    if names is not None:
        if found.min() < 0:
            raise UserError(f"{name}: column {column!r} has no client in row {int(found.argmin())}")
        found = np.array(names, dtype=object)[found]
    return found


def _refuse_texts(dataset: Any, inputs: Sequence[str], name: str, columns: Columns) -> None:
    for field in _as_arrow(dataset, inputs)[:1].schema:
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            raise UserError(
                f"{name}: column {field.name!r} holds texts, which are no inputs of a model: turn them into tokens"
                f"{' (data.tokenizer)' if columns.inputs_key.startswith('data.') else ''}, or leave them out by "
                f"{columns.inputs_key}"
            )


def _as_arrow(dataset: Any, columns: Sequence[str]) -> Any:
    """Returns the Dataset with only some of its columns. Its rows are then returned as Arrow tables."""
    return dataset.select_columns(list(columns)).with_format("arrow")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _files_of(images: pa.ChunkedArray) -> list[str]:
    """Returns the paths of the images in a column that are stored as files. Images that are stored as bytes are
    not read."""
    is_file = pc.is_null(pc.struct_field(images, "bytes"))
    paths: list[str] = pc.struct_field(images, "path").filter(is_file).drop_null().to_pylist()
    return paths


class Rows:
    """The rows of a Hugging Face Dataset as a torch-like Dataset of pairs (x, y).

    x has the columns ``inputs`` of a row:

    * An image is uint8 ``[3, size, size]`` (:func:`fedray.data.sources.images.decode_image`).
    * Sequences and arrays are not changed.
    * Single numbers are float32. If all columns hold single numbers, x is one array of them.
    * Several other columns make x a dict of arrays by column name.

    y is always 0, because targets are read separately (:func:`read_column`). If the Dataset is in files, another
    process is sent only their paths, and opens them itself. Several threads may read rows at the same time
    (``parallel``).

    Args:
        dataset: the Hugging Face Dataset.
        inputs: the names of the columns that make x.
        size: the height and width in pixels to which images are scaled; None if all have the same size and keep it.
        name: what error messages call the Dataset.
        stamps: a list that differs if the Dataset's files, or the choice of rows from them, have changed. With it
            :meth:`digest` hashes the rows only once for the same list; with None it hashes them on every call.
    """

    parallel = True

    def __init__(
        self, dataset: Any, inputs: Sequence[str], size: int | None, name: str, stamps: Sequence[Any] | None = None
    ) -> None:
        self.inputs, self.size, self.name, self.stamps = list(inputs), size, name, stamps
        self.length = len(dataset)
        features = {column: dataset.features[column] for column in self.inputs}
        self.described = repr(features)
        self.images = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
        self.table = _as_arrow(dataset, self.inputs)
        kinds = self.table[:1].schema
        self.numbers = [column for column in self.inputs if _is_number(kinds.field(column).type)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return map_leaves(lambda rows: rows[0], self._read(self.opened[i : i + 1], i)), 0

    def arrays(self) -> Any:
        """Reads x of all rows into memory, as an array ``[n, ...]``, or a dict of such arrays by column name."""
        return self._read(self.opened[:], 0)

    def digest(self) -> str:
        """Returns a text that shows whether the samples have changed: a hash of all rows, a description of the input
        columns, and the size to which images are scaled."""
        known = [self.stamps, self.inputs, self.described, self.length]
        found = self._hash() if self.stamps is None else remembered(known, self._hash)
        return f"{found['rows']} {self.described} {self.size}"

    def stamp(self) -> str:
        """Returns a text that changes if any sample may have changed. A stored copy of the samples is then made again.

        It consists of the :meth:`digest` and of a hash of the modification times of all images that the Dataset stores
        only as paths of image files.
        """
        times = hashlib.sha256()
        for start in range(0, self.length if self.images else 0, ROWS):
            rows = self.opened[start : start + ROWS]
            for path in chain.from_iterable(_files_of(rows[column]) for column in self.images):
                with contextlib.suppress(OSError):
                    times.update(repr(file_stamp(Path(path))).encode())
        return f"{self.digest()} {times.hexdigest()}"

    def _hash(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for start in range(0, self.length, ROWS):
            rows = self.opened[start : start + ROWS].combine_chunks().replace_schema_metadata(None)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_table(rows)
            digest.update(sink.getvalue())
        return {"rows": digest.hexdigest()}

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key not in ("table", "opened", "shapes")}
        return {"packed": pickle.dumps(self.table), **state} if hasattr(self, "table") else state

    @cached_property
    def opened(self) -> Any:
        """The Hugging Face Dataset, reduced to the input columns. Its slices, such as ``opened[0:10]``, are Arrow
        tables. In another process, to which this object was sent, the first use opens the Dataset's files."""
        if hasattr(self, "table"):
            return self.table
        try:
            return pickle.loads(self.packed)  # type: ignore[attr-defined]
        except ImportError:
            raise UserError(f"{platform.node()} has no Hugging Face datasets: {INSTALL}") from None
        except FileNotFoundError as error:
            raise UserError(
                f"{self.name}: {error.filename or first_sentence(error)} is not on {platform.node()}: every machine "
                "needs the same files at the same path"
            ) from None
        except Exception as error:
            raise UserError(f"{self.name} can't be opened on {platform.node()}: {first_sentence(error)}") from None

    def _read(self, table: pa.Table, first: int) -> Any:
        """Returns the inputs in the rows of an Arrow table, as an array ``[n, ...]`` or a dict of such arrays by
        column name.

        ``first`` is the number of the table's first row in the Dataset, for messages.
        """
        parts = {column: self._read_part(table[column], column, first) for column in self.inputs}
        if len(self.numbers) == len(self.inputs):
            return np.stack(list(parts.values()), axis=1)
        if len(parts) == 1:
            return parts[self.inputs[0]]
        return {column: part[:, None] if column in self.numbers else part for column, part in parts.items()}

    def _read_part(self, column: pa.ChunkedArray, name: str, first: int) -> np.ndarray:
        if name in self.images:
            return np.stack([self._image(value.as_py(), name, first + k) for k, value in enumerate(column)])
        found = column_array(column, f"{self.name}: column {name!r}", first)
        if name not in self.numbers:
            return found
        # a number that is too large for float32 becomes infinite, which is refused later
        with np.errstate(over="ignore"):
            return found.astype(np.float32)

    def _image(self, value: Mapping[str, Any] | None, column: str, row: int) -> np.ndarray:
        """Returns the image in a cell of a column, uint8 ``[3, height, width]``. ``value`` holds the image's bytes or
        its path.

        Raises :class:`UserError` if the image is missing, or has another size than the column's other images.
        """
        what = f"{self.name}: the image in row {row} of column {column!r}"
        data, path = (value or {}).get("bytes"), (value or {}).get("path")
        if data is None and path is None:
            raise UserError(f"{what} is missing")
        found = decode_image(io.BytesIO(data) if data is not None else Path(str(path)), what, self.size)
        shape = self.shapes.setdefault(column, found.shape)
        if shape != found.shape:
            one, other = (f"{width}x{height}" for _, height, width in (found.shape, shape))
            raise UserError(f"{what} has {one} pixels, another one {other}: data.image_size scales all to one size")
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Maps the name of a column of images to their shape ``(3, height, width)``. A column is added when this
        process reads its first image, and all later images must have the same shape."""
        return {}
