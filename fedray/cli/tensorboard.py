"""The command ``fedray tensorboard``."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Show runs in TensorBoard, until Ctrl-C.

Runs have names that say in what they differ, such as "fedprox, mu=0.1, seed 2",
and the tab Custom Scalars has the accuracies of all of them in one chart. Runs
that begin later are found, too. Of a sweep or a suite each trial has its
number, and the tab HParams has what was searched."""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "tensorboard",
        help="show runs in TensorBoard",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", default=Path("runs"),
        help="with runs in it or below it, or of a sweep; runs/ unless given",
    )  # fmt: skip
    parser.add_argument("--port", metavar="P", type=int, help="the port; the first free one from 6006 unless given")
    parser.add_argument("--host", default="localhost", help="the address to listen at; localhost unless given")
    parser.set_defaults(function=_tensorboard)


def _tensorboard(options: argparse.Namespace) -> int:
    from fedray.pages.board import MOST_TICKED, board

    # so that the links are removed then, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with board(options.folder, options.host, options.port) as (address, shown, wait):
            print(f"TensorBoard is at {address} (Ctrl-C ends it)", flush=True)
            if shown > MOST_TICKED:
                print(
                    f"its charts are empty at first, as of more than {MOST_TICKED} runs it ticks none: choose some",
                    flush=True,
                )
            wait(threading.Event())
    except KeyboardInterrupt:
        return 0
    return 0
