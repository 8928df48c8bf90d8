"""Checks what a phase of an algorithm returns, so that a mistake raises an error instead of giving wrong results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fedray.algorithms import Algorithm, Result
from fedray.core.vectors import Layout, Model, row_of
from fedray.engine.state.widths import state_widths
from fedray.errors import UserError


class Form(NamedTuple):
    """The form of a value that a phase of an algorithm (a part of a round) returned for a stack, clients that are
    trained together. ``kind`` is a text for messages, such as ``weighted_mean of a model``, and ``shape`` is the
    value's shape without the first dimension, the clients."""

    kind: str
    shape: tuple[int, ...]


Forms = Mapping[str, Form]
"""The form of each value that a phase returned. The keys are the values' names in messages, such as ``uploads['y']``.
All stacks of a phase must return values of the same forms."""


def checked_forms(result: Result, algorithm: Algorithm, phase: str, clients: int, layout: Layout) -> dict[str, Form]:
    """Checks the ``result`` that an algorithm's phase has returned for ``clients`` clients that were trained together.
    ``phase`` is the name of the algorithm's method for the phase. ``layout`` says how many numbers a model has, and how
    many of these are parameters. Returns a dict that maps the name of each value, such as ``uploads['y']``, to its
    form, which is its kind and shape.

    Raises :class:`UserError`, which names the algorithm, the phase and the value, if a value does not have one row for
    each client, or contradicts what the algorithm declares.
    """
    where = f"{type(algorithm).__name__}.{phase}"
    if not isinstance(result, Result):
        raise UserError(f"{where} must return a Result, not {type(result).__name__}")
    forms = {}
    for key, value, kind in things_of(result):
        row = row_of(value)
        shape = tuple(getattr(row, "shape", ()))
        if not shape or shape[0] != clients:
            raise UserError(
                f"{where}: {key} must have one row for each of the stack's clients ({clients}), but has shape "
                f"{list(shape)}"
            )
        if key.startswith("uploads") and row.dtype is not torch.float32:
            raise UserError(f"{where}: {key} must be float32, not {str(row.dtype).removeprefix('torch.')}: .float()")
        forms[key] = Form(kind + ("model" if isinstance(value, Model) else "tensor"), shape[1:])
    _check_state(result.state, algorithm, where, layout)
    return forms


def check_same_forms(found: Forms | None, before: Forms | None, algorithm: Algorithm, phase: str) -> None:
    """Checks that a phase of an algorithm returns values of the same kinds and shapes for all clients. ``found`` has
    the forms of the values for some clients, and ``before`` those for clients that were trained earlier; if one of them
    is None, nothing is checked. ``phase`` is the name of the phase. Raises :class:`UserError` if the forms differ."""
    if before is None or found is None or found == before:
        return
    where = f"{type(algorithm).__name__}.{phase}"
    for key in [*before, *found]:
        one, other = before.get(key), found.get(key)
        if one != other:
            raise UserError(
                f"{where} must return the same for all clients, but {key} is {_text(one)} for some and {_text(other)} "
                "for others"
            )


def things_of(result: Result) -> Iterator[tuple[str, Any, str]]:
    """Yields the values that a phase has returned in ``result``, each as its name in messages, such as
    ``uploads['y']``, the value, and for an upload how it is summed, such as ``weighted_mean of a ``."""
    for name, upload in result.uploads.items():
        yield f"uploads[{name!r}]", upload.value, f"{upload.weights} of a "
        if upload.scale is not None:
            yield f"the scale of uploads[{name!r}]", upload.scale, ""
    for part in ("state", "scalars", "kept"):
        for name, value in getattr(result, part).items():
            yield f"{part}[{name!r}]", value, ""


def _check_state(state: Mapping[str, Any], algorithm: Algorithm, where: str, layout: Layout) -> None:
    declared = dict.fromkeys(algorithm.client_state, "client_state")
    declared |= dict.fromkeys(algorithm.client_models, "client_models")
    declared |= dict.fromkeys(algorithm.client_numbers, "client_numbers")
    widths = state_widths(algorithm, layout)
    for name, value in state.items():
        if name not in declared:
            raise UserError(
                f"{where}: state[{name!r}] is not declared in client_state, client_models or client_numbers"
            )
        if isinstance(value, Model) != (declared[name] == "client_models"):
            kind = "a Model" if isinstance(value, Model) else "a tensor"
            raise UserError(f"{where}: state[{name!r}] is {kind}, but is declared in {declared[name]}")
        width = widths[name]
        found = row_of(value).shape[1:]
        if tuple(found) != (width,):
            raise UserError(f"{where}: state[{name!r}] must be [C, {width}], but is [C, {', '.join(map(str, found))}]")
    for name in declared if state else ():
        if name not in state:
            raise UserError(f"{where}: state[{name!r}] is missing; a phase returns all of a client's state, or none")


def _text(form: Form | None) -> str:
    if form is None:
        return "missing"
    return f"{form.kind} [{', '.join(['C', *map(str, form.shape)])}]"
