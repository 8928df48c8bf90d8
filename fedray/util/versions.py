"""The versions of what fedray computes with, found without importing it."""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions_line(own: str) -> str:
    """Returns fedray's version ``own`` and those of Python, torch, CUDA and Ray in one line, as a report of a fault
    needs them: ``fedray 0.2.0 (Python 3.11.4, torch 2.11.0, CUDA 12.8, Ray 2.52.1)``."""
    found = [f"Python {platform.python_version()}"]
    for name, title in (("torch", "torch"), ("ray", "Ray")):
        try:
            found.append(f"{title} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"no {title}")
        if name == "torch":
            found.append(_cuda())
    return f"fedray {own} ({', '.join(found)})"


def _cuda() -> str:
    """Returns for which CUDA torch was built, or that it was built without."""
    home = importlib.util.find_spec("torch")
    place = Path(home.origin).parent / "version.py" if home and home.origin else None
    text = place.read_text(encoding="utf-8") if place and place.exists() else ""
    built = re.search(r"^cuda[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return f"CUDA {built[1]}" if built else "no CUDA"
