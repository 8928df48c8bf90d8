"""The command ``fedray costs``: compares what the algorithms cost."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedray.cli.settings import add_settings, load_settings
from fedray.errors import UserError


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray costs`` to the command line, with its arguments and help. The command compares how many
    bytes and FLOPs the algorithms take. ``commands`` is what ``add_subparsers`` of argparse has returned."""
    text = "compare what the algorithms cost: bytes and FLOPs"
    parser = commands.add_parser(
        "costs",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, on the data, model and local training of a configuration. "
        "All algorithms have their default hyper-parameters, but the one that the configuration names has its own.",
        epilog="Keys: see fedray keys.",
    )
    add_settings(parser)
    parser.add_argument("--csv", metavar="FILE", help="write the table as CSV too, with all digits")
    parser.set_defaults(function=_costs)


def _costs(options: argparse.Namespace) -> int:
    from fedray.experiment.costs import compare_algorithms
    from fedray.tracking.cost_tables import cost_table

    candidates, scenario, left_out = compare_algorithms(load_settings(options.settings))
    table = cost_table(candidates, scenario)
    table.show()
    for name, reason in left_out.items():
        print(f"without {name}: {reason}")
    if options.csv:
        try:
            table.write(Path(options.csv))
        except OSError as error:
            raise UserError(f"--csv {options.csv}: {error.strerror}") from None
        print(f"wrote {options.csv}")
    return 0
