"""The program: ``python fedray/run.py [CONFIG.yaml] [key=value ...]``, the same as ``fedray run``.

It also works when this file alone is copied elsewhere and fedray is installed, as `ray submit` does it.
"""

from __future__ import annotations

import os
import sys


def main(default: str | None = None) -> None:
    """The console script ``fedray``; ``default`` is the command when the first argument is none."""
    if os.getcwd() not in sys.path:
        # the user's own modules lie where the program is started; in front, a profile.py there would hide Python's
        sys.path.append(os.getcwd())
    from fedray.cli import COMMANDS
    from fedray.cli import main as command_line

    arguments = sys.argv[1:]
    named = bool(arguments) and arguments[0] in COMMANDS
    sys.exit(command_line(arguments if named or default is None else [default, *arguments]))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.exists(os.path.join(here, "__init__.py")):
        # run as a file, Python puts this folder first, where our modules would shadow others' top-level names
        sys.path[0] = os.path.dirname(here)
    main(default="run")
