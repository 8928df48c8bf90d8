"""The command ``fedray report``: makes a page about a run, a sweep or a suite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedray.cli.settings import local
from fedray.errors import UserError
from fedray.remote.fetching import as_path, publish
from fedray.util.uris import is_uri

DESCRIPTION = """\
Make a page about a run, a sweep or a suite: tables and pictures in one file,
report.html, which needs no network. Nothing is run.

Of a run: what it reached, its curves, who holds what, how good it is for
single clients, and the time of its rounds. Of a sweep: its trials, what each
searched key does to the objective, and which keys matter. Of a suite: the
table of the winners, and all of its sweeps."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray report`` to the command line, with its arguments and help. The command makes a page
    about a run, a sweep (a search over hyper-parameters) or a suite (several sweeps whose winners are compared).
    ``commands`` is what ``add_subparsers`` of argparse has returned."""
    parser = commands.add_parser(
        "report",
        help="make a page about a run, a sweep or a suite",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN | SWEEP | SUITE", nargs="?", help="its folder, or the URI of that")
    parser.add_argument("--output", metavar="FILE", type=local, help="the page; report.html in the folder unless given")
    parser.set_defaults(function=_report)


def _report(options: argparse.Namespace) -> int:
    from fedray.util.files import write_whole

    named: str | None = options.folder
    if named is None:
        raise UserError("give the folder of a run, a sweep or a suite, as in: fedray report runs/fedavg-mnist")
    folder = as_path(named)
    page = _page(folder).html()
    path: Path = options.output or folder
    path = path / "report.html" if path.is_dir() else path
    if path.exists() and path.suffix != ".html":
        raise UserError(f"--output: {path} exists, and is no page: give a name that ends in .html")
    try:
        write_whole(path, page)
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror or error}") from None
    print(f"wrote {path if options.output or not is_uri(named) else publish(named, folder, [path])[0]}")
    return 0


def _page(folder: Path) -> Any:
    """Returns the page about the run, sweep or suite in ``folder``. Raises :class:`UserError` if the folder holds none
    of these."""
    from fedray.tuning.spec import RECORD, read_sweeps
    from fedray.tuning.suite import SUITE_RECORD, suite_of_folder

    if (folder / SUITE_RECORD).is_file():
        from fedray.pages.search_page import suite_page

        return suite_page(suite_of_folder(folder))
    if (folder / RECORD).is_file():
        from fedray.pages.search_page import sweep_page

        return sweep_page(read_sweeps(folder)[0])
    if (folder / "config.yaml").is_file():
        from fedray.pages.run_page import run_page

        return run_page(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is {'no folder' if folder.exists() else 'not there'}: give that of a run or a sweep")
    several = "; to compare several runs: fedray compare" if any(folder.glob("*/config.yaml")) else ""
    raise UserError(f"{folder} is no folder of a run, a sweep or a suite{several}")
