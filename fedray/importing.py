"""Objects of the user's own modules, named ``module:attribute`` in a config."""

from __future__ import annotations

import importlib
from typing import Any

from fedray.errors import UserError, near_miss


def import_object(name: str, key: str) -> Any:
    """What ``module:attribute`` names; a :class:`UserError` that names the config's ``key`` if there is no such thing."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UserError(f"{key}={name}: there is no module {module_name!r} on the import path") from None
        raise
    except ValueError:
        raise UserError(f"{key}={name} is not of the form module:Name") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = near_miss(attribute, [n for n in vars(module) if not n.startswith("_")])
        raise UserError(f"{key}={name}: module {module_name} has no {attribute!r}{hint}") from None
