"""The command line: reads the arguments of a command, calls what does the work, and prints the result."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fedray import __version__
from fedray.cli import calibrate, clean, compare, costs, data, doctor, evaluate, listing, report, run, tune
from fedray.cli.settings import EXIT_INTERRUPTED, EXIT_USER, repeated
from fedray.config.reading import check_words
from fedray.errors import ClientError, ServerError, UserError, closest, near_miss
from fedray.usercode.importing import FORMS

COMMANDS = (
    "run", "tune", "evaluate", "compare", "report", "data", "costs", "calibrate", "doctor", "clean",
    "keys", "algorithms", "models", "datasets",
)  # fmt: skip
TAKING_SETTINGS = ("run", "tune", "evaluate", "data", "costs", "calibrate", "doctor", "clean")


def main(arguments: Sequence[str]) -> int:
    """Runs a command of the command line and returns its exit code. ``arguments`` are the words after ``fedray``, such
    as ``["run", "train.lr=0.1"]``. Errors that a user can cause are printed in one line."""
    return exit_code(lambda: _command(arguments))


def exit_code(command: Callable[[], int]) -> int:
    """Calls ``command()``, the main function of a program, and returns the program's exit code. This is the result of
    ``command()``, or, if that raises an error, 2 for :class:`UserError` and for a file or folder that this user may not
    use, 1 for :class:`ClientError` and :class:`ServerError`, and 130 for an interruption (Ctrl-C). The error is printed
    on standard error, in one line.

    If the reader of the output has closed it, as in ``| head``, the exit code is 141. Other exceptions are not caught.
    """
    try:
        code = command()
        # flushed here, so that the error is caught if the reader of the output has gone
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"fedray: {error}", file=sys.stderr)
        return EXIT_USER
    except (ClientError, ServerError) as error:
        print(f"fedray: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"fedray: can't use {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_USER
    except BrokenPipeError:
        # the reader of the output has closed it (| head)
        _give_up_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _give_up_output()
        print("fedray: can't write the output: no space left on the device", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("fedray: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _give_up_output() -> None:
    # Python would complain again at its last flush
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str]) -> int:
    parser = _parser()
    _check_words(arguments)
    options, left = parser.parse_known_args(arguments)
    several = next((each for each in ("settings", "folders") if hasattr(options, each)), None)
    unknown = [text for text in left if text.startswith("-") or several is None]
    if unknown:
        meant = closest(unknown[0].partition("=")[0], parser.options_of(arguments[0]))
        problem = f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {meant!r}?)' if meant else ''}"
        raise UserError(f"{problem}; see {' '.join(filter(None, (parser.prog, options.command)))} --help")
    if left and several is not None:
        # argparse recognises no settings and folders after the first option that follows one
        getattr(options, several).extend(left)
    for line in repeated(getattr(options, "settings", ())):
        print(line, file=sys.stderr)
    if options.command is None:
        parser.print_help()
        return EXIT_USER
    code: int = options.function(options)
    return code


class Parser(argparse.ArgumentParser):
    """A parser of argparse that raises :class:`UserError` for a wrong argument, so that the message has the form of all
    other messages of fedray. The beginning of an option is not that option: ``--seed 3`` is not ``--seeds 3``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"allow_abbrev": False})

    def options_of(self, command: str) -> list[str]:
        """Returns the long options of a ``command``, or of all commands if it is none, such as ``--seeds``."""
        (commands,) = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        parsers = [commands.choices[command]] if command in commands.choices else [self]
        found = [option for each in parsers for action in each._actions for option in action.option_strings]
        return [option for option in found if option.startswith("--")]

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _check_words(arguments: Sequence[str]) -> None:
    """Checks the words of a command line before argparse reads them, because argparse would not suggest the command
    that was meant, and does not know the keys of the configuration.

    Raises :class:`UserError` for an unknown command, and for a key that is not followed by ``=`` and a value.
    """
    if not arguments or arguments[0].startswith("-"):
        return
    name = arguments[0]
    if name not in COMMANDS:
        run = f" (did you mean 'fedray run {name}'?)" if "=" in name or name.endswith((".yaml", ".yml")) else ""
        raise UserError(f"there is no command {name!r}{run or near_miss(name, COMMANDS)}")
    if name in TAKING_SETTINGS:
        from fedray.config import documented_keys
        from fedray.tuning.settings import TuneConfig

        further = documented_keys(TuneConfig, "tune.") if name in ("tune", "clean") else ()
        check_words(list(arguments[1:]), [key for key, *_ in (*documented_keys(), *further)])


def _parser() -> Parser:
    parser = Parser("fedray", description="Federated learning simulated at scale on Ray.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (run, tune, evaluate, compare, report, data, costs, calibrate, doctor, clean):
        command.add_parser(commands)
    _add_lists(commands)
    text = "print the versions of fedray, Python, torch, CUDA and Ray, and exit"
    for each in (parser, *commands.choices.values()):
        each.add_argument("--version", action=_Version, nargs=0, help=text)
    return parser


class _Version(argparse.Action):
    """Prints versions, which takes a moment that other commands need not spend."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from fedray.util.versions import versions_line

        print(versions_line(__version__))
        parser.exit()


def _add_lists(commands: Any) -> None:
    for name, text, listed in (
        ("algorithms", "list the algorithms with their hyper-parameters", listing.algorithms),
        ("models", "list the models with their options", listing.models),
        ("datasets", "list the data sources and partitioners", listing.datasets),
    ):
        command = commands.add_parser(name, help=text, description=f"{text}, or only those named")
        command.add_argument("names", nargs="*", metavar="NAME", help=f"one of them, or your own: {FORMS}")
        command.set_defaults(function=lambda options, listed=listed: _print(listed(options.names)))
    text = "list the config keys with their defaults and ranges"
    commands.add_parser("keys", help=text, description=text).set_defaults(
        function=lambda options: _print(listing.keys())
    )


def _print(lines: Iterable[str]) -> int:
    print("\n".join(lines))
    return 0
