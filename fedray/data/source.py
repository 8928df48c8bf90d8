"""A data set before it is spread over clients, the checks of a user's own data, and the list of sources."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fedray.data.encode import encode_clients, encode_labels
from fedray.errors import UserError, near_miss
from fedray.importing import FORMS, as_user_error, import_object, is_own

DEFAULT = "default"
"""The value of ``data.normalization`` unless it is set."""


@dataclass(frozen=True, eq=False)
class Source:
    """Training and test samples with labels 0..classes-1.

    * ``x_*`` [n, ...] uint8 or float32, where images are [n, channels, height, width]; ``y_*`` int64 [n].
    * ``scale``, ``shift`` float32 [channels], or None: a model's input is float32(x) * scale + shift along axis 1,
      which for images is (x/255 - mean) / deviation.
    * ``client_*`` int64 [n]: the client that a sample belongs to, for the partition ``natural``; -1 in the test set
      means nobody.
    * ``x_public``, ``y_public``: a public set of the source's own.
    * ``class_names`` in the order of the labels, and ``client_names`` in the order of the clients' numbers; None where
      there are only numbers.
    * ``files``: for a source that comes with fedray, :func:`fedray.data.find.file_stamp` of each file that it was read
      from.

    A user may set labels and clients to names (texts, booleans, pandas' categories), which :func:`validate` numbers.
    Labels that are floats must be whole.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    x_public: np.ndarray | None = None
    y_public: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None
    client_names: tuple[str, ...] | None = None
    files: tuple[tuple[str, int, int, int, int], ...] = ()

    @property
    def public_by_default(self) -> int:
        """The number of public samples that ``auto`` stands for: the source's own, or a tenth of the training
        samples."""
        return len(self.y_train) // 10 if self.y_public is None else len(self.y_public)


class SourceEntry(NamedTuple):
    """A source that comes with fedray.

    ``loader`` is its function as ``module:function``, which is imported when it is used. ``about`` says what the data
    are. ``normalizations`` are the values of ``data.normalization`` that it takes, each with a line about it.
    """

    loader: str
    about: str
    licence: str
    normalizations: Mapping[str, str] = {DEFAULT: "mean and deviation of its own training samples"}


SOURCES = {
    "sample": SourceEntry(
        "fedray.data.idx:sample",
        "Fashion-MNIST cut down to 10,000 + 2,000 images of 28x28, balanced; inside the package",
        "MIT, Zalando SE 2017",
    ),
    "mnist": SourceEntry(
        "fedray.data.idx:mnist",
        "MNIST: 60,000 + 10,000 handwritten digits of 28x28 (LeCun et al. 1998)",
        "no formal licence; free for research",
    ),
    "fashion_mnist": SourceEntry(
        "fedray.data.idx:fashion_mnist",
        "Fashion-MNIST: 60,000 + 10,000 pictures of clothes of 28x28, 10 classes (Xiao et al. 2017)",
        "MIT, Zalando SE 2017",
    ),
    "cifar10": SourceEntry(
        "fedray.data.cifar:cifar10",
        "CIFAR-10: 50,000 + 10,000 colour photographs of 32x32, 10 classes (Krizhevsky 2009)",
        "no formal licence; free for research",
        {
            DEFAULT: "mean and deviation of its own training samples",
            "ghbm": "the deviations 0.2023, 0.1994, 0.2010 of GHBM's code, for its tables",
        },
    ),
    "npz": SourceEntry(
        "fedray.data.npz:npz",
        "a file of your own (data.root): x_train, y_train, x_test, y_test, optional client_train, x_public, ...",
        "yours",
    ),
}


def load_source(name: str, root: str | None = None, normalization: str = DEFAULT) -> Source:
    """Loads and checks the source ``name``: one of :data:`SOURCES`, or the user's own function.

    The user's function is named as ``file.py:function`` or ``module:function``. It is called with ``root`` if it takes
    an argument, and with ``normalization`` if it has an argument of that name, which it needs to take other values than
    "default". It returns a :class:`Source` or a dict of its fields, in which ``classes`` may be missing and is then the
    largest label + 1.

    Raises :class:`UserError` for unknown names, failing imports and bad data.
    """
    if name in SOURCES:
        loader = import_object(SOURCES[name].loader, "data.source")
    elif is_own(name):
        loader = import_object(name, "data.source")
        if not callable(loader):
            raise UserError(f"data.source={name} is not a function but {type(loader).__name__}")
    else:
        close = near_miss(name, SOURCES)
        raise UserError(f"data.source: there is no source {name!r}{close}; your own is given as {FORMS}")
    with as_user_error(f"data.source={name} failed") if name not in SOURCES else contextlib.nullcontext():
        loaded = _call(name, loader, root, normalization)
    if isinstance(loaded, Source):
        # a user's function may have changed what it read from files
        return validate(loaded if name in SOURCES else replace(loaded, files=()))
    if isinstance(loaded, Mapping):
        return from_fields(name, loaded)
    kind = type(loaded).__name__
    raise UserError(f"data.source {name} must return a Source or a dict of its fields, not {kind}")


def _call(name: str, loader: Any, root: str | None, normalization: str) -> Any:
    """Calls a loader with ``root`` and ``normalization`` as far as it takes them, and returns what it returns."""
    taken = set(inspect.signature(loader).parameters)
    entry = SOURCES.get(name)
    if entry is not None and normalization not in entry.normalizations:
        hint = near_miss(normalization, entry.normalizations)
        raise UserError(f"data.normalization: the source {name} has no {normalization!r}{hint}")
    if normalization != DEFAULT and "normalization" not in taken:
        raise UserError(f"data.normalization={normalization}: the source {name} takes no argument normalization")
    places = (root,) if taken - {"normalization"} else ()
    return loader(*places, **({"normalization": normalization} if "normalization" in taken else {}))


def from_fields(name: str, given: Mapping[str, Any], where: str | None = None) -> Source:
    """Returns a checked :class:`Source` from a mapping of its fields.

    Features of type uint8 are scaled to 0..1, because they are images as a rule, unless there is a ``scale`` or
    ``shift``. Raises :class:`UserError` for whatever is wrong; its messages begin with ``where``, a file, or else with
    ``name``.
    """
    where = where or name
    known = [field.name for field in fields(Source) if field.name != "files"]
    for key in given:
        if key not in known:
            raise UserError(f"{where}: unknown field {key!r}{near_miss(str(key), known)}")
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if given.get(key) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    source = _make_source(where, {"name": name, **given})
    shape = source.x_train.shape[1:]
    if source.x_train.dtype == np.uint8 and source.scale is None and source.shift is None:
        return replace(source, **_normalisation(where, {"scale": np.full(shape[0], 1 / 255)}, shape))
    return source


def validate(source: Source, where: str | None = None) -> Source:
    """Returns ``source`` with its arrays in the dtypes that :class:`Source` promises.

    Raises :class:`UserError`, which names array and row, for whatever is wrong. ``where`` begins the messages.
    """
    return _make_source(where or source.name, {field.name: getattr(source, field.name) for field in fields(Source)})


def _make_source(where: str, given: dict[str, Any]) -> Source:
    """Checks the fields ``given`` and makes a Source of them.

    Labels and clients that are names are numbered. Without ``classes``, their number follows from the labels.
    """
    parts = [part for part in ("train", "test", "public") if _has_part(where, given, part)]
    given = {**given, **_encode(where, given, parts)}
    if given.get("classes") is None:
        labels = {f"y_{part}": given[f"y_{part}"] for part in parts}
        given["classes"] = len(given["class_names"]) if given["class_names"] else _count_classes(where, labels)
    classes = given["classes"]
    if isinstance(classes, bool) or not isinstance(classes, (int, np.integer)) or classes < 1:
        raise UserError(f"{where}: classes must be a whole number of at least 1, not {classes!r}")
    if given["class_names"] is not None and len(given["class_names"]) != classes:
        raise UserError(f"{where}: the classes have {len(given['class_names'])} names, but classes is {classes}")
    x_train = given["x_train"] = _features(where, "x_train", given["x_train"])
    for part in parts:
        x = given[f"x_{part}"] = _features(where, f"x_{part}", given[f"x_{part}"])
        if x.shape[1:] != x_train.shape[1:]:
            raise UserError(
                f"{where}: samples of x_{part} have shape {list(x.shape[1:])}, those of x_train "
                f"{list(x_train.shape[1:])}"
            )
        if x.dtype != x_train.dtype:
            raise UserError(f"{where}: x_{part} is {x.dtype}, x_train {x_train.dtype}; they must be alike")
        for key in (f"y_{part}", f"client_{part}"):
            if given.get(key) is not None:
                _same_length(where, f"x_{part}", x, key, given[key])
        _in_range(where, f"y_{part}", given[f"y_{part}"], int(classes))
    return Source(**{**given, "classes": int(classes), **_normalisation(where, given, x_train.shape[1:])})


def _has_part(where: str, given: Mapping[str, Any], part: str) -> bool:
    x, y = given.get(f"x_{part}"), given.get(f"y_{part}")
    if (x is None) != (y is None) or (x is None and part != "public"):
        raise UserError(f"{where} lacks {'x' if x is None else 'y'}_{part}")
    return x is not None


def _encode(where: str, given: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    """Returns the fields of labels, clients and their names, with labels and clients as numbers."""
    names = {key: _names(where, key, given.get(key)) for key in ("class_names", "client_names")}
    found: dict[str, Any]
    found, class_names = encode_labels(where, {f"y_{part}": given[f"y_{part}"] for part in parts}, names["class_names"])
    train, test, client_names = given.get("client_train"), given.get("client_test"), names["client_names"]
    if train is None:
        for key in ("client_test", "client_names"):
            if given.get(key) is not None:
                raise UserError(f"{where} has {key} but lacks client_train")
    else:
        train, test, client_names = encode_clients(where, train, test, client_names)
    clients = {"client_train": train, "client_test": test, "client_names": client_names}
    return {**found, **clients, "class_names": class_names}


def _names(where: str, key: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(map(str, given))
    if isinstance(given, str) or len(set(names)) != len(names):
        raise UserError(f"{where}: {key} must be a list of different names")
    return names


def _count_classes(where: str, labels: Mapping[str, np.ndarray]) -> int:
    """Returns the number of classes, which is the largest label + 1.

    Raises :class:`UserError` where that is a mistake, so that the model would have too many outputs: for a label that
    is larger than the number of samples, and for labels that begin at 1.
    """
    for key, y in labels.items():
        _in_range(where, key, y)
    name = max(labels, key=lambda key: int(labels[key].max(initial=0)))
    largest, samples = int(labels[name].max(initial=0)), sum(map(len, labels.values()))
    if largest >= max(samples, 2):
        raise UserError(
            f"{where}: {name} has label {largest} in row {int(labels[name].argmax())}, but there are {samples} samples "
            "in all; labels must be 0..classes-1"
        )
    if largest > 1 and min(int(y.min(initial=largest)) for y in labels.values()) == 1:
        raise UserError(
            f"{where}: the labels of {' and '.join(labels)} start at 1: subtract 1, so that they are 0..{largest - 1}"
        )
    return largest + 1


def _in_range(where: str, name: str, y: np.ndarray, classes: int | None = None) -> None:
    bad = (y < 0) | (y >= classes) if classes is not None else y < 0
    if bad.any():
        row = int(np.argmax(bad))
        known = f"0..{classes - 1}" if classes is not None else "0, 1, 2, ..."
        hint = " (they start at 1: subtract 1)" if y.min() == 1 and y.max() == classes else ""
        raise UserError(f"{where}: {name} has label {y[row]} in row {row}; labels must be {known}{hint}")


def stack_samples(unit: str, name: str, samples: Iterable[Any]) -> np.ndarray:
    """Returns the samples as one array.

    Raises :class:`UserError`, which names the first sample that is unlike sample 0, as ``unit`` (item, row) of
    ``name``.
    """
    arrays = [np.asarray(sample) for sample in samples]
    first = arrays[0]
    for number, array in enumerate(arrays):
        if array.shape != first.shape:
            raise UserError(
                f"{unit} {number} of {name} has shape {list(array.shape)}, the first one {list(first.shape)}; all "
                "must be equally large"
            )
        if array.dtype != first.dtype:
            raise UserError(f"{unit} {number} of {name} is {array.dtype}, the first one {first.dtype}; make them alike")
    return np.stack(arrays)


def _same_length(where: str, first: str, a: np.ndarray, second: str, b: np.ndarray) -> None:
    if len(a) != len(b):
        raise UserError(f"{where}: {first} has {len(a)} samples and {second} {len(b)}; they must be equally many")


def _features(where: str, name: str, x: Any) -> np.ndarray:
    with as_user_error(f"{where}: {name} can't be read as an array"):
        try:
            x = np.asarray(x)
        except ValueError:  # samples of unequal shapes
            x = stack_samples(f"{where}: row", name, x)
    if x.dtype == np.float64 or x.dtype == np.float16:
        # a number that is too large for float32 becomes infinite, which is refused below
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    if x.dtype not in (np.uint8, np.float32):
        raise UserError(f"{where}: {name} is of type {x.dtype}; features must be float32 or uint8")
    if x.ndim < 2:
        raise UserError(f"{where}: {name} has shape {list(x.shape)}; features must be [samples, ...]")
    if not x.size:
        raise UserError(f"{where}: {name} is empty (shape {list(x.shape)})")
    if x.dtype == np.float32:
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            what = "NaN" if np.isnan(x[row]).any() else "an infinite number"
            raise UserError(f"{where}: {name} has {what} in row {row} ({int((~finite).sum())} such rows)")
    return np.ascontiguousarray(x)


def _normalisation(where: str, fields: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    if fields.get("scale") is None and fields.get("shift") is None:
        return {}
    given: dict[str, Any] = {}
    for key, default in (("scale", 1.0), ("shift", 0.0)):
        value = fields.get(key)
        array = np.full(shape[0], default) if value is None else np.asarray(value)
        if array.shape != (shape[0],) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise UserError(f"{where}: {key} must be {shape[0]} finite numbers, one per channel (axis 1 of x)")
        given[key] = array.astype(np.float32)
    return given
