"""The form of the answers of the stages of :func:`fedray.experiment.resolve.resolve`, and helpers for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The answer of a stage.

    ``settings`` has the values in the resolved configuration of the keys that the stage decides, by dotted key.
    ``notes`` are lines for the user.
    """

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def with_settings(section: S, settings: Mapping[str, Any]) -> S:
    """Returns a section with some values replaced. Dotted keys in ``settings`` are keys of sections within it."""
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
    """Returns the ``defaults`` of those keys that are null in ``section``."""
    return {name: value for name, value in defaults.items() if getattr(section, name) is None}


def under(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` with the name of their ``section`` in front of each key."""
    return {f"{section}.{name}": value for name, value in values.items()}
