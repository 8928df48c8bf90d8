"""What the stages of :func:`fedray.experiment.resolve.resolve` have in common: the form of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The answer of a stage.

    ``settings`` are the keys of the configuration that it has decided, dotted, with the values that the resolved
    configuration has for them. ``notes`` are lines for the user.
    """

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def with_settings(section: S, settings: Mapping[str, Any]) -> S:
    """Returns a section with other values for some of its keys, which are dotted where they are of a section in it."""
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
    """Returns those of the ``defaults`` whose keys are null in ``section``."""
    return {name: value for name, value in defaults.items() if getattr(section, name) is None}


def under(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` with keys that begin with the name of their section."""
    return {f"{section}.{name}": value for name, value in values.items()}
