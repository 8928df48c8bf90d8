"""A dict that says which names it has."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from fedray.errors import near_miss

T = TypeVar("T")


class Named(dict[str, T]):
    """A dict whose KeyError names the key that was probably meant, or all keys."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"there is no {name!r}{near_miss(name, self)}")
