"""Says for which models the same configuration always gives the same bits, according to a table that
``analysis/benchmarks/bits.py`` has measured."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("bits.yaml")
"""For each kind of device: where and with which torch version it was measured, and for each model and precision the
operations without a deterministic version, or other causes of different bits."""

DEVICES = {"cpu": "CPU", "cuda": "GPU"}


@cache
def measured() -> dict[str, Any]:
    """Returns the content of :data:`TABLE`."""
    return dict(yaml.safe_load(TABLE.read_text("utf-8")) or {})


def promise(name: str) -> str:
    """Returns a text of one line that says on which kinds of devices the model ``name`` always gives the same bits."""
    if not any(name in found["models"] for found in measured().values()):
        return "the same bits: not measured; a run on a GPU says before round 1 what is not deterministic"
    return "the same bits on " + "; ".join(f"a {words}: {_on(device, name)}" for device, words in DEVICES.items())


def where_measured() -> str:
    """Returns a sentence that says on which machines and versions the table is based."""
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
