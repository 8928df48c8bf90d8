"""A data set before it is spread over clients, and the checks of a user's own data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fedray.config import IGNORED, DataConfig, TaskConfig
from fedray.data.normalization import DEFAULT, checked, of_bytes, of_choice
from fedray.data.sources.columns import Columns
from fedray.data.sources.encode import encode_clients
from fedray.data.sources.features import alike, count_samples, form_of, read_features
from fedray.data.sources.registry import SOURCES as SOURCES
from fedray.data.sources.registry import no_source
from fedray.data.sources.targets import AUTO, read_targets
from fedray.errors import UserError, near_miss
from fedray.usercode.importing import as_user_error, import_object, is_user_defined


@dataclass(frozen=True, eq=False)
class Source:
    """Training and test samples.

    * ``x_*``: the inputs, as an array [n, ...] or a tuple or dict of arrays. Images are [n, channels, height, width].
    * ``y_*``: the targets. Of a classification they are int64 [n], 0..classes-1; :mod:`fedray.core.task` says what they
      are in other tasks. ``task`` is the kind of task; ``auto`` lets it follow from the targets.
    * ``classes``: the number of classes of a sample or token; in other tasks the numbers in a target.
    * ``scale``, ``shift`` float32 [channels], or None: a model's input is float32(x) * scale + shift along axis 1,
      which for images is (x/255 - mean) / deviation. For a tuple or dict of inputs they are such a structure too.
    * ``client_*`` int64 [n]: the client that a sample belongs to, for the partition ``natural``; -1 in the test set
      means nobody.
    * ``x_public``, ``y_public``: a public set of the source's own.
    * ``class_names`` in the order of the labels, and ``client_names`` in the order of the clients' numbers; None where
      there are only numbers.
    * ``files``: for a source that comes with fedray, :func:`fedray.data.sources.find.file_stamp` of each file that it
      was read from. ``notes``: lines that the user should know.

    A user may set labels and clients to names (texts, booleans, pandas' categories), which :func:`validate` numbers.
    Labels that are floats must be whole.
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
    files: tuple[tuple[str, int, int, int, int], ...] = ()
    task: str = AUTO
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of task; a source that nobody has checked is taken for a classification."""
        return "classification" if self.task == AUTO else self.task

    @property
    def public_by_default(self) -> int:
        """The number of public samples that ``auto`` stands for: the source's own, or a tenth of the training
        samples."""
        return len(self.y_train) // 10 if self.y_public is None else len(self.y_public)


def load_source(
    name: str,
    root: str | None = None,
    normalization: str = DEFAULT,
    kind: str = AUTO,
    ignored: int = IGNORED,
    image_size: int | None = None,
    columns: Columns | None = None,
    access: str = AUTO,
    variant: str | None = None,
) -> Source:
    """Loads and checks the source ``name``: one of :data:`SOURCES`, or the user's own function.

    The user's function is named as ``file.py:function`` or ``module:function``. It is called with ``root`` if it takes
    an argument, and with ``normalization`` if it has an argument of that name, which it needs to take other values than
    "default". It returns a :class:`Source` or a dict of its fields, in which ``classes`` may be missing and is then the
    largest label + 1. ``kind`` and ``ignored`` are ``task.kind`` and ``task.ignore_index``, ``image_size`` and
    ``access`` are ``data.image_size`` and ``data.access``, ``columns`` are those that the user named, and
    ``variant`` is ``data.variant``.

    Raises :class:`UserError` for unknown names, failing imports and bad data, and for columns of a source that has
    none.
    """
    if name in SOURCES:
        loader = import_object(SOURCES[name].loader, "data.source")
    elif is_user_defined(name):
        loader = import_object(name, "data.source")
        if not callable(loader):
            raise UserError(f"data.source={name} is not a function but {type(loader).__name__}")
    else:
        raise no_source(name)
    with as_user_error(f"data.source={name} failed") if name not in SOURCES else contextlib.nullcontext():
        own = {"kind": kind, "ignored": ignored, "image_size": image_size, "access": access}
        own |= {"columns": columns or Columns(), "variant": variant}
        loaded = _call(name, loader, root, normalization, own)
    if isinstance(loaded, Source):
        # a user's function may have changed what it read from files
        return validate(loaded if name in SOURCES else replace(loaded, files=()), None, kind, ignored)
    if isinstance(loaded, Mapping):
        return from_fields(name, loaded, None, kind, ignored)
    kind = type(loaded).__name__
    raise UserError(f"data.source {name} must return a Source or a dict of its fields, not {kind}")


def source_of(data: DataConfig, task: TaskConfig) -> Source:
    """Loads and checks the source that a configuration names, as :func:`load_source` does."""
    return load_source(
        data.source, data.root, data.normalization, task.kind, task.ignore_index, data.image_size, Columns.of(data),
        data.access, data.variant,
    )  # fmt: skip


def _call(name: str, loader: Any, root: str | None, normalization: str, own: Mapping[str, Any]) -> Any:
    """Calls a loader with ``root`` and ``normalization`` as far as it takes them, and returns what it returns. fedray's
    own loaders may also take what is in ``own``."""
    taken = set(inspect.signature(loader).parameters)
    entry = SOURCES.get(name)
    if entry is not None:
        own = {**own, "variant": entry.variant(name, own["variant"])}
    elif own["variant"] is not None:
        raise UserError(f"data.variant is for sources that come with fedray, not for {name}")
    if entry is not None:
        entry.check_normalization(name, normalization)
    if entry is None and normalization != DEFAULT and "normalization" not in taken:
        raise UserError(f"data.normalization={normalization}: the source {name} takes no argument normalization")
    if (entry is None or "columns" not in taken) and (keys := own["columns"].keys_set):
        raise UserError(f"{keys[0]}: the source {name} has no columns to choose; data.source=csv and hf have")
    if (entry is None or "image_size" not in taken) and own["image_size"] is not None:
        raise UserError(f"data.image_size: the inputs of the source {name} have a size of their own")
    places = (root,) if taken - {"normalization"} else ()
    named = {"normalization": normalization, **(own if entry is not None else {})}
    loaded = loader(*places, **{key: value for key, value in named.items() if key in taken})
    if entry is None or "normalization" in taken:
        return loaded
    return replace(loaded, **of_choice(normalization, loaded.name, loaded.x_train))


def from_fields(
    name: str, given: Mapping[str, Any], where: str | None = None, kind: str = AUTO, ignored: int = IGNORED
) -> Source:
    """Returns a checked :class:`Source` from a mapping of its fields, for the task ``kind`` (``task.kind``).

    Features of type uint8 are scaled to 0..1, because they are images as a rule, unless there is a ``scale`` or
    ``shift``. Raises :class:`UserError` for whatever is wrong; its messages begin with ``where``, a file, or else with
    ``name``.
    """
    where = where or name
    known = [field.name for field in fields(Source) if field.name not in ("files", "notes")]
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
    """Returns the kind of task on which the data and the configuration agree."""
    if of_data is None or of_data == AUTO or asked in (AUTO, of_data):
        return of_data if asked == AUTO and of_data is not None else asked
    raise UserError(f"task.kind={asked}, but the data are for task.kind={of_data} ({where})")


def validate(source: Source, where: str | None = None, kind: str = AUTO, ignored: int = IGNORED) -> Source:
    """Returns ``source`` with its arrays in the dtypes that :class:`Source` promises, for the task ``kind``.

    Raises :class:`UserError`, which names array and row, for whatever is wrong. ``where`` begins the messages.
    """
    where = where or source.name
    given = {field.name: getattr(source, field.name) for field in fields(Source)}
    return _make_source(where, given, _agreed(where, source.task, kind), ignored)


def _make_source(where: str, given: dict[str, Any], kind: str, ignored: int) -> Source:
    """Checks the fields ``given`` and makes a Source of them.

    Labels and clients that are names are numbered. Without ``classes``, their number follows from the targets.
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
    # of a source that is checked again, the same is said again
    notes = tuple(dict.fromkeys((*(given.get("notes") or ()), *targets.notes)))
    scaling = checked(where, form_of(found["x_train"]), given.get("scale"), given.get("shift"))
    return Source(**{**given, **found, **scaling, "notes": notes})


def _has_part(where: str, given: Mapping[str, Any], part: str) -> bool:
    x, y = given.get(f"x_{part}"), given.get(f"y_{part}")
    if (x is None) != (y is None) or (x is None and part != "public"):
        raise UserError(f"{where} lacks {'x' if x is None else 'y'}_{part}")
    return x is not None


def _clients(where: str, given: Mapping[str, Any], names: tuple[str, ...] | None) -> dict[str, Any]:
    """Returns the fields of clients and their names, with clients as numbers."""
    train, test = given.get("client_train"), given.get("client_test")
    if train is not None:
        train, test, names = encode_clients(where, train, test, names)
    else:
        for key in ("client_test", "client_names"):
            if given.get(key) is not None:
                raise UserError(f"{where} has {key} but lacks client_train")
    return {"client_train": train, "client_test": test, "client_names": names}


def _names(where: str, key: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(map(str, given))
    if isinstance(given, str) or len(set(names)) != len(names):
        raise UserError(f"{where}: {key} must be a list of different names")
    return names
