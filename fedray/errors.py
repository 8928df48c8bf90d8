"""The errors that fedray raises, and help with their messages: one clear line that suggests the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Raised if a user asked for something that can't be done. The message says what is wrong, where, and what would be
    right.

    The command line prints the message as one line and exits with code 2, without a traceback.
    """


class OutputLost(UserError):
    """Raised if the results of a run can't be sent to where ``run.output`` is. They are on the run's machine."""


class RayNotStarted(UserError):
    """Raised if Ray can't be started on this machine, for example because the machine is too busy."""


class ClientError(Exception):
    """Raised if code that runs at the clients (model, loss, algorithm) raised an exception, or if the Ray actors that
    ran this code kept dying.

    The message names the client, round and node, and has the original traceback. The command line exits with code 1.
    """


class StateLost(ClientError):
    """Raised if the state that a client keeps between rounds was lost, together with the node or disk that held the
    state.

    A run on Ray then goes back to its last checkpoint. If there is none, the run ends with this error.
    """


class Unreachable(Exception):
    """Raised in a worker if data that a task needs, such as a client's state, lie on a node that does not answer.

    They are not lost: the pool does the task again.
    """


MOST_NAMES = 60
"""The largest number of known names that a message lists."""


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the name in ``known`` that the misspelt ``name`` was probably meant to be, for "did you mean". Returns
    None if no known name is similar enough.

    Upper and lower case count as the same. ``cutoff`` says how similar two names have to be, from 0 (not at all) to 1
    (the same).
    """
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def near_miss(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown ``name``: a suggestion of the name in ``known`` that was
    meant, or all known names if none is similar.

    Dotted names are preferred to a similar name if their last part is ``name``, such as ``train.lr`` for ``lr``, or if
    they are ``<name>.name``. The result is empty if no known name is similar and there are more than
    :data:`MOST_NAMES`.

    >>> near_miss("fedporx", ["fedavg", "fedprox"])
    " (did you mean 'fedprox'?)"
    >>> near_miss("lr", ["data.source", "train.lr"])
    " (did you mean 'train.lr'?)"
    >>> near_miss("algorithm", ["algorithm.mu", "algorithm.name"])
    " (did you mean 'algorithm.name'?)"
    """
    known = sorted(map(str, known))
    close = closest(name, known)
    meant = [each for each in known if each.rpartition(".")[2] == name.lower() or each == f"{name.lower()}.name"]
    if meant or close:
        meant = meant or [str(close)]
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    return f" (there are: {', '.join(known)})" if 0 < len(known) <= MOST_NAMES else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of the error's type if it has no message. fedray's own
    messages of one line quote other errors in this form."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(message: str) -> str:
    """Returns the last line of an error's ``message``. If the message is a traceback, this line has the type and text
    of the error, such as ``ValueError: bad shape``."""
    return (message.strip().splitlines() or [""])[-1]


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of an error's message in one line of at most 200 characters, or the name of the
    error's type if it has no message.

    It is for errors of other libraries, whose further sentences are often advice to the users of those libraries.
    """
    return " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
