"""The base class of all sections of the configuration, such as ``train``, and the types of numbers that keys can
have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real as Number
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedray.util.files import in_home

Auto = Literal["auto"]


def _whole(value: Any) -> Any:
    """Turns a float without a fraction into a whole number, because 1000.0 and 1e3 mean 1000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_whole), BeforeValidator(_not_bool)]
Natural = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Real = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_not_bool)]


def _reached(value: Any) -> Any:
    """Checks a number, or a mapping from columns of metrics.csv to numbers."""
    form, numbers = "must be a number, or {column: number, ...}", [value]
    if isinstance(value, Mapping):
        if not value or not all(isinstance(column, str) for column in value):
            raise ValueError(f"{form}, not {dict(value)}")
        numbers = list(value.values())
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Number) or not math.isfinite(number):
            raise ValueError(f"{form}, not {in_message(number)}")
    return {column: float(number) for column, number in value.items()} if isinstance(value, Mapping) else float(value)


Reached = Annotated[Real | dict[str, Real], BeforeValidator(_reached)]
"""A value of the main metric, or values of columns of metrics.csv by their names."""


def at_home(value: Any) -> Any:
    """Returns the value of a key that names a file or folder, or maps such names to shares, with the user's home folder
    in place of a ``~`` at the beginning."""
    if isinstance(value, Mapping):
        return {at_home(name): share for name, share in value.items()}
    return str(in_home(value)) if isinstance(value, str) and value.startswith("~") else value


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Returns whether a key of the configuration is a section, such as ``train``, which has further keys below it, and
    not a single value. ``annotation`` is the type of the key in the class of its section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def in_message(value: Any) -> str:
    """Returns the value of a key as a text for error messages. It is written about as in YAML, such as ``true`` or
    ``'text'``; None is "nothing", and a mapping is "a section". Only the first 60 characters of a long text are
    shown."""
    text = str(value).lower() if value is None or isinstance(value, bool) else repr(value)
    text = "a section" if isinstance(value, (Mapping, BaseModel)) else {"none": "nothing"}.get(text, text)
    return text if len(text) <= 60 else text[:60] + "..."


class Section(BaseModel):
    """The base class of the sections of the configuration, such as ``train``. A section is a pydantic model whose
    fields are the keys, with their types, ranges, defaults and descriptions. It can't be changed, and an unknown key is
    an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, values: Any) -> Any:
        """Removes sections that are null, because `train:` with nothing below it means an empty section."""
        if not isinstance(values, Mapping):
            return values
        sections = {key for key, field in cls.model_fields.items() if is_section(field.annotation)}
        return {key: value for key, value in values.items() if not (value is None and key in sections)}
