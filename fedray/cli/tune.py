"""The command ``fedray tune``: searches hyper-parameters."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.cli import listing
from fedray.cli.settings import EXIT_INTERRUPTED, RESULTS, split
from fedray.errors import UserError

if TYPE_CHECKING:
    from fedray.tuning.spec import SweepSpec
    from fedray.tuning.suite import Suite


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray tune`` to the command line, with its arguments and help. The command searches
    hyper-parameters or resumes a search. ``commands`` is what ``add_subparsers`` of argparse has returned."""
    search = "search hyper-parameters on Ray, or resume a search"
    again = "Give the same command again to resume where it was stopped or killed."
    parser = commands.add_parser(
        "tune",
        help=search,
        description="\n".join(listing.paragraph(f"{search[0].upper()}{search[1:]}. {again}")),
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="SPACE | key=value",
        help="a space file, or the name of one that comes with fedray; and overrides, of the base config or of tune.*",
    )
    parser.add_argument("--retry-failed", action="store_true", help="try trials that failed once more")
    parser.add_argument(
        "--suite",
        metavar="NAME",
        help="instead of a space: tune a list of algorithms with the same budget each, run the winners on fresh seeds, "
        "and compare them in one table; a suite file, or the name of one that comes with fedray",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing, and write tables and pictures of the trials so far into report/",
    )
    parser.set_defaults(function=_tune)


def _epilog() -> str:
    from fedray.tuning.settings import TuneConfig
    from fedray.tuning.spec import known_spaces

    known = f"Spaces: {', '.join(known_spaces())}"
    lines = ["Keys:", *listing.keys(TuneConfig, "tune."), "", *listing.paragraph(known)]
    return "\n".join([*lines, "", *listing.paragraph(RESULTS)])


def _tune(options: argparse.Namespace) -> int:
    from fedray.tuning.spec import known_spaces, read_sweeps

    files, overrides = split(options.settings)
    if options.suite:
        if files:
            raise UserError(f"--suite names its space files itself: give none beside it, not {files[0]}")
        return _suite(options, overrides)
    if len(files) != 1:
        given = f"; not {', '.join(files)}: a key=value with blanks needs quotes in a shell" if files else ""
        raise UserError(f"give one space file, or one of: {', '.join(known_spaces())}{given}")
    if options.report:
        return _report(read_sweeps(files[0], overrides))
    from fedray.tuning import tune
    from fedray.tuning.view import View

    view = View()
    view.say("fedray: loading ...")
    results = tune(files[0], overrides, retry_failed=options.retry_failed, verbose=True)
    for result in results:
        for path in result.best:
            view.say(f"best: {path}")
    view.say(f"tables and pictures: fedray tune {shlex.join(options.settings)} --report")
    if any(result.interrupted for result in results):
        view.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    lost = [str(result.folder) for result in results if not result.best]
    if lost:
        print(f"fedray: no trial has completed with a finite value in {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


def _report(specs: Sequence[SweepSpec]) -> int:
    from fedray.remote.fetching import publish
    from fedray.tuning.outputs import fetched_sweep
    from fedray.tuning.recorded import check_record
    from fedray.tuning.report import write_report

    here = [fetched_sweep(spec) for spec in specs]
    for spec in here:
        check_record(spec)
    for asked, spec in zip(specs, here, strict=True):
        paths = write_report(spec)
        places = paths if asked.uri is None else publish(asked.uri, spec.folder, paths)
        print("\n".join(f"wrote {place}" for place in places))
    return 0


def _suite(options: argparse.Namespace, overrides: list[str]) -> int:
    from fedray.tuning.suite import read_suite, run_suite
    from fedray.tuning.view import View

    suite = read_suite(options.suite, overrides)
    if options.report:
        _report(suite.specs)
        print("\n".join(f"wrote {place}" for place in _write(suite)[1]))
        return 0
    view = View()
    view.say("fedray: loading ...")
    status = run_suite(suite, view, options.retry_failed)
    if status == "interrupted":
        view.say("to go on, give the same command again")
        return EXIT_INTERRUPTED
    written, places = _write(suite)
    view.say(written[1].read_text(encoding="utf-8").rstrip())
    view.say(f"wrote {', '.join(places)}")
    if status == "incomplete":
        print("fedray: the table lacks runs: an algorithm has no winner, or a winner's run failed", file=sys.stderr)
    return 1 if status == "incomplete" else 0


def _write(suite: Suite) -> tuple[list[Path], list[str]]:
    """Writes the tables of ``suite`` into its folder, and to its URI if it has one. Returns the paths of the files
    here, and the names of their places for the user."""
    from fedray.remote.fetching import publish
    from fedray.tuning.suite import fetched_suite
    from fedray.tuning.suite_table import write_suite

    here = fetched_suite(suite)
    paths = write_suite(here)
    return paths, [*map(str, paths)] if suite.uri is None else publish(suite.uri, here.folder, paths)
