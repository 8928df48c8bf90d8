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
    """Returns what was measured about which models give the same bits in repeated runs, as read from :data:`TABLE`.

    The result maps each kind of device that was measured (``cpu``, ``cuda``) to a dict with the keys

    - ``device``, ``torch`` and ``measured``: the device's name, the version of torch, and the date.
    - ``precisions``: the list of precisions that were measured, such as ``fp32``.
    - ``models``: for each model's name a dict that maps each precision to a list of causes of different bits. The list
      is empty if the bits are the same.
    """
    return dict(yaml.safe_load(TABLE.read_text("utf-8")) or {})


def promise(name: str) -> str:
    """Returns a text of one line for the command ``fedray models``: on which kinds of devices a repeated run of the
    model ``name`` gives the same bits, such as ``the same bits on a CPU: yes; a GPU: not measured``."""
    if not any(name in found["models"] for found in measured().values()):
        return "the same bits: not measured; a run on a GPU says before round 1 what is not deterministic"
    return "the same bits on " + "; ".join(f"a {words}: {_on(device, name)}" for device, words in DEVICES.items())


def where_measured() -> str:
    """Returns a sentence for the command ``fedray models`` that says on which devices, with which torch versions and in
    which precisions it was measured whether a repeated run gives the same bits."""
    parts = []
    for device, words in DEVICES.items():
        found = measured().get(device)
        what = "not measured"
        if found:
            what = f"measured on {found['device']} with torch {found['torch']} in {', '.join(found['precisions'])}"
        parts.append(f"on a {words} {what}")
    return "The same bits: " + "; ".join(parts) + " (see 'The same bits' in the engine's documentation)"


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
