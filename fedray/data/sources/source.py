"""A data set before it is partitioned among clients, and the checks of user-defined data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fedray.config import IGNORE_INDEX, DataConfig, TaskConfig
from fedray.data.normalization import DEFAULT, checked, of_bytes, of_choice
from fedray.data.sources.columns import Columns
from fedray.data.sources.encode import encode_clients
from fedray.data.sources.features import alike, count_samples, form_of, read_features
from fedray.data.sources.registry import SOURCES as SOURCES
from fedray.data.sources.registry import SourceEntry, entry_of
from fedray.data.sources.targets import AUTO, read_targets
from fedray.errors import UserError, near_miss
from fedray.usercode.importing import as_user_error, import_object


@dataclass(frozen=True, eq=False)
class Source:
    """The training and test samples of a data set, before they are partitioned among clients.

    A user-defined source (a function that loads data) returns a Source, or a dict of its fields. Labels and clients may
    be names (texts, booleans, pandas' categories) until :func:`validate` has numbered them. Labels that are floats must
    be whole.

    Args:
        name: what messages and tables call the data.
        x_train, x_test: the inputs, an array [n, ...] or a tuple or dict of arrays. Images are [n, channels, height,
            width]. uint8 and other whole numbers keep their values; floats are float32.
        y_train, y_test: the targets. For a classification they are int64 [n], 0..classes-1; :mod:`fedray.core.task`
            says what they are in other tasks.
        classes: the number of classes, if a sample or a token has a class; in other tasks, how many numbers the target
            of a sample has.
        scale, shift: float32 [channels], or None. A model's input is float32(x) * scale + shift along axis 1, which for
            images is (x/255 - mean) / std. For a tuple or dict of inputs, they are a tuple or dict of the same
            structure.
        client_train, client_test: int64 [n], the client of each sample, for the partition ``natural``; None if the data
            come without clients. In the test set -1 means that no client has the sample.
        x_public, y_public: the public set, if the data come with one: samples that belong to no client, on which the
            server may train.
        class_names: the names of the classes, in the order of the labels; None if they have no names.
        client_names: the names of the clients, in the order of their numbers; None if they have no names.
        column_names: the names of the columns of inputs [n, columns], for messages; None if they have no names.
        files: for a source that comes with fedray, the :func:`~fedray.data.storage.cache.file_stamp` of each file that
            was read.
        choices: for a source that comes with fedray, what decides besides the files which arrays were made of them,
            such as ``data.variant``, as text.
        task: the kind of task; with ``auto`` it is found from the targets.
        notes: messages for the user. Those that begin with ``warning: `` are warnings.

    Example:
        >>> x, y = np.zeros((4, 2), np.float32), np.arange(4) % 2
        >>> Source("mine", x_train=x, y_train=y, x_test=x, y_test=y, classes=2).public_by_default
        0
    """

    name: str
    x_train: Any
    y_train: np.ndarray
    x_test: Any
    y_test: np.ndarray
    classes: int
    scale: Any = None
    shift: Any = None
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    x_public: Any = None
    y_public: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None
    client_names: tuple[str, ...] | None = None
    column_names: tuple[str, ...] | None = None
    files: tuple[tuple[str, int, int, int, int], ...] = ()
    choices: str = ""
    task: str = AUTO
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of task that the targets are for (``task.kind``), such as ``regression``.

        If it is still ``auto``, because the source has not been checked, this is ``classification``.
        """
        return "classification" if self.task == AUTO else self.task

    @property
    def public_by_default(self) -> int:
        """The default number of samples in the public set, on which the server may train: the size of the public set if
        the data come with one, or else a tenth of the number of training samples."""
        return len(self.y_train) // 10 if self.y_public is None else len(self.y_public)


def load_source(
    name: str,
    root: str | None = None,
    normalization: str = DEFAULT,
    kind: str = AUTO,
    ignored: int = IGNORE_INDEX,
    image_size: int | None = None,
    columns: Columns | None = None,
    access: str = AUTO,
    variant: str | None = None,
) -> Source:
    """Loads the data of the source ``name``, checks them, and returns them as a :class:`Source`.

    Each source is a function that loads data. It is called only with those arguments below that are in its signature.

    Args:
        name: one of :data:`SOURCES`, or a user-defined function as ``file.py:function`` or ``module:function``. The
            function returns a :class:`Source`, or a dict of its fields, which need not have ``name`` and ``classes``.
        root: the folder or file with the data (``data.root``). In a user-defined function it may have any name.
        normalization: how inputs are scaled (``data.normalization``). If the function does not take it, fedray scales
            them.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).
        image_size, access, variant: the values of ``data.image_size``, ``data.access`` and ``data.variant``.
        columns: the columns of a table that hold the targets, the clients and the inputs; None for the default ones.

    Raises:
        UserError: there is no such source, it can't be imported, it raises an error, its data are wrong, or an argument
            is set that the function does not take.

    Example:
        >>> load_source("sample").x_train.shape
        (10000, 1, 28, 28)
    """
    entry = entry_of(name)
    loader = import_object(entry.loader, "data.source")
    if not callable(loader):
        raise UserError(f"data.source={name} is not a function but {type(loader).__name__}")
    offered = {
        "root": root, "normalization": normalization, "kind": kind, "ignored": ignored, "image_size": image_size,
        "columns": columns or Columns(), "access": access, "variant": variant,
    }  # fmt: skip
    with as_user_error(f"data.source={name} failed") if name not in SOURCES else contextlib.nullcontext():
        parameters = list(inspect.signature(loader).parameters)
        arguments = _arguments(name, entry, parameters, offered)
        loaded = loader(**arguments)
    if isinstance(loaded, Mapping):
        source = from_fields(name, loaded, None, kind, ignored)
    elif isinstance(loaded, Source):
        # a user's function may have changed what it read from files
        source = validate(loaded if name in SOURCES else replace(loaded, files=()), None, kind, ignored)
    else:
        what = type(loaded).__name__
        raise UserError(f"data.source {name} must return a Source or a dict of its fields, not {what}")
    choices = {key: value for key, value in (arguments | {"kind": kind, "ignored": ignored}).items() if key != "root"}
    source = replace(source, choices=repr(sorted(choices.items())))
    if "normalization" in parameters:
        return source
    return replace(source, **of_choice(normalization, source.name, source.x_train))


def _arguments(name: str, entry: SourceEntry, parameters: list[str], offered: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments among ``offered`` that the function of the source ``name`` takes.

    Raises :class:`UserError` for an argument that is set although the function does not take it.
    """
    if name in SOURCES or "normalization" not in parameters:
        entry.check_normalization(name, offered["normalization"])
    columns = offered["columns"].keys_set
    if "columns" not in parameters and columns:
        raise UserError(f"{columns[0]}: the source {name} has no columns to choose; data.source=csv and hf do")
    if "image_size" not in parameters and offered["image_size"] is not None:
        raise UserError(f"data.image_size: the inputs of the source {name} have a fixed size")
    if "variant" not in parameters and offered["variant"] is not None:
        raise UserError(f"data.variant: the source {name} has no variants")
    taken = {key: offered[key] for key in parameters if key in offered}
    if "variant" in taken:
        taken["variant"] = entry.variant(name, offered["variant"])
    if name not in SOURCES and "root" not in parameters:
        taken |= {key: offered["root"] for key in parameters[:1] if key not in offered}
    return taken


def source_of(data: DataConfig, task: TaskConfig) -> Source:
    """Loads and checks the data of the source that a configuration names (``data.source``), as :func:`load_source`
    does.

    ``data`` and ``task`` are the sections of these names in the configuration.
    """
    return load_source(
        data.source, data.root, data.normalization, task.kind, task.ignore_index, data.image_size, Columns.of(data),
        data.access, data.variant,
    )  # fmt: skip


def from_fields(
    name: str, given: Mapping[str, Any], where: str | None = None, kind: str = AUTO, ignored: int = IGNORE_INDEX
) -> Source:
    """Makes a checked :class:`Source` from a mapping of its fields, such as the dict that a user's source returns.

    Inputs of type uint8 are scaled to 0..1, because they usually are images, unless ``scale`` or ``shift`` is given.

    Args:
        name: the source's name, unless ``given`` has one.
        given: the fields, of which ``x_train``, ``y_train``, ``x_test`` and ``y_test`` are required.
        where: the beginning of error messages, such as a file; ``name`` if it is None.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).

    Raises:
        UserError: a field is unknown, missing or wrong; the message names array and row.

    Example:
        >>> x, y = np.ones((4, 2)), ["cat", "dog", "cat", "dog"]
        >>> from_fields("mine", {"x_train": x, "y_train": y, "x_test": x, "y_test": y}).class_names
        ('cat', 'dog')
    """
    where = where or name
    known = [field.name for field in fields(Source) if field.name not in ("files", "choices", "notes")]
    for key in given:
        if key not in known:
            raise UserError(f"{where}: unknown field {key!r}{near_miss(str(key), known)}")
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if given.get(key) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    source = _make_source(where, {"name": name, **given}, _agreed(where, given.get("task"), kind), ignored)
    x = form_of(source.x_train)
    if isinstance(x, np.ndarray) and x.dtype == np.uint8 and source.scale is None and source.shift is None:
        return replace(source, **of_bytes(x))
    return source


def _agreed(where: str, of_data: str | None, asked: str) -> str:
    """Returns the kind of task, from what the data (``of_data``) and the configuration (``asked``) say.

    Raises :class:`UserError` if the two name different kinds.
    """
    if of_data is None or of_data == AUTO or asked in (AUTO, of_data):
        return of_data if asked == AUTO and of_data is not None else asked
    raise UserError(f"task.kind={asked}, but the data are for task.kind={of_data} ({where})")


def validate(source: Source, where: str | None = None, kind: str = AUTO, ignored: int = IGNORE_INDEX) -> Source:
    """Checks the data in a :class:`Source`, and returns a new one whose arrays have the dtypes that the class promises.

    Args:
        source: the source, in which labels and clients may be names; in the result they are numbers.
        where: the beginning of error messages; the source's name if it is None.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).

    Raises:
        UserError: something is wrong; the message names array and row.
    """
    where = where or source.name
    given = {field.name: getattr(source, field.name) for field in fields(Source)}
    return _make_source(where, given, _agreed(where, source.task, kind), ignored)


def _make_source(where: str, given: dict[str, Any], kind: str, ignored: int) -> Source:
    """Checks the fields ``given`` and makes a Source from them.

    Labels and clients that are names are numbered. If ``classes`` is missing, it is found from the targets.
    """
    parts = [part for part in ("train", "test", "public") if _has_part(where, given, part)]
    names = {key: _names(where, key, given.get(key)) for key in ("class_names", "client_names")}
    given_targets = {f"y_{part}": given[f"y_{part}"] for part in parts}
    targets = read_targets(where, given_targets, kind, given.get("classes"), names["class_names"], ignored)
    found: dict[str, Any] = {**targets.arrays, **_clients(where, given, names["client_names"])}
    found |= {"task": targets.kind, "classes": targets.classes, "class_names": targets.class_names}
    for part in parts:
        name, samples = f"x_{part}", len(found[f"y_{part}"])
        found[name] = read_features(where, name, given[name], samples)
        found[name] = alike(where, name, found[name], found["x_train"])
        count = count_samples(where, name, found[name])
        for key in (f"y_{part}", f"client_{part}"):
            if found.get(key) is not None and len(found[key]) != count:
                raise UserError(
                    f"{where}: {name} has {count} samples and {key} {len(found[key])}; they must be equally many"
                )
    # a source that is checked a second time already has these notes
    notes = tuple(dict.fromkeys((*(given.get("notes") or ()), *targets.notes)))
    found["column_names"] = _column_names(where, given, form_of(found["x_train"]))
    scaling = checked(where, form_of(found["x_train"]), given.get("scale"), given.get("shift"))
    return Source(**{**given, **found, **scaling, "notes": notes})


def _has_part(where: str, given: Mapping[str, Any], part: str) -> bool:
    x, y = given.get(f"x_{part}"), given.get(f"y_{part}")
    if (x is None) != (y is None) or (x is None and part != "public"):
        raise UserError(f"{where} lacks {'x' if x is None else 'y'}_{part}")
    return x is not None


def _clients(where: str, given: Mapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns the fields ``client_train``, ``client_test`` and ``client_names``, with clients as numbers."""
    train, test = given.get("client_train"), given.get("client_test")
    if train is not None:
        train, test, names = encode_clients(where, train, test, names)
    else:
        for key in ("client_test", "client_names"):
            if given.get(key) is not None:
                raise UserError(f"{where} has {key} but lacks client_train, the client of each training sample")
    return {"client_train": train, "client_test": test, "client_names": names}


def _column_names(where: str, given: Mapping[str, Any], x: Any) -> tuple[str, ...] | None:
    """Returns the names of the columns of the inputs ``x``: the field of this name, or else those of a table."""
    named = given.get("column_names")
    named = getattr(given["x_train"], "columns", None) if named is None else named
    if named is None:
        return None
    if not isinstance(x, np.ndarray) or x.ndim != 2 or len(named) != x.shape[1]:
        raise UserError(f"{where}: column_names must have a name for each column of inputs [n, columns]")
    return tuple(map(str, named))


def _names(where: str, key: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in given)
    if isinstance(given, str) or len(set(names)) != len(names):
        raise UserError(f"{where}: {key} must be a list of different names")
    return names
