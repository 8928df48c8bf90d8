"""The errors that fedray raises, and functions that help to write their messages, each of which is one clear line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Raised if a user asked for something that can't be done. The message says what is wrong, where, and what would be
    right.

    The command line prints the message as one line and exits with code 2, without a traceback.
    """


class OutputLost(UserError):
    """Raised if results can't be written to a URI such as ``run.output=s3://bucket/runs``, for example because the
    storage does not answer. The results made so far stay in a folder on the machine where fedray was started."""


class RayNotStarted(UserError):
    """Raised if Ray can't be started on this machine, for example because the machine is too busy."""


class ClientError(Exception):
    """Raised if code that runs at the clients (model, loss, algorithm) raised an exception, or if the Ray actors
    (processes) that ran this code kept dying.

    The message names the client, the round and the node (machine), and contains the original traceback. The command
    line exits with code 1.
    """


class ServerError(Exception):
    """Raised if a rule of an algorithm at the server raised an exception: ``init_server``, ``broadcast``,
    ``server_training`` or ``server_update``.

    The message names the method and the round, and contains the original traceback. The command line exits with code 1.
    """


class StateLost(ClientError):
    """Raised if the state that a client keeps between rounds was lost, together with the machine or disk that held it.

    A run on Ray then goes back to its last checkpoint. If there is none, the run ends with this error.
    """


class Unreachable(Exception):
    """Raised in a worker (the object that trains clients in a process) if it can't fetch data that it needs, such as a
    client's state, because the machine that holds the data does not answer.

    Unlike with :class:`StateLost`, the data are not known to be lost, so the same work is done again later.
    """


EXPLAINED = (UserError, ClientError, ServerError)
"""The errors whose message says all that there is to say, and needs no traceback around it."""

MOST_NAMES = 60
"""The largest number of known names that a message lists."""


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the name in ``known`` that is most similar to the misspelt ``name``, for a hint such as "did you mean
    'fedprox'?" in an error message. Returns None if no known name is similar enough.

    Upper and lower case count as the same. ``cutoff`` says how similar two names have to be, from 0 (not at all) to 1
    (the same).
    """
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def near_miss(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown ``name``: a suggestion of the name in ``known`` that was
    probably meant. If no known name is similar, it is a list of all known names, or an empty text if there are no known
    names or more than :data:`MOST_NAMES`.

    Two kinds of dotted names are preferred to names that are only similar: those whose last part is ``name``, such as
    ``train.lr`` for ``lr``, and ``<name>.name``, such as ``algorithm.name`` for ``algorithm``.

    >>> near_miss("fedporx", ["fedavg", "fedprox"])
    " (did you mean 'fedprox'?)"
    >>> near_miss("lr", ["data.source", "train.lr"])
    " (did you mean 'train.lr'?)"
    >>> near_miss("algorithm", ["algorithm.mu", "algorithm.name"])
    " (did you mean 'algorithm.name'?)"
    """
    name = str(name)
    known = sorted(map(str, known))
    close = closest(name, known)
    meant = [each for each in known if each.rpartition(".")[2] == name.lower() or each == f"{name.lower()}.name"]
    if meant or close:
        meant = meant or [str(close)]
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    return f" (there are: {', '.join(known)})" if 0 < len(known) <= MOST_NAMES else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, so that a message of one line can quote the error. Returns the name
    of the error's type if the error has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(message: str) -> str:
    """Returns the last line of an error's ``message``, or an empty text if there is none. If the message is a
    traceback, this line has the type and the text of the error, such as ``ValueError: bad shape``."""
    return (message.strip().splitlines() or [""])[-1]


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of an error's message in one line of at most 200 characters, or the name of the
    error's type if it has no message.

    It is for quoting errors of other libraries, whose further sentences are often advice to the users of those
    libraries.
    """
    return " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
