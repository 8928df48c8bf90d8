"""Warns the user of decisions that change a result, and of what was asked for and is not done.

Where lines are shown, a warning is a line that begins with ``warning: ``. In a call from Python nothing is shown unless
the user wants it; then warnings are those of Python, at the line of the user's call.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

WARNING = "warning: "
"""How a line begins that is a warning."""


class FedrayWarning(UserWarning):
    """A warning of fedray's: a decision that changes a result, or something that was asked for and is not done."""


def as_warning(line: str) -> str:
    """Returns ``line`` as the line of a warning, which it may be already."""
    return line if line.startswith(WARNING) else WARNING + line


class PythonWarnings:
    """A function that gives Python's warnings the lines that are warnings, each once. It ignores all other lines.

    The warnings are those of the line in which the user calls fedray, to make this object, whichever thread comes upon
    them later.
    """

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_of_fedray(frame):
            frame = frame.f_back
        self._file, self._number = frame.f_code.co_filename, frame.f_lineno
        self._module = frame.f_globals.get("__name__", "<unknown>")
        # with it Python shows a warning once for each line of the user's, unless the user says otherwise
        self._registry = frame.f_globals.setdefault("__warningregistry__", {})
        self._told: set[str] = set()

    def __call__(self, line: str) -> None:
        if line.startswith(WARNING) and line not in self._told:
            self._told.add(line)
            text = line.removeprefix(WARNING)
            warnings.warn_explicit(text, FedrayWarning, self._file, self._number, self._module, self._registry)


def _is_of_fedray(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "fedray"
