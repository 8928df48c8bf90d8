"""Repeats published tables and figures, and puts measured beside published.

python analysis/reproduce.py --list
python analysis/reproduce.py fedtrip/table4 --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedray.cli.main import Parser, exit_code
from fedray.errors import UserError

DESCRIPTION = """\
Repeat a published table or figure: make the runs that it needs, and put
measured beside published.

The runs are made side by side on the cluster, or on this machine. Those that
have ended are used again, also by other tables; the same command goes on where
it was stopped. The result is a table in Markdown and CSV, a picture of it, and
the curves of the runs."""


def main(arguments: Sequence[str]) -> int:
    """Makes what the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _reproduce(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser(prog="reproduce.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the table, such as fedtrip/table4")
    listed = "list all tables, or NAME, with their runs and what they take with the other options"
    parser.add_argument("--list", action="store_true", help=listed)
    columns = "a column of the table; may be given several times; all by default"
    parser.add_argument("--column", metavar="NAME", action="append", default=[], help=columns)
    parser.add_argument(
        "--seeds", metavar="K", type=int, help="seeds of each cell; as many as the paper has by default"
    )
    parser.add_argument("--quick", action="store_true", help="one seed and a tenth of the rounds, to try it")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("reproduced"), help="folder; reproduced/ by default"
    )
    return parser


def _reproduce(options: argparse.Namespace) -> int:
    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {options.seeds}")
    if options.list:
        return _list(options)
    if options.name is None:
        raise UserError("give the name of a table, such as fedtrip/table4; --list shows all")
    from reproducing.reproduce import reproduce
    from reproducing.request import Request

    from fedray.tracking.progress import Display

    display = Display()
    display.say("fedray: loading ...")
    request = Request(options.name, options.column, options.seeds, options.quick, options.output)
    text, paths, failures, stopped = reproduce(request, display.say)
    print(text)
    print(f"wrote {', '.join(map(str, paths))}")
    if stopped:
        display.say("to go on, give the same command again")
        return 130
    if failures:
        display.say(f"{failures} run{'s' if failures > 1 else ''} could not be made; the same command tries again")
    return 1 if failures else 0


def _list(options: argparse.Namespace) -> int:
    from reproducing.costs import PROCESSORS
    from reproducing.listing import listing
    from reproducing.published import known_tables
    from reproducing.request import Request

    if options.column and options.name is None:
        raise UserError("--column is one of a table: name the table, as in: reproduce.py fedtrip/table4 --list")
    names = known_tables() if options.name is None else [options.name]
    asked = [Request(name, options.column, options.seeds, options.quick, options.output) for name in names]
    tables, slowness = listing(asked, options.output)
    for name, title, cost in tables:
        hours = f"{'at most ' if cost.at_most else ''}about {cost.hours:,.{1 if cost.hours < 100 else 0}f} h"
        takes = "; not measured" if cost.hours != cost.hours else f"; {'the others ' if cost.done else ''}{hours}"
        print(f"{name}: {title}")
        print(f"    {cost.runs:,} runs, {cost.done:,} done{takes if cost.done < cost.runs else ''}")
    seen = ""
    if slowness is not None:
        runs = options.output / "runs"
        seen = f", times {slowness:.2g}, because the runs in {runs} took so many times as long as expected"
    print(f"Hours are of {PROCESSORS} processors without a GPU (analysis/experiments/README.md){seen}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
