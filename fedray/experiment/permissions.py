"""What an algorithm or a selection allows only if its own class says so, such as asynchronous rounds
(``asynchronous = True``).

A class does not inherit such a permission, because it may have changed the rule for which it was given.
"""

from __future__ import annotations

from fedray.algorithms import Algorithm, known_algorithms
from fedray.errors import UserError


def allows(cls: type, permission: str) -> bool:
    """Returns whether ``cls``, the class of an algorithm or a selection, has the ``permission`` of its own, such as
    ``allows_private``."""
    return bool(vars(cls).get(permission, False))


def require(algorithm: Algorithm, name: str, permission: str, key: str, what: str) -> None:
    """Checks that ``algorithm``, whose ``algorithm.name`` is ``name``, allows what the setting ``key`` needs: that
    ``what``, such as "its rule is right with private layers". Raises :class:`UserError` if its class does not have the
    ``permission``, or takes it back for these hyper-parameters."""
    is_able = allows(type(algorithm), permission)
    if is_able and not getattr(algorithm, permission):
        raise UserError(f"{key}: algorithm.name={name} does not say with these hyper-parameters that {what}")
    if not is_able:
        able = sorted(known for known, cls in known_algorithms().items() if allows(cls, permission))
        raise UserError(
            f"{key}: algorithm.name={name} does not say that {what} ({permission} = True); these do: {', '.join(able)}"
        )
