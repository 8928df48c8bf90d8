"""Calls what an algorithm does at the server, so that an error there says which rule failed, and in which round."""

from __future__ import annotations

import contextlib
import platform
import traceback
from collections.abc import Iterator

from fedray.algorithms import Algorithm, Broadcast, ServerState
from fedray.core.vectors import Model
from fedray.errors import EXPLAINED, ServerError


@contextlib.contextmanager
def server_rule(algorithm: Algorithm, method: str, number: int, phase: str | None = None) -> Iterator[None]:
    """A context for a call of ``method`` of ``algorithm`` in round ``number``, 0 before the first, for ``phase`` if the
    method is told one.

    If it raises an exception, :class:`~fedray.errors.ServerError` is raised, which says where that was and has the
    traceback. Errors that explain themselves pass.
    """
    try:
        yield
    except EXPLAINED:
        raise
    except (Exception, SystemExit):
        when = f"in round {number}" if number else "before the first round"
        of_phase = f" for phase {phase}" if phase else ""
        where = f"{type(algorithm).__name__}.{method}{of_phase} failed {when} on {platform.node()}"
        raise ServerError(f"{where}\n{traceback.format_exc()}") from None


def eval_model(algorithm: Algorithm, server: ServerState) -> Model:
    """Returns the evaluated model of ``algorithm``."""
    with server_rule(algorithm, "eval_model", server.round):
        return algorithm.eval_model(server)


def further_models(algorithm: Algorithm, server: ServerState) -> dict[str, Model]:
    """Returns the further models of ``algorithm`` by name."""
    with server_rule(algorithm, "further_models", server.round):
        return dict(algorithm.further_models(server))


def personal_broadcast(algorithm: Algorithm, server: ServerState) -> Broadcast:
    """Returns what ``algorithm`` sends to the clients ``server.cohort`` for their personal models."""
    with server_rule(algorithm, "personal_broadcast", server.round):
        return algorithm.personal_broadcast(server)
