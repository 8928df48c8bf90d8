"""Decides whether a Ray cluster is shown the user's token. It imports no Ray, because Ray reads the decision when it is
imported."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedray.config import EngineConfig


def authentication(engine: EngineConfig) -> dict[str, str]:
    """Returns the environment variable with which Ray shows the user's token to a cluster, or an empty dict.

    A cluster that ``ray start`` has made asks for the token, if the user has one. Ray shows it by itself to clusters
    that it has found itself, but not to the address that fedray gives it. A cluster at an address that the user has
    named gets a token only if the user has set the variable.
    """
    named = (engine.address or os.environ.get("RAY_ADDRESS") or "auto") not in ("auto", "local")
    if named or not has_token():
        return {}
    return {"RAY_AUTH_MODE": "token"}


def has_token() -> bool:
    """Returns whether the user has a token for Ray's clusters, where Ray looks for it."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return True
    with contextlib.suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").is_file()
    return False
