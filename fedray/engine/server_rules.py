"""Calls what an algorithm does at the server, so that an error there says which rule failed, and in which round."""

from __future__ import annotations

import contextlib
import platform
import traceback
import zlib
from collections.abc import Iterator

from fedray.algorithms import Algorithm, Broadcast, ServerState
from fedray.core.seeds import SERVER, Purpose, every_rng
from fedray.core.vectors import Model
from fedray.errors import EXPLAINED, ServerError
from fedray.gradients.known_code import is_of_known


@contextlib.contextmanager
def server_rule(algorithm: Algorithm, method: str, server: ServerState, phase: str | None = None) -> Iterator[None]:
    """A context for a call of ``method`` of ``algorithm`` in the round of ``server``, for ``phase`` if the method is
    told one.

    A user-defined method may draw from the global generators: here they are seeded by ``run.seed``, the round and the
    method. If the method raises an exception, :class:`~fedray.errors.ServerError` is raised, which says where that was
    and has the traceback. Errors that explain themselves pass.
    """
    number = server.round
    try:
        with _seeded(algorithm, method, server, phase):
            yield
    except EXPLAINED:
        raise
    except (Exception, SystemExit):
        when = f"in round {number}" if number else "before the first round"
        of_phase = f" for phase {phase}" if phase else ""
        where = f"{type(algorithm).__name__}.{method}{of_phase} failed {when} on {platform.node()}"
        raise ServerError(f"{where}\n{traceback.format_exc()}") from None


def _seeded(
    algorithm: Algorithm, method: str, server: ServerState, phase: str | None
) -> contextlib.AbstractContextManager[None]:
    # training at the server has a thread of its own, in which the contexts of local steps seed what modules draw
    if method == "server_training" or all(map(is_of_known, type(algorithm).__mro__)):
        return contextlib.nullcontext()
    return every_rng(server.seed, Purpose.ALGORITHM, server.round, SERVER, zlib.crc32(f"{method} {phase}".encode()))


def eval_model(algorithm: Algorithm, server: ServerState) -> Model:
    """Returns the evaluated model of ``algorithm``."""
    with server_rule(algorithm, "eval_model", server):
        return algorithm.eval_model(server)


def further_models(algorithm: Algorithm, server: ServerState) -> dict[str, Model]:
    """Returns the further models of ``algorithm`` by name."""
    with server_rule(algorithm, "further_models", server):
        return dict(algorithm.further_models(server))


def personal_broadcast(algorithm: Algorithm, server: ServerState) -> Broadcast:
    """Returns what ``algorithm`` sends to the clients ``server.cohort`` for their personal models."""
    with server_rule(algorithm, "personal_broadcast", server):
        return algorithm.personal_broadcast(server)
