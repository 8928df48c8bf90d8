"""What the algorithms of a suite are given alike, so that nothing but the algorithm differs between them.

Left to themselves (``auto``) some algorithms put a projection head on the model, weigh clients as their paper does, or
hold samples out for the server. A suite that does not say anything of ``model.head``, ``train.weighting`` or
``data.public_samples`` has one value for all; one that says ``auto`` leaves each its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedray.config import load
from fedray.tuning.finals import label_of
from fedray.tuning.spec import SweepSpec

if TYPE_CHECKING:
    from fedray.algorithms import Algorithm

Algorithms = Mapping[str, "type[Algorithm]"]


def alike(specs: Sequence[SweepSpec]) -> tuple[list[SweepSpec], list[str]]:
    """The sweeps with one architecture, weighting and public set, and a line for each that some would not have."""
    algorithms = {label_of(spec): algorithm_of(spec) for spec in specs}
    common: dict[str, Any] = {}
    notes: list[str] = []
    for key, choose in (("model.head", _head), ("train.weighting", _weighting), ("data.public_samples", _public)):
        if not any(key in spec.base or key in spec.raw_space for spec in specs):
            common[key], why = choose(algorithms, specs)
            if why:
                notes.append(f"{key}={common[key]} for all, {why}; with {key}=auto each has its own")
    return [replace(spec, base={**spec.base, **common}) for spec in specs], notes


def algorithm_of(spec: SweepSpec) -> type[Algorithm]:
    """The class of the algorithm that a sweep tunes."""
    from fedray.algorithms import find_algorithm

    return find_algorithm(load(spec.base).algorithm.name)


def _head(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[str, str]:
    """The smallest head that serves all."""
    from fedray.models.heads import DEFAULT

    needing = [label for label, each in algorithms.items() if each.needs_head != "nothing"]
    most = max((each.needs_head for each in algorithms.values()), key=list(DEFAULT).index)
    return DEFAULT[most], f"as {' and '.join(needing)} can't do without" if needing else ""


def _weighting(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[str, str]:
    others = [label for label, each in algorithms.items() if each.weighting != "samples"]
    return "samples", f"where papers have uniform weights for {', '.join(others)}" if others else ""


def _public(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[int, str]:
    from fedray.data.source import load_source

    needing = [label for label, each in algorithms.items() if each.needs_public]
    if not needing:
        return 0, ""
    data = load(specs[0].base).data
    public = load_source(data.source, data.root).public_by_default
    return public, f"held out of the clients' samples, as the server of {' and '.join(needing)} trains on them"
