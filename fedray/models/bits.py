"""Says for which models the same configuration gives the same bits again, by a table that was measured by
``analysis/benchmarks/bits.py``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("bits.yaml")
"""For each kind of device: where and with which torch it was measured, and for each model and precision the operations
without a deterministic version, or what else gave other bits."""

DEVICES = {"cpu": "CPU", "cuda": "GPU"}


@cache
def measured() -> dict[str, Any]:
    """Returns the table."""
    return dict(yaml.safe_load(TABLE.read_text("utf-8")) or {})


def promise(name: str) -> str:
    """Returns on which kinds of devices the bits of the model ``name`` are promised, as a text of one line."""
    if not any(name in found["models"] for found in measured().values()):
        return "the same bits: not measured; a run on a GPU says before round 1 what is not deterministic"
    return "the same bits on " + "; ".join(f"a {words}: {_on(device, name)}" for device, words in DEVICES.items())


def where_measured() -> str:
    """Returns a sentence that says what the table stands on."""
    parts = []
    for device, words in DEVICES.items():
        found = measured().get(device)
        what = "not measured"
        if found:
            what = f"measured on {found['device']} with torch {found['torch']} in {', '.join(found['precisions'])}"
        parts.append(f"on a {words} {what}")
    return "The same bits: " + "; ".join(parts) + " (fedray/engine/README.md#the-same-bits)"


def _on(device: str, name: str) -> str:
    models = measured().get(device, {}).get("models", {})
    if name not in models:
        return "not measured"
    causes: dict[str, list[str]] = {}
    for precision, operations in models[name].items():
        for operation in operations:
            causes.setdefault(operation, []).append(precision)
    if not causes:
        return "yes"
    return "no (" + "; ".join(f"{', '.join(where)}: {operation}" for operation, where in causes.items()) + ")"
