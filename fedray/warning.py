"""Warns the user about decisions that change a result, and about requests that are not carried out.

Where lines are shown, a warning is a line that begins with ``warning: ``. In a call from Python nothing is shown unless
the user wants it; then warnings are those of Python, at the line of the user's call.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

WARNING = "warning: "
"""The beginning of every line that is a warning."""


class FedrayWarning(UserWarning):
    """The category of all Python warnings that fedray issues, for use with ``warnings.filterwarnings``.

    fedray warns about a decision of its own that changes a result, and about a request of the user's that it does not
    carry out.
    """


def as_warning(line: str) -> str:
    """Marks ``line``, a line of text for the user, as a warning: returns it with "warning: " (:data:`WARNING`) in
    front, or unchanged if it begins with that already."""
    return line if line.startswith(WARNING) else WARNING + line


class PythonWarnings:
    """A callable that issues fedray's warnings as Python warnings. It is used when fedray is called from Python, where
    nothing is printed.

    An instance is called with each line of text that fedray has for the user. A line that begins with "warning: "
    (:data:`WARNING`) is issued as a :class:`FedrayWarning` the first time that it occurs. All other lines are ignored.
    The Python warnings point to the line of the user's code from which the instance was made, even if another thread
    issues them later.
    """

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_of_fedray(frame):
            frame = frame.f_back
        self._file, self._number = frame.f_code.co_filename, frame.f_lineno
        self._module = frame.f_globals.get("__name__", "<unknown>")
        # with this registry Python shows a warning once for each line of the user's code, by default
        self._registry = frame.f_globals.setdefault("__warningregistry__", {})
        self._told: set[str] = set()

    def __call__(self, line: str) -> None:
        if line.startswith(WARNING) and line not in self._told:
            self._told.add(line)
            text = line.removeprefix(WARNING)
            warnings.warn_explicit(text, FedrayWarning, self._file, self._number, self._module, self._registry)


def _is_of_fedray(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "fedray"
