"""Examines and cleans all nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fedray.engine.machines import facts, ports
from fedray.engine.machines.facts import Facts
from fedray.engine.machines.leftovers import Leftover, find_leftovers
from fedray.engine.ray.cluster import ask_nodes
from fedray.errors import first_line, last_line

BY_VALUE = (facts, ports)
"""The modules that are sent to the nodes, which need not have them."""


@dataclass
class Answers:
    """The results of a function that was called on all nodes of a cluster. ``given`` has a pair for each node that has
    answered: Ray's description of the node (a dict), and the function's result. ``silent`` maps the name of each other
    node to the reason why there is no result."""

    given: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)


def facts_of_cluster(
    folders: Mapping[str, str], data: Sequence[str], timeout: float, say: Callable[[str], None]
) -> tuple[list[Facts], dict[str, str]]:
    """Gathers facts about all nodes of the cluster, such as their memory and versions of packages (``fedray doctor``).
    Returns a list with the facts about each node that has answered within ``timeout`` seconds, and a dict that maps the
    name of each other node to the reason why it gave none. The facts include the CPUs and the memory that Ray counts on
    the node.

    ``folders`` maps purposes to paths of folders, and ``data`` are paths of data files, as for
    :func:`~fedray.engine.machines.facts.gather`. ``say(line)`` shows a line to the user while nodes are waited for.
    """
    pickling: Any = ray.cloudpickle
    for module in BY_VALUE:
        pickling.register_pickle_by_value(module)
    try:
        answers = _asked(partial(facts.gather, folders, data), timeout, say)
    finally:
        for module in BY_VALUE:
            pickling.unregister_pickle_by_value(module)
    for node, found in answers.given:
        counted = node["Resources"]
        found["cpus"]["ray"] = counted.get("CPU", 0)
        found["store"] = int(counted.get("object_store_memory", found["store"]))
        found["memory"]["ray"] = counted.get("memory", 0) + found["store"]
    return [found for _, found in answers.given], answers.silent


def clocks_of_cluster(timeout: float) -> dict[str, float]:
    """Compares the nodes' clocks with this machine's. Returns a dict that maps the name of each node to the number of
    seconds by which its clock is ahead, or behind if the number is negative. Because an answer takes some time, the
    clocks may differ by more; the number is 0 if that time may explain the whole difference. Nodes that have not
    answered within ``timeout`` seconds are left out."""
    ahead = {}
    for _ in range(2):  # the second time the processes that answer are there already
        began = time.time()
        for node, answer in ask_nodes(time.time, timeout, lambda line: None):
            if answer is not None:
                shown = ray.get(answer)
                low, high = shown - time.time(), shown - began
                ahead[node["NodeManagerHostname"]] = low if low > 0 else min(high, 0.0)
    return ahead


def leftovers_of_cluster(
    spill_dir: str | None, remove: bool, timeout: float, say: Callable[[str], None]
) -> tuple[list[Leftover], dict[str, str]]:
    """Finds the files and folders, outside of run folders, that runs have left on the nodes of the cluster (``fedray
    clean``). If ``remove`` is true, those that nobody uses any more are removed. ``spill_dir`` is a further folder in
    which clients' states are looked for (``engine.spill_dir``), or None.

    Returns a list of the files and folders that were found, and a dict that maps the name of each node that has not
    answered within ``timeout`` seconds, or failed, to the reason. ``say(line)`` shows a line to the user while nodes
    are waited for.
    """
    answers = _asked(partial(find_leftovers, (), spill_dir, remove), timeout, say)
    found: dict[tuple[str, str], Leftover] = {}
    for _, leftovers in answers.given:
        for each in leftovers:
            # several nodes of a cluster may be on one machine, and only one of them can have removed it
            other = found.get((each.host, each.path), each)
            found[each.host, each.path] = other if other.removed else each
    return list(found.values()), answers.silent


def _asked(what: Callable[[], Any], timeout: float, say: Callable[[str], None]) -> Answers:
    answers = Answers()
    for node, answer in ask_nodes(what, timeout, say):
        host = node["NodeManagerHostname"]
        try:
            if answer is None:
                answers.silent[host] = f"no answer in {timeout:g} s"
            else:
                answers.given.append((node, ray.get(answer)))
        except RayTaskError as error:
            answers.silent[host] = last_line(str(error))
        except RayError as error:
            answers.silent[host] = first_line(error)
    return answers
