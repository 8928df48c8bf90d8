"""Finds the ports of this machine at which Ray's processes can be reached from other machines. Like
:mod:`fedray.engine.machines.facts`, this module is sent to nodes by value, because they may have no fedray."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
from collections.abc import Sequence
from typing import Any, TypedDict

PROBE_SECONDS = 1.0
"""How long to wait for an answer to a request."""


class Port(TypedDict):
    """A TCP port at which other machines may reach a Ray process of this user, because it is not on the loopback.

    ``program`` is the kind of process, such as ``raylet``, and ``address`` the IP address at which it listens.
    ``token`` says whether it asks for Ray's token, and ``metrics`` whether the port answers HTTP requests for metrics,
    without a token.
    """

    program: str
    address: str
    port: int
    token: bool
    metrics: bool


def open_ports() -> list[Port]:
    """Returns the ports of this machine at which other machines can reach this user's Ray processes. The list is empty
    if Ray is not installed here."""
    found: list[Port] = []
    with contextlib.suppress(ImportError):
        import ray  # noqa: F401  psutil comes with it
        import psutil  # isort: skip

        for process in psutil.process_iter(["cmdline", "uids"]):
            words = process.info["cmdline"] or ()
            program = _program(words)
            if program and process.info["uids"] and process.info["uids"].real == os.getuid():
                with contextlib.suppress(psutil.Error):
                    found += _ports(program, process)
    return found


def _ports(program: str, process: Any) -> list[Port]:
    # processes that Ray gives a title have lost their own environment, which is that of the raylet that started them
    token = any(each.environ().get("RAY_AUTH_MODE") == "token" for each in (process, *process.parents()[:1]))
    # older versions of Ray bring a psutil with another name for it
    connections = getattr(process, "net_connections", None) or process.connections
    listening = {each.laddr for each in connections("tcp") if each.status == "LISTEN"}
    return [
        {
            "program": program, "address": ip, "port": port, "token": token,
            "metrics": _serves_metrics(ip, port),
        }
        for ip, port in sorted(listening)
        if not ipaddress.ip_address(ip).is_loopback
    ]  # fmt: skip


def _program(words: Sequence[str]) -> str:
    """Returns what the Ray process with this command is, such as ``raylet`` or ``ClientActor``, or an empty text if it
    is no process of Ray."""
    if words and words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0]
    for word in words[:4]:
        if "/ray/" in word and (word.endswith(".py") or os.access(word, os.X_OK)):
            return os.path.basename(word).removesuffix(".py")
    return ""


def _serves_metrics(ip: str, port: int) -> bool:
    reached = "127.0.0.1" if ipaddress.ip_address(ip).is_unspecified else ip
    connection = http.client.HTTPConnection(reached, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
