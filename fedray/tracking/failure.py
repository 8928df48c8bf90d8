"""Records in a run's folder that an error has ended the run, and why."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from pathlib import Path

from fedray.errors import UserError, first_line, last_line
from fedray.util.files import write_whole

FAILED = "failed"
"""The ``status`` in summary.json of a run that an error has ended. It goes on like one that was killed."""


def write_failure(folder: Path, error: BaseException) -> None:
    """Records in the run's ``folder`` that ``error`` has ended the run: summary.json gets the keys ``status``
    ("failed"), ``reason``, ``host`` and ``rounds``, and log.txt a line.

    The host is the attribute ``host`` of the error, if it has one, and otherwise this machine. A file that can't be
    written, because the disk is full, for example, is skipped.
    """
    if not (folder / "config.yaml").exists():
        # not a run folder yet, and one file alone would make it something that no run may use
        return
    text = str(error).strip()
    reason = first_line(error) if isinstance(error, Exception) else "stopped at once"
    if "\n" in text:
        # the message has a traceback, whose last line says what was raised
        reason = f"{reason}: {last_line(text)}"
    host = getattr(error, "host", platform.node())
    summary = {
        "status": FAILED, "reason": reason, "host": host, "rounds": _rounds(folder),
        "final_accuracy": None, "model_sha256": None,
    }  # fmt: skip
    with contextlib.suppress(OSError, UserError):
        write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    with contextlib.suppress(OSError), (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} failed on {host} after round {summary['rounds']}: {reason}\n")


def has_failed(folder: Path) -> bool:
    """Returns whether an error has ended the run in ``folder``, and the run has not been resumed since."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((folder / "summary.json").read_text()).get("status") == FAILED)
    return False


def _rounds(folder: Path) -> int:
    """Returns the number of the last round in the run's metrics.csv, or 0."""
    with contextlib.suppress(OSError, ValueError):
        rows = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        return int(rows[-1].split(",")[0]) if len(rows) > 1 else 0
    return 0
