"""The form of the answers of the stages of :func:`fedray.experiment.resolve.resolve`, and helpers for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The base class of the results of stages. A configuration is resolved in stages, each of which decides
    the values of some keys.

    ``settings`` has these keys in dotted form, such as ``train.weighting``, with their values in the resolved
    configuration. ``notes`` are lines for the user.
    """

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def with_settings(section: S, settings: Mapping[str, Any]) -> S:
    """Returns a copy of ``section``, a configuration or a section of it, in which some keys have the values in
    ``settings``.

    A dotted key in ``settings`` stands for a key of an inner section: ``train.lr`` if ``section`` is the whole
    configuration.
    """
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, dot, rest = key.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = value
        else:
            changed[name] = value
    changed |= {name: with_settings(getattr(section, name), inner) for name, inner in below.items()}
    return section.model_copy(update=changed)


def defaults_for_nulls(section: BaseModel, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that take the place of null in ``section``: the entries of ``defaults`` whose keys are
    null there."""
    return {name: value for name, value in defaults.items() if getattr(section, name) is None}


def under(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` with ``section`` and a dot in front of each key: ``train.lr`` for ``lr`` in the
    section ``train``."""
    return {f"{section}.{name}": value for name, value in values.items()}
