"""The command line in a process of its own, in odd surroundings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedray

SETTINGS = {"algorithm.name": "fedavg", "model.name": "logistic", "run.rounds": 2, "data.clients": 10}


ROOT = Path(fedray.__file__).parent.parent


def run(
    folder: Path,
    *arguments: str,
    change: Mapping[str, str | None] | None = None,
    before: tuple[str, ...] = (),
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs `fedray run` in ``folder``, with environment variables changed; None takes one out. ``before`` are the words
    of a command that starts it."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), **(change or {})}
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run(
        [*before, sys.executable, str(ROOT / "fedray" / "run.py"), *settings, *arguments],
        cwd=folder,
        env={name: value for name, value in found.items() if value is not None},
        encoding="utf-8",
        errors="surrogateescape",
        timeout=200,
        check=False,
        **how,
    )


def model_of(folder: Path) -> str:
    """Returns the sha256 of the model of the one run below ``folder``."""
    (summary,) = folder.glob("**/summary.json")
    return json.loads(summary.read_text())["model_sha256"]


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the one line of a run that must have ended with exit code 2, beside warnings of settings that replace
    others."""
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("warning: "))
    assert line.startswith("fedray: ")
    return line.removeprefix("fedray: ")
