"""Errors that a user of fedray can cause, each told in one clear line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was asked for can't be done; the message says what is wrong, where, and what would be right.

    The command line prints the message as one line and exits with code 2, without a traceback.
    """


class ClientError(Exception):
    """Clients could not be simulated: their code (model, loss, algorithm) raised, or whoever ran it kept dying.

    The message names client, round and node and holds the original traceback. Exit code 1.
    """


class StateLost(ClientError):
    """What a client keeps between rounds is gone, with the node or the disk that it was on.

    A run goes back to its last checkpoint, if it has one.
    """


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that ``name`` was probably meant to be, whatever its case; None if none is as close as ``cutoff``,
    from 0 (nothing alike) to 1 (the same)."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def near_miss(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or the list of them all when none is close.

    >>> near_miss("fedporx", ["fedavg", "fedprox"])
    " (did you mean 'fedprox'?)"
    """
    known = sorted(map(str, known))
    close = closest(name, known)
    if close:
        return f" (did you mean {close!r}?)"
    return f" (there are: {', '.join(known)})" if known else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(message: str) -> str:
    """The last line of an error's message: of a traceback, the line that names the error."""
    return (message.strip().splitlines() or [""])[-1]


def first_sentence(error: Exception) -> str:
    """The first sentence of an error's message, in one line, or its type: what follows is often advice to others."""
    return " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
