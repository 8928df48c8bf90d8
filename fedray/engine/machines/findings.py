"""Judges the facts about machines: what would go wrong if runs computed there, and what to do about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.engine.machines.facts import Disk, Facts

CLOCK_SECONDS = 2.0
"""How far apart two machines' clocks may be."""

FULL = 0.05
"""Ray keeps no more objects on a disk, and ends processes, if less than this share of the disk or memory is free."""

FREE_BYTES = 10**9
"""How much should be free on other disks."""

OPEN_FILES = 4096
"""With a lower limit of open files, Ray itself warns."""

ENDING_SECONDS = 600.0
"""How long before its end a Slurm job is worth a word."""

REMOTE_DISKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs", "fuse.")
"""The beginnings of the names of file systems on other machines."""

DECIDING = {
    "fedray": "give all nodes the same code of fedray (`ray up` again does, with cluster/config.yaml)",
    "torch": "install one version on all nodes: bits are not promised with several",
}
"""The packages of which other versions are worse than usual, and why."""

Trouble = tuple[str, str]
"""What would go wrong, and what to do about it."""


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong with runs on some machines. ``trouble`` says what, and ``remedy`` what to do about
    it; both are texts for the user. ``hosts`` has the names of these machines, and is empty if the trouble is a
    difference between machines."""

    hosts: tuple[str, ...]
    trouble: str
    remedy: str


def findings(nodes: Sequence[Facts], clocks: Mapping[str, float] | None = None) -> list[Finding]:
    """Returns what would go wrong if runs computed on the machines whose facts are ``nodes``. ``clocks`` maps the names
    of machines to the seconds by which their clocks are ahead of this machine's, or behind if the number is negative
    (:func:`~fedray.engine.machines.cluster.clocks_of_cluster`). It may be None or lack machines; clocks that it lacks
    are not judged."""
    found: dict[Trouble, list[str]] = {}
    for facts in nodes:
        for judge in (_cpus, _memory, _store, _disks, _files, _gpus, _access, _ports, _slurm):
            for trouble in judge(facts):
                found.setdefault(trouble, []).append(facts["host"])
    for host, ahead in (clocks or {}).items():
        for trouble in _clock(ahead):
            found.setdefault(trouble, []).append(host)
    single = [Finding(tuple(hosts), *trouble) for trouble, hosts in found.items()]
    return single + [Finding((), *trouble) for trouble in _differences(nodes)]


def allowed(amounts: Mapping[str, float | None], *limits: str) -> tuple[float, str]:
    """Finds the limit that decides how many CPUs, or how many bytes of memory, a process may use on a machine. Returns
    a pair: the amount that it allows, and its name. ``amounts`` maps the name of a limit, such as "cgroup", to its
    amount, or to None if there is no such limit. Of the limits that ``limits`` names, the one with the smallest amount
    decides. If there is none of them, the result is all that the machine has, and the name "machine"."""
    known = {name: amount for name in limits if (amount := amounts.get(name)) is not None}
    name = min(known, key=lambda each: known[each], default="machine")
    return known.get(name, amounts["machine"] or 0), name


IN_WORDS = {"affinity": "its CPU set", "cgroup": "its cgroup", "slurm": "Slurm", "machine": "the machine"}


def gigabytes(size: float) -> str:
    """Returns the number of bytes ``size`` as a text, such as ``12 GB`` (of 10^9 bytes)."""
    return f"{size / 1e9:.3g} GB"


def _cpus(facts: Facts) -> Iterator[Trouble]:
    counted = facts["cpus"]["ray"] or 0
    count, limit = allowed(facts["cpus"], "affinity", "cgroup", "slurm")
    if counted > math.ceil(count):
        yield (
            f"Ray counts {counted:g} CPUs, but {IN_WORDS[limit]} allows {count:g}: actors would wait for each other",
            f"start Ray with `ray start --head --num-cpus={max(1, int(count))}` before the run",
        )


def _memory(facts: Facts) -> Iterator[Trouble]:
    counted, free = facts["memory"]["ray"] or 0, facts["memory"]["available"] or 0
    size, limit = allowed(facts["memory"], "cgroup", "slurm")
    if counted > 1.01 * size:
        yield (
            f"Ray counts {gigabytes(counted)} of memory, but {IN_WORDS[limit]} allows {gigabytes(size)}: the system "
            "would end processes without a word",
            f"start Ray with `ray start --head --memory={int(0.6 * size)} --object-store-memory={int(0.3 * size)}`",
        )
    if free < FULL * size:
        yield (
            f"only {gigabytes(free)} of {gigabytes(size)} of memory are free: Ray would end actors",
            "end other programs; `ps aux --sort=-rss | head` shows the largest",
        )


def _store(facts: Facts) -> Iterator[Trouble]:
    store, shm = facts["store"], facts["shm"]
    if store > shm["size"]:
        yield (
            f"Ray's object store does not fit into /dev/shm, which has {gigabytes(shm['size'])}: it would lie on the "
            "disk, and be slow",
            f"make /dev/shm larger: `mount -o remount,size={math.ceil(store / 2**30) + 1}G /dev/shm`, or --shm-size of "
            "docker run",
        )


def _disks(facts: Facts) -> Iterator[Trouble]:
    for disk in facts["disks"]:
        yield from _disk(disk)


def _disk(disk: Disk) -> Iterator[Trouble]:
    where, of_ray = f"{disk['purpose']} ({disk['path']})", disk["purpose"] in ("temporary files", "Ray's files")
    elsewhere = "export RAY_TMPDIR and TMPDIR with a folder on another disk" if of_ray else "name another folder"
    if not disk["writable"]:
        yield f"{where}: you can't write there", elsewhere
    elif of_ray and disk["free"] < FULL * disk["size"]:
        yield (
            f"{where}: the disk is {1 - disk['free'] / disk['size']:.1%} full, and Ray keeps nothing on one that is "
            f"{1 - FULL:.0%} full",
            f"make room (`fedray clean` shows what runs have left), or {elsewhere}",
        )
    elif disk["free"] < FREE_BYTES:
        yield f"{where}: only {gigabytes(disk['free'])} are free", f"make room, or {elsewhere}"
    if of_ray and disk["system"].startswith(REMOTE_DISKS):
        yield (
            f"{where}: on a network disk ({disk['system']}) Ray's sockets fail and clients' states are slow",
            elsewhere.replace("another", "a local"),
        )
    if disk["purpose"] == "cache" and not disk["runs"]:
        yield (
            f"{where}: no program may run there (noexec), so gradients can't be compiled",
            "export TORCHINDUCTOR_CACHE_DIR with a folder on another disk",
        )


def _files(facts: Facts) -> Iterator[Trouble]:
    if facts["files"] < OPEN_FILES:
        yield (
            f"a process may have only {facts['files']} files open: Ray loses connections with many actors",
            "raise the hard limit, `ulimit -Hn`, to 65536 (/etc/security/limits.conf)",
        )


def _gpus(facts: Facts) -> Iterator[Trouble]:
    gpus, hidden = facts["gpus"], facts["gpus"].get("visible") in ("", "-1", "NoDevFiles")
    if gpus["driver"] and not gpus["torch"] and not hidden:
        count, driver = len(gpus["driver"]), gpus["driver"][0][3]
        yield (
            f"torch {facts['versions']['torch']} can't use the {count} GPU{'s' if count > 1 else ''} that the driver "
            f"({driver}) shows: {gpus['reason'] or 'it is built without CUDA'}",
            "install a torch and a driver that fit together, or use engine.device=cpu",
        )
    for name, capability in dict.fromkeys(gpus["torch"]):
        if not _has_kernels(gpus.get("made_for", ()), capability):
            yield (
                f"torch {facts['versions']['torch']} has no kernels for the {name} ({capability})",
                "install a torch that is built for it, or use engine.device=cpu",
            )


def _has_kernels(made_for: Sequence[str], capability: str) -> bool:
    """Returns whether a GPU runs the kernels of a torch that was built for other GPUs: those of the same generation
    that are no newer, or intermediate code of any that is no newer."""
    own = int(capability.removeprefix("sm_"))
    for each in made_for:
        kind, _, number = each.partition("_")
        built = int("".join(filter(str.isdigit, number)) or 0)
        if built <= own and (kind == "compute" or built // 10 == own // 10):
            return True
    return False


def _access(facts: Facts) -> Iterator[Trouble]:
    for each in facts["access"]:
        what, path, others = each["what"], each["path"], each["others"]
        if "w" in others and "Ray cluster" in what:
            yield (
                f"other users can change {path}, by which `ray` finds the cluster to which it sends the token",
                "before `ray start`, export RAY_TMPDIR with a folder of mode 700, as cluster/config.yaml does",
            )
        elif "w" in others:
            yield f"other users can change {what} ({path})", f"chmod o-w {path}"
        elif "r" in others and what in ("Ray's token", "Ray's files"):
            yield f"other users can read {what} ({path})", f"chmod go-rwx {path}"


def _ports(facts: Facts) -> Iterator[Trouble]:
    open_to_all = [each for each in facts["ports"] if not each["token"]]
    if open_to_all:
        names = ", ".join(sorted({each["program"] for each in open_to_all}))
        yield (
            f"who reaches this machine can run programs as you, because Ray asks for no token ({names})",
            "export RAY_AUTH_MODE=token before Ray starts, as cluster/config.yaml does, or keep others from the "
            "network",
        )
    if metrics := [f"{each['program']} at {each['port']}" for each in facts["ports"] if each["metrics"]]:
        yield (
            f"everybody can read Ray's metrics ({', '.join(metrics)}), which ask for no token",
            "before Ray starts, export RAY_enable_metrics_collection=0 AUTOSCALER_METRIC_PORT=-1 "
            "DASHBOARD_METRIC_PORT=-1",
        )


def _slurm(facts: Facts) -> Iterator[Trouble]:
    end = facts["slurm"].get("SLURM_JOB_END_TIME", "")
    if end.isdigit() and (left := int(end) - time.time()) < ENDING_SECONDS:
        yield f"Slurm ends this job in {max(0, left):.0f} s", "ask for more time with sbatch --time"


def _clock(ahead: float) -> Iterator[Trouble]:
    if abs(ahead) > CLOCK_SECONDS:
        yield (
            f"the clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's: times in logs "
            "mislead, and S3 refuses who is 15 minutes off",
            "let chrony or systemd-timesyncd set it",
        )


def _differences(nodes: Sequence[Facts]) -> Iterator[Trouble]:
    """Yields what differs between the nodes, though it should not."""

    def differ(what: str, value: Callable[[Facts], Any], remedy: str) -> Iterator[Trouble]:
        groups: dict[Any, list[str]] = {}
        for facts in nodes:
            groups.setdefault(value(facts), []).append(facts["host"])
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
            parts = [f"{value or 'none'} on {some_of(hosts)}" for value, hosts in ordered]
            yield f"{what} differs: {'; '.join(parts)}", remedy

    same = "install one version on all nodes"
    for name in nodes[0]["versions"] if nodes else ():
        remedy = DECIDING.get(name, same)
        if name == "python":
            yield from differ(name, lambda facts: (facts["versions"]["python"] or "").rpartition(".")[0], same)
        else:
            yield from differ(name, lambda facts, name=name: facts["versions"].get(name), remedy)  # type: ignore[misc]
    kind = "bits are not promised: use nodes of one kind where they matter"
    yield from differ("the CPU", lambda facts: facts["processor"]["model"], kind)
    sets = "bits are not promised: engine.portable_bits=true lets all CPUs use one instruction set"
    yield from differ("the instruction set", lambda facts: facts["processor"]["instructions"], sets)
    with_gpus = [facts for facts in nodes if facts["gpus"]["torch"]]
    kinds = sorted({name for facts in with_gpus for name, _ in facts["gpus"]["torch"]})
    if len(kinds) > 1:
        yield f"the GPU differs: {', '.join(kinds)}", kind
    for path in dict.fromkeys(path for facts in nodes for path in facts["data"]):
        holders = {facts["host"]: facts["data"][path] for facts in nodes if path in facts["data"]}
        if len(set(holders.values())) > 1:
            parts = "; ".join(f"{digest[:8]} on {host}" for host, digest in holders.items())
            yield f"{path} differs: {parts}", "copy it from one node to the others, or remove it where it is not needed"


def some_of(hosts: Sequence[str]) -> str:
    """Returns the names of hosts as a text of which no more than three are spelt out: ``a, b, c and 2 more``."""
    shown = ", ".join(hosts[:3])
    return f"{shown} and {len(hosts) - 3} more" if len(hosts) > 3 else shown
