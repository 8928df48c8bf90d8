"""The command ``fedray clean``: shows what runs have left on this machine or cluster, and removes what nobody uses any
more."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.cli.doctor import connected
from fedray.cli.listing import aligned
from fedray.cli.settings import load_settings, of_section, split
from fedray.config import Config
from fedray.config.reading import assign

if TYPE_CHECKING:
    from fedray.engine.machines.leftovers import Leftover
    from fedray.tuning.settings import TuneConfig

DESCRIPTION = """\
Show what runs keep for their own use on this machine, or on all nodes of a Ray
cluster, and whether a process still uses it. With --yes, remove what nobody
uses any more: killed runs leave clients' states, Ray's files, and files that
were being written. Results and checkpoints are never touched, and a run that
goes on needs nothing of what is removed.

Folders of runs are looked for in run.output and tune.output, or, if these are
URIs, in their working copies; clients' states also in engine.spill_dir."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray clean`` to the command line, with its arguments and help. The command shows what runs
    have left behind, and removes it if the user wants it. ``commands`` is what ``add_subparsers`` of argparse has
    returned."""
    parser = commands.add_parser(
        "clean",
        help="show and remove what killed runs have left",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    keys = "run.output, run.working_copy, tune.output, tune.working_copy, engine.spill_dir, engine.address"
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help=keys)
    parser.add_argument("--cluster", action="store_true", help="on all nodes of the Ray cluster (engine.address)")
    parser.add_argument("--yes", action="store_true", help="remove what nobody uses")
    parser.set_defaults(function=_clean)


def _clean(options: argparse.Namespace) -> int:
    files, overrides = split(options.settings)
    of_tune = of_section(overrides, "tune")
    config = load_settings([*files, *(text for text in overrides if text not in of_tune)])
    places = [config.run.place, _tune(of_tune).place]
    found, silent = _leftovers(config, places, options.cluster, options.yes)
    for line in (*table_of(found), *(f"{host} says nothing: {reason}" for host, reason in silent.items())):
        print(line)
    left = [each for each in found if each.used is False and not each.removed]
    if options.yes and left:
        print(f"{len(left)} could not be removed")
    elif left:
        words = "fedray clean --cluster --yes" if options.cluster else "fedray clean --yes"
        print(f"{words} removes the {len(left)} that nobody uses ({_size(left)})")
    elif not found:
        print("nothing is left")
    return 1 if silent or (options.yes and left) else 0


def _tune(overrides: Sequence[str]) -> TuneConfig:
    """Returns the settings of a sweep that has been given ``overrides`` of ``tune.*``."""
    from fedray.tuning.settings import read_tune, section

    values: dict[str, Any] = {}
    for override in overrides:
        assign(values, override)
    return read_tune(None, section(values, "tune", ""), "")


def _leftovers(
    config: Config, places: Sequence[Path], cluster: bool, remove: bool
) -> tuple[list[Leftover], dict[str, str]]:
    from fedray.engine.machines.leftovers import find_leftovers

    here = find_leftovers(places, config.engine.spill_dir, remove)
    if not cluster:
        return here, {}
    with connected(config, print):
        from fedray.engine.machines.cluster import leftovers_of_cluster

        there, silent = leftovers_of_cluster(config.engine.spill_dir, remove, config.engine.start_timeout, print)
    known = {(each.host, each.path) for each in here}
    return here + [each for each in there if (each.host, each.path) not in known], silent


def table_of(leftovers: Sequence[Leftover]) -> Iterator[str]:
    """Yields the lines of the table that ``fedray clean`` prints: a row for each of ``leftovers``, the files and
    folders that runs have made for their own use. A row says how large its file or folder is, and whether a process
    still uses it. Yields nothing if ``leftovers`` is empty."""
    if leftovers:
        rows = [("machine", "what", "size", "last change", "", "path", "of")]
        for each in sorted(leftovers, key=lambda each: (each.host, each.path)):
            use = "removed" if each.removed else {True: "in use", False: "left", None: "unknown use"}[each.used]
            age = _ago(time.time() - each.changed)
            rows.append((each.host, each.kind, _size([each]), age, use, each.path, each.run))
        yield from aligned(rows)


def _size(leftovers: Sequence[Leftover]) -> str:
    return f"{sum(each.size for each in leftovers) / 1e6:,.1f} MB"


def _ago(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"
