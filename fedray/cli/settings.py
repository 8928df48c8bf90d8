"""What the commands share that take settings: how they read files and ``key=value`` words, and their exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedray.config import Config, load
from fedray.config.files import has_section
from fedray.errors import UserError
from fedray.util.files import is_there
from fedray.util.uris import is_uri

RESULTS = (
    "Exit codes: 0 completed, 1 a failure inside, 2 a mistake in what was asked for, 3 the loss of a run diverged, "
    "130 interrupted (give the same command again to resume)."
)

EXIT_USER, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe a run to the ``parser`` of a command: a config file and overrides such as
    ``train.lr=0.1``. In the options that the parser returns, the attribute ``settings`` is the list of these words."""
    settings = "a config file, and overrides; of a key that is given twice the last value counts"
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help=settings)


def local(text: str) -> Path:
    """Reads an option that is a file or folder of this machine. Raises ``ArgumentTypeError`` for a URI."""
    if is_uri(text):
        raise argparse.ArgumentTypeError(f"{text} is not on this machine: give a file or folder here")
    return Path(text)


def split(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the words of a command line, ``settings``, into names of files and overrides, and returns these two
    lists. A word is the name of a file if it is a URI, has no "=" in it, or is the path of a YAML file that exists. All
    other words, such as ``train.lr=0.1``, are overrides."""

    def is_file(text: str) -> bool:
        return "=" not in text or is_uri(text) or (text.endswith((".yaml", ".yml")) and is_there(text))

    files = [text for text in settings if is_file(text)]
    return files, [text for text in settings if text not in files]


def of_section(overrides: Sequence[str], section: str) -> list[str]:
    """Returns those of ``overrides`` that set a ``section`` of the configuration or a key in it, such as
    ``data={source: mnist}`` and ``data.source=mnist`` for the section ``data``."""
    return [text for text in overrides if text.partition("=")[0].partition(".")[0].strip() == section]


def repeated(settings: Sequence[str]) -> Iterator[str]:
    """Yields a warning for each key to which the words of a command line, ``settings``, give several values, of which
    the last one counts. A section that is given twice has the keys of both."""
    texts: dict[str, list[str]] = {}
    for text in split(settings)[1]:
        texts.setdefault(text.partition("=")[0].strip(), []).append(text)
    for key, given in texts.items():
        if len({*given}) > 1 and not has_section(key):
            yield f"warning: {key} is given more than once: the last one counts, {given[-1]}"


def load_settings(settings: Sequence[str]) -> Config:
    """Returns the configuration that the words of a command line describe: one config file at most, and overrides such
    as ``train.lr=0.1``. Raises :class:`UserError` for a second file, or a wrong key or value."""
    files, overrides = split(settings)
    if len(files) > 1:
        raise UserError(f"one config file at most, not {' and '.join(files)}")
    return load(files[0] if files else None, overrides)
