"""Makes a source from the data that a user hands over from Python: arrays, a torch Dataset, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from fedray.config import IGNORE_INDEX
from fedray.core.seeds import drawn_by, generator_states, global_generators
from fedray.core.structure import leaves
from fedray.data.normalization import DEFAULT, OF_TABLES, of_choice
from fedray.data.sources.columns import Columns
from fedray.data.sources.features import stack_samples
from fedray.data.sources.hf_items import fields_of, is_table
from fedray.data.sources.per_client import is_arrays, one_per_client
from fedray.data.sources.source import Source, from_fields, validate
from fedray.data.sources.tables import read_frame, with_columns_of
from fedray.data.sources.targets import AUTO
from fedray.data.sources.wrapped import list_of
from fedray.data.storage.lazy import LazyItems, is_much, random_item, read_item, same_values, stack_targets, targets_of
from fedray.errors import UserError

LABEL = "label"
"""The default name of the column with the labels."""


def user_source(
    data: Any,
    test: Any,
    client_column: str | None = None,
    label_column: str = LABEL,
    normalization: str = DEFAULT,
    kind: str = AUTO,
    ignored: int = IGNORE_INDEX,
    access: str = "auto",
    image_size: int | None = None,
) -> Source:
    """Makes a checked :class:`Source` from the data that a user hands over to ``simulate`` or ``tune`` from Python.

    Labels and clients may be names. These are numbered, and the Source has the list of names.

    Args:
        data, test: the training and the test set, in any of the forms that simulate() takes; ``test`` is None if
            ``data`` is a Source.
        client_column, label_column: the names of the columns with the clients and the labels, in DataFrames and Hugging
            Face Datasets. If ``client_column`` is None, the clients are in the column ``client``, if there is one.
        normalization, access, image_size: the values of ``data.normalization``, ``data.access`` and
            ``data.image_size``.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).

    Raises:
        UserError: something is wrong with the data; the message names set, column and row where possible.

    Example:
        >>> data = [[1.5], [2.5], [3.5]], [0, 1, 0], ["ann", "ann", "bob"]
        >>> user_source(data, test=([[1.0]], [1])).client_names
        ('ann', 'bob')
    """
    if normalization not in OF_TABLES:
        raise UserError(
            f"data.normalization={normalization} is for sources that know it; for data=... there are "
            f"{', '.join(OF_TABLES)}"
        )
    source = _source_of(data, test, client_column, label_column, kind, ignored, access, image_size)
    return replace(source, **of_choice(normalization, "data", source.x_train))


def _source_of(
    data: Any, test: Any, client_column: str | None, label_column: str, kind: str, ignored: int, access: str,
    image_size: int | None,
) -> Source:  # fmt: skip
    if isinstance(data, Source):
        if test is not None:
            raise UserError("test=... must not be given with a Source, which has a test set")
        # the user may have changed the data since they were read, so the files no longer identify them
        return validate(replace(data, files=()), None, kind, ignored)
    if test is None:
        raise UserError(
            "data=... needs test=... in the same form: samples that no client trains on, such as a tenth of them"
        )
    data, test = one_per_client(data, test, label_column)
    columns = Columns(
        label_column, client_column, target_key="label_column", client_key="client_column",
        inputs_key="Dataset.select_columns",
    )  # fmt: skip
    if (label_column, client_column) != (LABEL, None) and not isinstance(data, pd.DataFrame) and not is_table(data):
        raise UserError(
            "client_column and label_column name columns of a DataFrame or a Hugging Face Dataset, but data is neither"
        )
    if is_table(data) != is_table(test):
        raise UserError("data=... and test=... must both be a Hugging Face Dataset, or neither")
    if is_table(data):
        fields = fields_of({"train": data, "test": test}, columns, kind, access, image_size)
        return _checked(fields, kind, ignored)
    if image_size is not None:
        raise UserError("data.image_size is for images in a Hugging Face Dataset, and data=... is none")
    given = _read_fields(data, "data", "train", columns, access)
    if isinstance(data, pd.DataFrame) and isinstance(test, pd.DataFrame):
        columns.require(list(test.columns), "test", columns.target, columns.target_key)
        test = with_columns_of(data, test, columns)
    elif is_arrays(data) and is_arrays(test) and all(isinstance(each[0], pd.DataFrame) for each in (data, test)):
        test = (with_columns_of(data[0], test[0]), *test[1:])
    return _checked(given | _read_fields(test, "test", "test", columns, access), kind, ignored)


def _checked(fields: Mapping[str, Any], kind: str, ignored: int) -> Source:
    """Returns the source with these fields. Raises :class:`UserError` if something is wrong with them."""
    if "client_test" in fields and "client_train" not in fields:
        raise UserError(
            "test=... says which client each sample belongs to, as a list does that has one element for each client, "
            "but data=... does not: give both in the same form"
        )
    return from_fields("own", fields, "data", kind, ignored)


def _read_fields(data: Any, name: str, part: str, columns: Columns, access: str) -> dict[str, Any]:
    """Returns unchecked fields of a :class:`Source`: ``x_<part>``, ``y_<part>`` and, if there are clients,
    ``client_<part>``."""
    if isinstance(data, pd.DataFrame):
        found = read_frame(data, name, columns, part == "train")
    elif is_arrays(data):
        found = tuple(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        found = _read_dataset(data, name, access)
    else:
        raise UserError(f"{name}=... must be arrays (x, y), a torch Dataset or a DataFrame, not {type(data).__name__}")
    return dict(zip((f"x_{part}", f"y_{part}", f"client_{part}"), found, strict=False))


def _random_again(
    dataset: Sequence[Any], name: str, items: Sequence[tuple[Any, Any]], ended: Mapping[str, Any]
) -> str | None:
    """Reads all items of a Dataset, ``items``, once more with other random numbers. Returns a clause that says how it
    is random, or None if it is not: the items are the same, and so are the states in which the generators that it draws
    from have ``ended``, because the Dataset seeds them itself."""
    with global_generators(1):
        for number, (x, _) in enumerate(items):
            again, _ = read_item(dataset, name, number)
            if not all(map(same_values, leaves(x), leaves(again))):
                return f"item {number} of {name} differs when it is read again"
        states = generator_states()
    is_random = any(state != states[each] for each, state in ended.items())
    return f"{name} draws random numbers when its items are read" if is_random else None


def _read_dataset(dataset: Sequence[Any], name: str, access: str) -> tuple[Any, ...]:
    """Returns the inputs and targets of a Dataset, and the clients if it has an attribute ``clients``.

    Inputs are arrays, or :class:`LazyItems` if ``access`` is ``lazy``. With ``auto`` they are lazy if items are random
    or take much memory.
    """
    if len(dataset) == 0:
        raise UserError(f"{name} is an empty data set")
    item, lazy = random_item(dataset, name), LazyItems(dataset, name)
    random = None if item is None else f"item {item} of {name} differs when it is read again"
    clients = list_of(dataset, "clients", name)
    owners = () if clients is None else (clients,)
    items: list[tuple[Any, Any]] = []
    if random is None and access != "lazy" and not is_much(lazy.bytes_each * len(lazy)):
        with global_generators(0):
            drawn = drawn_by(lambda: items.extend(read_item(dataset, name, i) for i in range(len(dataset))))
            ended = {each: state for each, state in generator_states().items() if each in drawn}
        # some items may be random although those that were tried are not
        random = _random_again(dataset, name, items, ended) if drawn else None
    if random is not None and access in ("memory", "mapped"):
        raise UserError(
            f"{random}, as with random transforms; with data.access={access} items would stay as first read in all "
            "rounds: use data.access=lazy, or give them without these, and data.augment or data.transform, which "
            "change mini-batches in training"
        )
    if random is not None or not items:
        known = targets_of(dataset, name)
        return lazy.checked(known), known.values, *owners
    x, targets = (list(column) for column in zip(*items, strict=True))
    return stack_samples("item", name, x), stack_targets(name, targets), *owners
