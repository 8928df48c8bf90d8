"""The command ``fedray data``: shows how data are spread over clients, and prepares large data sets."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fedray.cli.settings import load_settings
from fedray.config import Config
from fedray.errors import UserError, near_miss
from fedray.util.files import is_there

ACTIONS = ("info", "prepare")

DESCRIPTION = """\
info (unless you say prepare) shows how the data are spread over the clients:
their number and sizes, classes, shapes, and how different they are.

prepare checks all samples, reads and scales them once, and writes them into
files that runs map into memory (data.access=mapped). All nodes of the Ray
cluster that this machine belongs to help to read, and each gets the files.
After kill -9, give the same command again to resume.

SOURCE is the same as data.source=SOURCE. Keys: see fedray keys."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray data`` to the command line, with its arguments and help. The command shows how data are
    spread over the clients, or prepares a large data set. ``commands`` is what ``add_subparsers`` of argparse has
    returned."""
    parser = commands.add_parser(
        "data",
        help="show how the data are spread over the clients, or prepare them",
        description=DESCRIPTION,
        usage="fedray data [info | prepare] [SOURCE | CONFIG.yaml | key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--plot", metavar="FILE", help="info: draw who holds which labels, as a picture")
    parser.set_defaults(function=_data)


def _data(options: argparse.Namespace) -> int:
    words = options.settings
    action = words.pop(0) if words and words[0] in ACTIONS else "info"
    settings = [_source_or_file(word) for word in words]
    if action == "prepare":
        if options.plot:
            raise UserError("--plot goes with fedray data info, not with prepare")
        return _prepare(load_settings(settings))
    return _info(load_settings(settings), options.plot)


def _source_or_file(word: str) -> str:
    """Returns ``data.source=WORD`` if ``word`` is the name of a data source, and otherwise ``word`` itself, a file or a
    setting. Raises :class:`UserError` if it is neither."""
    from fedray.data.sources.source import SOURCES

    if word in SOURCES:
        return f"data.source={word}"
    if "=" in word or word.endswith((".yaml", ".yml")) or is_there(word):
        return word
    raise UserError(f"there is no source or file {word!r}{near_miss(word, [*ACTIONS, *SOURCES])}")


def _info(config: Config, plot: str | None) -> int:
    from fedray.data.partitions.describe import describe
    from fedray.data.partitions.holdings import Holdings
    from fedray.data.partitions.plot import draw_holdings
    from fedray.experiment.resolve import resolve_data
    from fedray.tracking.progress import Display

    with Display().reading() as map_all:
        found = resolve_data(config, map_all=map_all)
    for line in (*describe(found.data, found.access), *found.notes):
        print(line)
    if plot:
        try:
            draw_holdings(Holdings.of(found.data)).savefig(Path(plot), dpi=150)
        except (OSError, ValueError) as error:
            raise UserError(f"--plot {plot}: {getattr(error, 'strerror', None) or error}") from None
        print(f"wrote {plot}")
    return 0


def _prepare(config: Config) -> int:
    from fedray.data.storage.mapped import MappedFile, shipped
    from fedray.engine.ray.cluster import existing_cluster
    from fedray.engine.ray.start import RayStart
    from fedray.experiment.resolve import resolve_data
    from fedray.tracking.progress import Display

    if config.data.access not in ("auto", "mapped"):
        raise UserError(f"data.access={config.data.access}: data are prepared for data.access=mapped")
    config = config.model_copy(update={"data": config.data.model_copy(update={"access": "mapped"})})
    display = Display()
    display.say("fedray: loading ...")
    cluster = config.engine.kind == "ray" and existing_cluster(config.engine)
    with RayStart(config.engine, display.say, at_once=bool(cluster)) as start, display.reading() as map_all:
        if cluster:
            from fedray.engine.ray.preparing import map_on_cluster

            start.ready()
            map_all = partial(map_on_cluster, progress=display.read, say=display.say)
        found = resolve_data(config, map_all=map_all)
    data = found.data
    where = shipped(data.y)
    assert isinstance(where, MappedFile)
    display.say(f"prepared {len(data.y):,} training and {len(data.y_test):,} test samples in {Path(where.path).parent}")
    display.say("runs with the same settings and data.access=mapped read them")
    return 0
