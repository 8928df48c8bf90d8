"""Decides whether a Ray cluster is shown the user's token. This module imports no Ray, because Ray reads the decision
when it is imported."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from fedray.config import EngineConfig


def authentication(engine: EngineConfig) -> dict[str, str]:
    """Decides whether Ray shows the user's token to the cluster that a run connects to. Returns the environment
    variable that makes Ray do so, as ``{"RAY_AUTH_MODE": "token"}``, or an empty dict if fedray must not set it.
    ``engine`` is the section ``engine`` of the configuration.

    A cluster that ``ray start`` has made asks for the token if the user has one. Without this variable, Ray shows the
    token only to a cluster that Ray itself has found. But fedray finds the cluster and passes its address to Ray, so it
    sets the variable. The result is empty if the user has no token, or has named a cluster (``engine.address`` or
    ``RAY_ADDRESS``), which gets the token only if the user has set the variable, too. It is also empty if Ray has been
    imported already: then only Ray's daemons would read the variable, and refuse this process.
    """
    named = (engine.address or os.environ.get("RAY_ADDRESS") or "auto") not in ("auto", "local")
    if named or not has_token() or "ray" in sys.modules:
        return {}
    return {"RAY_AUTH_MODE": "token"}


def has_token() -> bool:
    """Returns whether the user has a token for Ray's clusters in one of the places where Ray looks for it: the variable
    ``RAY_AUTH_TOKEN``, or a file, ``RAY_AUTH_TOKEN_PATH`` or else ``~/.ray/auth_token``."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return True
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").is_file()
    return False
