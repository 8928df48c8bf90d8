"""Compares what the algorithms cost as two papers count it: FedTrip's tables V and VIII, or GHBM's table 4.

python analysis/paper_costs.py fedtrip data.source=mnist model.name=lenet5
python analysis/paper_costs.py ghbm CONFIG.yaml --csv costs.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedray.cli.main import Parser, exit_code
from fedray.cli.settings import load_settings
from fedray.experiment.costs import compare_algorithms


def main(arguments: Sequence[str]) -> int:
    """Shows the table that the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _show(arguments))


def _show(arguments: Sequence[str]) -> int:
    from reproducing.accounting import TABLES

    parser = Parser(prog="paper_costs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=TABLES, help="whose accounting")
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help="as for fedray costs")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the table as CSV too, with all digits")
    options = parser.parse_args(arguments)
    candidates, scenario, left_out = compare_algorithms(load_settings(options.settings))
    table = TABLES[options.paper](candidates, scenario)
    table.show()
    for name, reason in left_out.items():
        print(f"without {name}: {reason}")
    if options.csv:
        table.write(options.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
