"""Federated learning algorithms, one short file for each method.

An algorithm of this package is found by its name, a user-defined one by ``file.py:Class`` or ``module:Class``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cache
from typing import Any

from fedray.algorithms.base import Algorithm, Broadcast, Hyper, Result, Traffic, Upload, Work, in_place, parameter
from fedray.algorithms.server_state import Cohort, ServerState
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase
from fedray.config.section import in_message
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.errors import UserError, near_miss
from fedray.usercode.importing import FORMS, import_object, is_user_defined

__all__ = [
    "Algorithm", "Batch", "Broadcast", "Carry", "ClientPhase", "Cohort", "Hyper", "Model", "Result", "ServerState",
    "Traffic", "Upload", "Work", "find_algorithm", "in_place", "is_known", "known_algorithms",
    "name_of", "parameter",
]  # fmt: skip


@cache
def known_algorithms() -> dict[str, type[Algorithm]]:
    """Returns the classes of all algorithms that come with fedray, by the names that ``algorithm.name`` accepts, such
    as ``fedavg``, in alphabetical order.

    The name is the attribute ``name`` of the class if it has one, and otherwise the class's name in lower case.
    """
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            defined_here = member.__module__ == module.__name__ and not member.__name__.startswith("_")
            if defined_here and issubclass(member, Algorithm) and member is not Algorithm:
                found[member.__dict__.get("name", member.__name__.lower())] = member
    return dict(sorted(found.items()))


def is_known(algorithm: type[Algorithm]) -> bool:
    """Returns whether an algorithm's class is one that comes with fedray, not a user-defined one."""
    return algorithm in known_algorithms().values()


def name_of(algorithm: Any) -> str:
    """Returns the name of an algorithm that the user passed from Python as a class. For a class that comes with fedray,
    this is the value of the configuration's key ``algorithm.name`` that selects it, such as ``fedavg``. For any other
    class it is the attribute ``name`` that the class itself defines, or, without one, the name of the class.

    Raises:
        UserError: ``algorithm`` is not a subclass of :class:`Algorithm`.
    """
    if not (inspect.isclass(algorithm) and issubclass(algorithm, Algorithm) and algorithm is not Algorithm):
        raise UserError(
            f"algorithm= must be a subclass of fedray.algorithms.Algorithm, not {in_message(algorithm)}; its "
            "hyper-parameters are keys of the configuration, as in algorithm.mu=0.1"
        )
    known = {cls: name for name, cls in known_algorithms().items()}
    return known.get(algorithm) or str(vars(algorithm).get("name", algorithm.__name__))


def find_algorithm(name: str) -> type[Algorithm]:
    """Returns the class of an algorithm, given the value of ``algorithm.name``. A user-defined algorithm is imported.

    Args:
        name: the name of an algorithm of this package, such as ``fedavg``, or a user-defined algorithm as
            ``file.py:Class`` or ``module:Class``.

    Raises:
        UserError: there is no such algorithm, or it is not a subclass of :class:`Algorithm`.

    Example:
        fedavg = find_algorithm("fedavg")
        mine = find_algorithm("mine.py:Mine")
    """
    if is_user_defined(name):
        found = import_object(name, "algorithm.name")
        if not (inspect.isclass(found) and issubclass(found, Algorithm)):
            raise UserError(f"algorithm.name={name} is not a subclass of fedray.algorithms.Algorithm")
        return found
    known = known_algorithms()
    if name not in known:
        hint = near_miss(re.sub(r"[-\s]", "_", name.lower()), known)
        raise UserError(f"unknown algorithm {name!r}{hint}; a user-defined one is written as {FORMS}")
    return known[name]
