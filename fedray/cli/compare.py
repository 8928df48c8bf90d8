"""The command ``fedray compare``: compares runs that have ended."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedray.cli.settings import local
from fedray.errors import UserError
from fedray.results.measure import AXES

DESCRIPTION = """\
Compare runs that have ended: what they reached, and what that took.

Each folder is one of a run, or one with folders of runs below it, or a URI such
as s3://bucket/runs. Runs that
differ in their seeds alone are one group, a row of the tables and a line of
the pictures. Runs on other data, partitions or models stand in tables and
pictures of their own, because they can't be compared. --by says which keys
tell groups apart instead; then all other keys make tables of their own.

Folders that are damaged, or whose run has not ended, are named and left out.
A line says what else makes groups unequal, such as other seeds or weights."""


MANY = 40
"""The number of groups from which the pictures take more than a few seconds."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray compare`` to the command line, with its arguments and help. The command compares runs
    that have ended, in tables and pictures. ``commands`` is what ``add_subparsers`` of argparse has returned."""
    parser = commands.add_parser(
        "compare",
        help="compare runs: tables, curves and a page",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", metavar="RUN | FOLDER")
    by = "a key that tells groups apart; may be given several times"
    parser.add_argument("--by", metavar="KEY", action="append", default=[], help=by)
    parser.add_argument("--x", default="rounds", metavar="AXIS", help=f"what curves are drawn over: {', '.join(AXES)}")
    parser.add_argument(
        "--target", metavar="T", action="append", default=[], type=float,
        help="a value of the metric, such as 0.9: what did it take to reach it? May be given several times; unless "
        "given, those of run.targets that all runs have, or else the mean that the baseline ends with",
    )  # fmt: skip
    parser.add_argument("--baseline", metavar="GROUP", help="a group's name, or an algorithm; fedavg unless given")
    last = "rounds of which the mean is shown, too; the last ten evaluations unless given"
    parser.add_argument("--last", metavar="K", type=int, help=last)
    parser.add_argument(
        "--any-version", action="store_true", help="also take runs of other versions of fedray than most of them"
    )
    output = "folder of the files; unless given ./comparison, or ./comparison-2 if that is another comparison's"
    parser.add_argument("--output", metavar="DIR", type=local, help=output)
    style = "paper: curves.pdf too; each panel as wide as a column, with small text, dashes and a legend below"
    parser.add_argument("--style", choices=["page", "paper"], default="page", help=style)
    parser.set_defaults(function=_compare)


def _compare(options: argparse.Namespace) -> int:
    if not options.folders:
        raise UserError("give folders of runs, as in: fedray compare runs/")
    from fedray.results.compare import compare
    from fedray.results.comparison_files import lines, output_of, write

    found = compare(
        *options.folders,
        by=options.by,
        x=options.x,
        targets=options.target,
        baseline=options.baseline,
        last=options.last,
        any_version=options.any_version,
    )
    folder = options.output or output_of(found).folder_for(Path("comparison"))
    output_of(found).check(folder)
    for line in lines(found):
        print(line)
    if len(found.groups) > MANY:
        print(f"drawing the pictures of {len(found.groups)} groups in {len(found.environments)} tables ...", flush=True)
    names = [path.name for path in write(found, folder, options.style)]
    print(f"wrote {', '.join(names)} into {folder}")
    return 0
