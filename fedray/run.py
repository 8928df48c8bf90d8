"""The program: ``python fedray/run.py [CONFIG.yaml] [key=value ...]``, the same as ``fedray run``.

It also works where fedray is installed and only this file is copied, as `ray submit` does.
"""

from __future__ import annotations

import io
import os
import sys


def main(default: str | None = None) -> None:
    """Runs the command line, and then exits with the command's exit code. The first argument in ``sys.argv`` names the
    command, such as "tune" in ``fedray tune fedprox``.

    If the first argument is not a command, the command ``default`` runs with all arguments: with "run" as the default,
    ``python fedray/run.py train.lr=0.1`` is the same as ``fedray run train.lr=0.1``. If ``default`` is None, a first
    argument that is neither a command nor an option such as ``--help`` is an error.
    """
    _prepare_streams()
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("fedray: the working directory has been removed: change into another one", file=sys.stderr)
        sys.exit(2)
    if here not in sys.path:
        # the user's own modules lie in the working directory; it comes last, because in front of the others a file
        # there such as profile.py would be imported instead of Python's own module
        sys.path.append(here)
    from fedray.cli.main import COMMANDS
    from fedray.cli.main import main as command_line

    arguments = sys.argv[1:]
    named = bool(arguments) and arguments[0] in COMMANDS
    sys.exit(command_line(arguments if named or default is None else [default, *arguments]))


def _prepare_streams() -> None:
    """Makes standard output and standard error accept every character, and replaces a stream that the caller has
    closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            # a name with letters that the terminal does not have is shown with escapes
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.exists(os.path.join(here, "__init__.py")):
        # when Python runs a file it puts the file's folder first, where our modules would hide others of the same name
        sys.path[0] = os.path.dirname(here)
    main(default="run")
