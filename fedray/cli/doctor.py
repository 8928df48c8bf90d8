"""The command ``fedray doctor``: says what would go wrong on this machine or cluster, before a run fails because of
it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.cli.listing import aligned
from fedray.cli.settings import add_settings, load_settings, of_section, split
from fedray.config import Config
from fedray.errors import UserError

if TYPE_CHECKING:
    from fedray.engine.machines.facts import Facts
    from fedray.engine.machines.findings import Finding

DESCRIPTION = """\
Examine this machine, or all nodes of a Ray cluster, and say what would go wrong
if runs computed there, each with what to do about it.

A configuration, or keys such as engine.spill_dir=DIR, say where runs would keep
their files. With --cluster and keys of data, the digests of the data set's
files are compared between the nodes that have them.

Exit codes: 0 nothing would go wrong, 1 something would, 2 a mistake in what was
asked for."""


def add_parser(commands: Any) -> None:
    """Adds the command ``fedray doctor`` to the command line, with its arguments and help. The command says what would
    go wrong if runs computed on this machine or cluster. ``commands`` is what ``add_subparsers`` of argparse has
    returned."""
    parser = commands.add_parser(
        "doctor",
        help="say what would go wrong on this machine or cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings(parser)
    parser.add_argument("--cluster", action="store_true", help="examine all nodes of the Ray cluster (engine.address)")
    parser.set_defaults(function=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    config = load_settings(options.settings)
    if options.cluster:
        files, overrides = split(options.settings)
        nodes, clocks, found = _of_cluster(config, asks_for_data=bool(files or of_section(overrides, "data")))
    else:
        from fedray.engine.machines.facts import gather
        from fedray.engine.machines.findings import findings

        nodes, clocks = [gather({**_folders(config), "runs": str(config.run.place)})], {}
        found = findings(nodes)
    for line in (*table_of(nodes, clocks), *_software(nodes), "", *_of_findings(found)):
        print(line)
    return 1 if found else 0


def _folders(config: Config) -> dict[str, str]:
    """Returns the paths of the folders that a run uses on each node, by what they are for, such as "cache"."""
    from fedray.engine.ray.local_cluster import private_folder
    from fedray.util.cache import cache_folder

    spill = {"clients' states": config.engine.spill_dir} if config.engine.spill_dir else {}
    return {"Ray's files": str(private_folder()), "cache": str(cache_folder()), **spill}


def _of_cluster(config: Config, asks_for_data: bool) -> tuple[list[Facts], dict[str, float], list[Finding]]:
    """Examines all nodes of the Ray cluster. Returns the facts about each node, by the name of the node how many
    seconds its clock is ahead of this machine's, and what would go wrong."""
    with connected(config, print):
        from fedray.engine.machines.cluster import clocks_of_cluster, facts_of_cluster
        from fedray.engine.machines.findings import Finding, findings

        paths = _data_files(config) if asks_for_data else []
        patience = config.engine.start_timeout
        nodes, silent = facts_of_cluster(_folders(config), paths, patience, print)
        clocks = clocks_of_cluster(patience)
    log = "look at raylet.err in the folder of Ray's logs there"
    lost = [Finding((host,), f"tells nothing about itself: {reason}", log) for host, reason in silent.items()]
    return nodes, clocks, lost + findings(nodes, clocks)


def connected(config: Config, say: Callable[[str], None]) -> Any:
    """Connects this process to the Ray cluster that a run with the configuration ``config`` would join, for the option
    ``--cluster`` of commands. Returns a context manager that ends the connection.

    ``say(line)`` shows a line to the user. Raises :class:`UserError` if there is no cluster to join, so that such a run
    would start one.
    """
    from fedray.engine.ray.cluster import existing_cluster
    from fedray.engine.ray.start import RayStart

    if existing_cluster(config.engine) is None:
        raise UserError("--cluster: this machine belongs to no Ray cluster; engine.address=HOST:PORT names another")
    start = RayStart(config.engine, say, at_once=True)
    start.ready()
    return start


def _data_files(config: Config) -> list[str]:
    """Returns the paths of the files from which the data are read, and tells the user about them."""
    from fedray.data.sources.source import source_of

    paths = [path for path, *_ in source_of(config.data, config.task).files]
    size = sum(Path(path).stat().st_size for path in paths)
    print(f"comparing {len(paths)} files of {config.data.source} ({size / 1e9:.3g} GB) between the nodes ...")
    return paths


def table_of(nodes: Sequence[Facts], clocks: Mapping[str, float]) -> Iterator[str]:
    """Yields the lines of the table that ``fedray doctor`` prints, with a row for each machine: its CPUs, memory, GPUs,
    the sizes of Ray's object store and of /dev/shm, and free disk space.

    ``nodes`` are the facts about the machines (:func:`fedray.engine.machines.facts.gather`). ``clocks`` has, by the
    name of a machine, how many seconds its clock is ahead of this machine's; if it is empty, the table has no column
    for the clock.
    """
    from fedray.engine.machines.findings import IN_WORDS, allowed, gigabytes

    rows = [("machine", "CPUs", "memory free", "GPUs", "object store", "/dev/shm", "temporary files free", "clock")]
    for facts in nodes:
        count, limit = allowed(facts["cpus"], "affinity", "cgroup", "slurm")
        total = facts["cpus"]["machine"] or 0
        size, _ = allowed(facts["memory"], "cgroup", "slurm")
        disk = facts["disks"][0]
        ahead = clocks.get(facts["host"])
        gpus = Counter(name for name, _ in facts["gpus"]["torch"])
        rows.append(
            (
                facts["host"],
                f"{count:g}" if count >= total else f"{count:g} of {total:g} ({IN_WORDS[limit]})",
                f"{gigabytes(facts['memory']['available'] or 0)} of {gigabytes(size)}",
                ", ".join(f"{count} x {name}" for name, count in gpus.items()) or str(len(facts["gpus"]["driver"])),
                gigabytes(facts["store"]),
                gigabytes(facts["shm"]["size"]),
                f"{gigabytes(disk['free'])} of {gigabytes(disk['size'])}",
                "" if ahead is None else f"{ahead:+.1f} s",
            )
        )
    yield from aligned([row if clocks else row[:-1] for row in rows])


def _software(nodes: Sequence[Facts]) -> Iterator[str]:
    """Yields a line about versions and processors for each group of machines in which they are the same."""
    from fedray.engine.machines.findings import some_of

    groups: dict[str, list[str]] = {}
    for facts in nodes:
        versions = ", ".join(f"{name} {version or 'none'}" for name, version in facts["versions"].items())
        processor = " with ".join(filter(None, facts["processor"].values()))
        groups.setdefault(f"{versions}; {processor}", []).append(facts["host"])
    for line, hosts in groups.items():
        yield f"{some_of(hosts)}: {line}" if len(groups) > 1 else line


def _of_findings(found: Sequence[Finding]) -> Iterator[str]:
    from fedray.engine.machines.findings import some_of

    if not found:
        yield "nothing would go wrong"
        return
    yield f"{len(found)} thing{'s' if len(found) > 1 else ''} would go wrong:"
    for each in found:
        yield f"  {some_of(each.hosts) or 'between the nodes'}: {each.trouble} -> {each.remedy}"
