"""The measured systems' side of ``compare.py``: each is in processes of its own, and asks before each block of rounds.

The first round is run at once. Rounds are timed by the system itself, from the answer of ``compare.py`` to the next
question, so that nothing that it does between two rounds is left out.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, TextIO

from workloads import WORKLOADS, Workload


class Gate:
    """To be called after each round; it returns once another one is wanted, or true if none is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.left = 1
        self.began = time.perf_counter()

    def __call__(self) -> bool:
        ended = time.perf_counter()
        self.left -= 1
        if self.left:
            return False
        self.left = self.ask(ended - self.began)
        self.began = time.perf_counter()
        return not self.left

    def ask(self, seconds: float) -> int:
        """Report the seconds of a block; how many rounds are wanted next."""
        self._say(seconds=seconds)
        return int(self._file.readline() or 0)

    def leave(self, steps: int, *packages: str) -> None:
        """The last word: how many SGD steps the clients made in all, and which packages made them."""
        self._say(steps=steps, versions={name: version(name) for name in packages})

    def _say(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    @cached_property
    def _file(self) -> TextIO:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        return connection.makefile("rw")


def arguments() -> argparse.Namespace:
    """What ``compare.py`` tells a system: ``workload``, ``clients`` and the gate's ``address``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("clients", type=int)
    parser.add_argument("address")
    return parser.parse_args()


def workload(name: str, clients: int) -> Workload:
    return replace(WORKLOADS[name], clients=clients)
