"""The program: ``python fedray/run.py [CONFIG.yaml] [key=value ...]``, the same as ``fedray run``.

It also works when this file alone is copied elsewhere and fedray is installed, as `ray submit` does it.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The console script ``fedray``."""
    if sys.path and sys.path[0] != os.getcwd():
        # a console script does not see the user's own modules beside it
        sys.path.insert(0, os.getcwd())
    from fedray.cli import main as command_line

    sys.exit(command_line(sys.argv[1:]))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.basename(here) == "fedray" and os.path.exists(os.path.join(here, "__init__.py")):
        # run as a file, Python puts this folder first, where our modules would shadow others' top-level names
        sys.path[0] = os.path.dirname(here)
    from fedray.cli import COMMANDS
    from fedray.cli import main as command_line

    arguments = sys.argv[1:]
    sys.exit(command_line(arguments if arguments[:1] and arguments[0] in COMMANDS else ["run", *arguments]))
