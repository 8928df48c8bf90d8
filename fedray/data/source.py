"""A data set before it is spread over clients, the check of a user's own, and the registry of sources."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fedray.errors import UserError, near_miss
from fedray.importing import FORMS, blamed, import_object, is_own


@dataclass(frozen=True, eq=False)
class Source:
    """Training and test samples with labels 0..classes-1.

    ``x_*`` are [n, ...] uint8 or float32 (images [n, channels, height, width]), ``y_*`` [n] int64. A model's input is
    float32(x) * scale + shift along axis 1, (x/255 - mean)/std for images; ``scale`` and ``shift`` are float32
    [channels] or None. ``client_*`` [n] int64 say to whom a sample belongs (partition kind natural); ``x_public`` is a
    public set of its own. ``files``: of a source of fedray's own, :func:`fedray.data.find.stamp` of each file that
    it was read from.
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
    files: tuple[tuple[str, int, int, int, int], ...] = ()


class SourceEntry(NamedTuple):
    """A source by name: its loader as ``module:function`` (imported when used), what it is, and its terms."""

    loader: str
    about: str
    licence: str


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
    ),
    "npz": SourceEntry(
        "fedray.data.npz:npz",
        "a file of your own (data.root): x_train, y_train, x_test, y_test, optional client_train, x_public, ...",
        "yours",
    ),
}


def load_source(name: str, root: str | None = None) -> Source:
    """The checked source called ``name``: one of :data:`SOURCES`, or the user's own, ``file.py:function`` or
    ``module:function``.

    The function is called with ``root`` if it takes an argument; it returns a :class:`Source` or a dict of its fields
    (``classes`` may be left out: the largest label + 1). UserError for unknown names, failing imports and bad data.
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
    with blamed(f"data.source={name} failed") if name not in SOURCES else contextlib.nullcontext():
        loaded = loader(root) if inspect.signature(loader).parameters else loader()
    if isinstance(loaded, Source):
        # a function of the user's may have changed what it read from files
        return validate(loaded if name in SOURCES else replace(loaded, files=()))
    if isinstance(loaded, Mapping):
        return from_fields(name, loaded)
    kind = type(loaded).__name__
    raise UserError(f"data.source {name} must return a Source or a dict of its fields, not {kind}")


def from_fields(name: str, given: Mapping[str, Any], where: str | None = None) -> Source:
    """A checked Source from a mapping of its fields; ``where`` (a file) begins the messages instead of ``name``."""
    where = where or name
    known = [field.name for field in fields(Source) if field.name != "files"]
    for key in given:
        if key not in known:
            raise UserError(f"{where}: unknown field {key!r}{near_miss(str(key), known)}")
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if given.get(key) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    if given.get("classes") is None:
        given = {**given, "classes": _classes(where, given)}
    return validate(Source(**{"name": name, **given}), where)


def _classes(where: str, given: Mapping[str, Any]) -> int:
    """The largest label + 1; a stray label would make a model of as many outputs."""
    present = [key for key in ("y_train", "y_test", "y_public") if given.get(key) is not None]
    labels = {key: _labels(where, key, given[key]) for key in present}
    name = max(labels, key=lambda key: int(labels[key].max(initial=0)))
    largest, samples = int(labels[name].max(initial=0)), sum(map(len, labels.values()))
    if largest >= max(samples, 2):
        raise UserError(
            f"{where}: {name} has label {largest} in row {int(labels[name].argmax())}, but there are {samples} samples "
            "in all; labels must be 0..classes-1"
        )
    return largest + 1


def validate(source: Source, where: str | None = None) -> Source:
    """``source`` with its arrays in the promised dtypes; UserError, naming array and row, for whatever is wrong."""
    where = where or source.name
    if isinstance(source.classes, bool) or not isinstance(source.classes, (int, np.integer)) or source.classes < 1:
        raise UserError(f"{where}: classes must be a whole number of at least 1, not {source.classes!r}")
    checked: dict[str, Any] = {"classes": int(source.classes)}
    shape = None
    for part in ("train", "test", "public"):
        x, y, owners = (getattr(source, f"{key}_{part}", None) for key in ("x", "y", "client"))
        if part == "public" and x is None and y is None:
            continue
        if x is None or y is None:
            lacking = "x" if x is None else "y"
            raise UserError(f"{where} lacks {lacking}_{part}")
        x, y = _features(where, f"x_{part}", x), _labels(where, f"y_{part}", y, source.classes)
        shape = shape or x.shape[1:]
        if x.shape[1:] != shape:
            raise UserError(
                f"{where}: samples of x_{part} have shape {list(x.shape[1:])}, those of x_train {list(shape)}"
            )
        if x.dtype != checked.get("x_train", x).dtype:
            raise UserError(f"{where}: x_{part} is {x.dtype}, x_train {checked['x_train'].dtype}; they must be alike")
        _same_length(where, f"x_{part}", x, f"y_{part}", y)
        checked |= {f"x_{part}": x, f"y_{part}": y}
        if owners is not None:
            owners = _integers(where, f"client_{part}", owners)
            _same_length(where, f"x_{part}", x, f"client_{part}", owners)
            checked[f"client_{part}"] = owners
    if source.client_test is not None and source.client_train is None:
        raise UserError(f"{where} has client_test but lacks client_train")
    assert shape is not None
    return replace(source, **checked, **_normalisation(where, source, shape))


def _same_length(where: str, first: str, a: np.ndarray, second: str, b: np.ndarray) -> None:
    if len(a) != len(b):
        raise UserError(f"{where}: {first} has {len(a)} samples and {second} {len(b)}; they must be equally many")


def _features(where: str, name: str, x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype == np.float64 or x.dtype == np.float16:
        # a number beyond float32 becomes inf, which is refused below
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


def _integers(where: str, name: str, values: Any) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        cast = f"; cast them: {name}.astype('int64')" if values.dtype.kind == "f" else ""
        raise UserError(f"{where}: {name} must hold whole numbers, not {values.dtype}{cast}")
    if values.ndim != 1:
        raise UserError(f"{where}: {name} must hold one number per sample (shape [n]), not shape {list(values.shape)}")
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{where}: {name} has a number beyond int64 in row {int(values.argmax())}")
    return np.ascontiguousarray(values, dtype=np.int64)


def _labels(where: str, name: str, y: Any, classes: int | None = None) -> np.ndarray:
    y = _integers(where, name, y)
    bad = (y < 0) | (y >= classes) if classes is not None else y < 0
    if bad.any():
        row = int(np.argmax(bad))
        known = f"0..{classes - 1}" if classes is not None else "0, 1, 2, ..."
        raise UserError(f"{where}: {name} has label {y[row]} in row {row}; labels must be {known}")
    return y


def _normalisation(where: str, source: Source, shape: tuple[int, ...]) -> dict[str, Any]:
    if source.scale is None and source.shift is None:
        return {}
    given: dict[str, Any] = {}
    for key, default in (("scale", 1.0), ("shift", 0.0)):
        value = getattr(source, key)
        array = np.full(shape[0], default) if value is None else np.asarray(value)
        if array.shape != (shape[0],) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise UserError(f"{where}: {key} must be {shape[0]} finite numbers, one per channel (axis 1 of x)")
        given[key] = array.astype(np.float32)
    return given
