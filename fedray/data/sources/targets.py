"""Reads the targets of a data set in the form that its task needs, and finds the kind of task where it is not given."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedray.config import IGNORE_INDEX
from fedray.data.sources.encode import are_names, array_or_categories, encode, has_categories, whole_numbers
from fedray.errors import UserError

AUTO = "auto"

QUANTITIES = "task.kind=regression takes numbers for quantities"

MANY, FEW = 20, 5
"""More than ``MANY`` classes are taken for a mistake if they have fewer than ``FEW`` samples each on average."""

BYTES = 256
"""Labels of tokens are expected to have no gaps up to this number of classes, as those of masks. More classes are those
of a vocabulary, of which a text seldom has all words."""

LISTED = 5
"""The largest number of classes that a line names."""


class Targets(NamedTuple):
    """The checked targets of a data set's training, test and public set.

    Args:
        kind: the kind of task, such as ``classification``.
        arrays: maps each name, such as ``y_train``, to the targets: int64 ``[n]`` for ``classification`` and
            ``[n, ...]`` for ``tokens``, float32 ``[n, ...]`` for ``multilabel`` and ``regression``, and any numbers for
            ``other``.
        classes: the number of classes, if a sample or a token has a class; in other tasks, how many numbers the target
            of a sample has.
        class_names: the names of the classes, or None if they have none.
        notes: messages for the user.
    """

    kind: str
    arrays: Mapping[str, np.ndarray]
    classes: int
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...] = ()


def read_targets(
    where: str,
    given: Mapping[str, Any],
    kind: str = AUTO,
    classes: Any = None,
    names: Sequence[str] | None = None,
    ignored: int = IGNORE_INDEX,
) -> Targets:
    """Converts the targets in each set of samples, as a user or a source gives them, to the form that the task needs.

    Raises :class:`UserError`, which names array and row, for anything that is wrong.

    Args:
        where: the beginning of error messages.
        given: maps the name of each array, such as ``y_train``, to the targets in it; the training set comes first.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the first array.
        classes, names: the number and the names of the classes, or None if the user has not set them.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).
    """
    given = {key: array_or_categories(where, key, values) for key, values in given.items()}
    first, notes, asked = next(iter(given)), [], kind
    if kind == AUTO:
        kind, why = _kind_of(where, first, given[first])
        notes += [why] if why else []
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, (int, np.integer)) or classes < 1):
        raise UserError(f"{where}: classes must be a whole number of at least 1, not {classes!r}")
    if kind == "classification":
        arrays, names = encode(where, given, names)
        if asked == AUTO and classes is None and not notes:
            notes += _note_on_many(first, arrays[first], names is None)
        if names is None and classes is None:
            classes = _count_classes(where, arrays)
            notes += _note_on_gaps(arrays, classes, "sample")
        notes += _note_on_unknown(arrays, names)
        notes += _note_on_categories(given[first], arrays, names)
        counted = int(classes) if names is None else len(names)
    else:
        arrays = {key: _READERS[kind](where, key, values) for key, values in given.items()}
        shape = arrays[first].shape[1:]
        for key, y in arrays.items():
            if y.shape[1:] != shape:
                raise UserError(
                    f"{where}: targets of {key} have shape {list(y.shape[1:])}, those of {first} {list(shape)}"
                )
        counted = _outputs(arrays, kind, ignored) if classes is None else int(classes)
        if kind == "tokens" and names is None and classes is None and counted <= BYTES:
            line = f"; if {counted - 1} marks tokens that do not count, give task.ignore_index={counted - 1}"
            notes += [note + line for note in _note_on_gaps(arrays, counted, "token")]
    classes = counted if classes is None else int(classes)
    if names is not None and len(names) != classes:
        raise UserError(f"{where}: the classes have {len(names)} names, but classes is {classes}")
    if kind in ("classification", "tokens"):
        for key, y in arrays.items():
            _in_range(where, key, y, classes, ignored if kind == "tokens" else None)
    return Targets(kind, arrays, classes, None if names is None else tuple(names), tuple(notes))


def _kind_of(where: str, key: str, values: Any) -> tuple[str, str]:
    """Finds the kind of task from the targets of the array ``key``.

    Returns the kind, and a line that tells the user why ("" if the kind is obvious).
    """
    y = np.asarray(values)
    if y.dtype == object and not are_names(values):
        # whole numbers with others among them
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers = y.astype(np.float64)
            y = numbers if (numbers % 1 != 0).any() and np.isfinite(numbers).all() else y
    if (are_names(values) and y.ndim < 2) or y.dtype.kind not in "biuf" or y.ndim == 0:
        return "classification", ""
    if y.ndim == 1:
        return _kind_of_numbers(key, y)
    if y.shape[1:] == (1,) and y.dtype.kind != "f":
        raise UserError(
            f"{where}: {key} has shape {list(y.shape)}; give classes as [n] ({key}[:, 0]), or set task.kind"
        )
    shape = ", ".join(["n", *map(str, y.shape[1:])])
    binary, single = bool(((y == 0) | (y == 1)).all()), y.shape[1:] == (1,)
    if binary and y.ndim == 2 and not single:
        line = f"task.kind=multilabel, because {key} [{shape}] holds only 0 and 1"
        if not (y.sum(1) == 1).all():
            return "multilabel", f"{line}; {QUANTITIES}"
        return "multilabel", (
            f"warning: {line}. Each row has exactly one 1: if that is its class, give {key}.argmax(1), for which "
            f"task.kind=classification is right; {QUANTITIES}"
        )
    if y.dtype.kind != "f":
        return "tokens", f"task.kind=tokens, because {key} [{shape}] holds whole numbers; {QUANTITIES}"
    line = f"task.kind=regression, because {key} [{shape}] holds numbers"
    advice = []
    if single and (y == np.trunc(y)).all():
        advice.append(f"if they are classes, give them as [n] ({key}[:, 0])")
    if binary:
        advice.append("if each is a label, for which the model has one output, give task.kind=multilabel")
    what = "0 or 1" if binary else "whole"
    return "regression", f"warning: {line}. All are {what}: {'; '.join(advice)}" if advice else line


def _kind_of_numbers(key: str, y: np.ndarray) -> tuple[str, str]:
    if y.dtype.kind != "f":
        return "classification", ""
    fraction = np.isfinite(y) & (y != np.trunc(y))
    if fraction.any():
        row = int(np.argmax(fraction))
        return "regression", f"task.kind=regression, because {key} has fractions ({y[row]:g} in row {row})"
    return "classification", (
        f"warning: {key} holds whole numbers of type {y.dtype}, which are taken for {len(np.unique(y)):,} classes; "
        f"{QUANTITIES}"
    )


def _note_on_many(key: str, y: np.ndarray, numbers: bool) -> list[str]:
    """Returns a list with a warning if there are so many classes, with so few samples each, that the labels may
    be quantities.

    The list is empty otherwise.
    """
    classes = len(np.unique(y))
    if classes <= MANY or len(y) >= FEW * classes:
        return []
    hint = QUANTITIES if numbers else "are these names the labels?"
    return [f"warning: {key} has {classes:,} classes for {len(y):,} samples; {hint}"]


def _note_on_gaps(arrays: Mapping[str, np.ndarray], classes: int, what: str) -> list[str]:
    """Returns a list with a warning if no sample has some of the labels below the largest one, or else an
    empty list. ``what`` has a label: a sample or a token."""
    is_there = np.zeros(classes, np.bool_)
    for y in arrays.values():
        is_there[y[(y >= 0) & (y < classes)]] = True
    if is_there.all():
        return []
    return [
        f"warning: the largest label is {classes - 1}, so that there are {classes:,} classes, but no {what} has label "
        f"{_listed(np.flatnonzero(~is_there))}: the model has outputs for these, too, unless labels are numbered "
        "without gaps"
    ]


def _note_on_unknown(arrays: Mapping[str, np.ndarray], names: Sequence[str] | None) -> list[str]:
    """Returns a list with a warning for each set of samples that has labels that no training sample has."""
    (first, known), *others = arrays.items()
    notes = []
    for key, y in others:
        unknown = ~np.isin(y, known)
        if unknown.any():
            labels = np.unique(y[unknown])
            shown = _listed(labels if names is None else [names[label] for label in labels if label < len(names)])
            notes.append(
                f"warning: {int(unknown.sum()):,} of the {len(y):,} samples of {key} have a label that no sample of "
                f"{first} has ({shown}), so that it can't be learnt"
            )
    return notes


def _note_on_categories(given: Any, arrays: Mapping[str, np.ndarray], names: Sequence[str] | None) -> list[str]:
    """Returns a list with a warning if ``given``, a column of pandas, has categories that no sample has. They stay when
    a table is filtered."""
    if names is None or not has_categories(given):
        return []
    absent = [names[each] for each in np.setdiff1d(np.arange(len(names)), np.concatenate(list(arrays.values())))]
    if not absent:
        return []
    return [
        f"warning: no sample is of class {_listed(absent)}, as the categories of {next(iter(arrays))} have it: the "
        "model has outputs for such classes, too, unless remove_unused_categories() takes them away"
    ]


def _listed(labels: Any) -> str:
    shown = ", ".join(map(str, labels[:LISTED]))
    return f"{shown} and {len(labels) - LISTED:,} others" if len(labels) > LISTED else shown


def _numbers(where: str, key: str, values: Any) -> np.ndarray:
    """Returns ``values`` as float32. Raises :class:`UserError` for NaN, infinities and anything but numbers."""
    y = np.asarray(values)
    if y.dtype.kind == "O":
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{where}: {key} must hold numbers") from None
    if y.dtype.kind not in "biuf" or y.ndim == 0:
        raise UserError(f"{where}: {key} must hold numbers, not {y.dtype}")
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(y, dtype=np.float32)
    finite = np.isfinite(found).reshape(len(found), -1).all(axis=1)
    if not finite.all():
        row, rows = int(np.argmin(finite)), int(np.count_nonzero(~finite))
        raise UserError(f"{where}: {key} has a target that is no finite number in row {row} ({rows} such rows)")
    return found


def _labels(where: str, key: str, values: Any) -> np.ndarray:
    found = _numbers(where, key, values)
    wrong = ((found != 0) & (found != 1)).reshape(len(found), -1)
    if wrong.any():
        row = int(np.argmax(wrong.any(axis=1)))
        value = found[row].reshape(-1)[int(np.argmax(wrong[row]))]
        raise UserError(f"{where}: {key} has {value:g} in row {row}; the labels of task.kind=multilabel are 0 or 1")
    if found.ndim < 2:
        raise UserError(f"{where}: {key} has shape {list(found.shape)}; task.kind=multilabel needs [n, labels]")
    return found


def _tokens(where: str, key: str, values: Any) -> np.ndarray:
    y = np.asarray(values)
    if y.ndim < 2:
        raise UserError(
            f"{where}: {key} has shape {list(y.shape)}; task.kind=tokens needs [n, ...], a target per token"
        )
    fraction = (y != np.trunc(y)) if y.dtype.kind == "f" else np.zeros(y.shape, np.bool_)
    if fraction.any():
        place = np.unravel_index(int(np.argmax(fraction)), y.shape)
        raise UserError(f"{where}: {key} must hold whole numbers, not {y[place]:g} as in row {int(place[0])}")
    return whole_numbers(where, key, y.reshape(-1)).reshape(y.shape)


def _anything(where: str, key: str, values: Any) -> np.ndarray:
    y = np.asarray(values)
    if y.dtype.kind not in "biufc" or y.ndim == 0:
        raise UserError(f"{where}: {key} must hold numbers, not {y.dtype}")
    kinds: dict[str, Any] = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32, "c": np.complex64}
    return np.ascontiguousarray(y, dtype=kinds[y.dtype.kind])


_READERS = {"multilabel": _labels, "regression": _numbers, "tokens": _tokens, "other": _anything}


def _outputs(arrays: Mapping[str, np.ndarray], kind: str, ignored: int) -> int:
    """Returns the number of classes of a token, or in other tasks how many numbers a target has."""
    first = next(iter(arrays.values()))
    if kind == "tokens" or (kind == "other" and first.dtype == np.int64 and first.ndim == 1):
        return max(1, 1 + max(int(np.where(y == ignored, -1, y).max(initial=0)) for y in arrays.values()))
    return int(np.prod(first.shape[1:], dtype=np.int64))


def _count_classes(where: str, labels: Mapping[str, np.ndarray]) -> int:
    """Returns the number of classes, which is the largest label + 1.

    Raises :class:`UserError` if this is probably a mistake, because the model would get too many outputs: for a label
    that is larger than the number of samples, and for labels that begin at 1.
    """
    for key, y in labels.items():
        _in_range(where, key, y)
    name = max(labels, key=lambda key: int(labels[key].max(initial=0)))
    largest, samples = int(labels[name].max(initial=0)), sum(map(len, labels.values()))
    if largest >= max(samples, 2):
        raise UserError(
            f"{where}: {name} has label {largest} in row {int(labels[name].argmax())}, but there are {samples} samples "
            f"in all; labels must be 0..classes-1, and {QUANTITIES}"
        )
    if largest > 1 and min(int(y.min(initial=largest)) for y in labels.values()) == 1:
        raise UserError(
            f"{where}: the labels of {' and '.join(labels)} start at 1: subtract 1, so that they are 0..{largest - 1}"
        )
    return largest + 1


def _in_range(where: str, name: str, y: np.ndarray, classes: int | None = None, ignored: int | None = None) -> None:
    bad = (y < 0) | (y >= classes) if classes is not None else y < 0
    if ignored is not None:
        bad &= y != ignored
    if bad.any():
        place = np.unravel_index(int(np.argmax(bad)), y.shape)
        row, label = int(place[0]), y[place]
        known = f"0..{classes - 1}" if classes is not None else f"0, 1, 2, ..., and {QUANTITIES}"
        hint = " (they start at 1: subtract 1)" if y.min() == 1 and y.max() == classes else ""
        hint = hint if ignored is None else f", or task.ignore_index={ignored} for tokens that do not count"
        raise UserError(f"{where}: {name} has label {label} in row {row}; labels must be {known}{hint}")
