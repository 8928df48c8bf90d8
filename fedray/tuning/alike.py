"""Settings that all algorithms of a suite share, so that nothing but the algorithm differs between them.

With ``auto``, some algorithms put a projection head on the model, weigh clients as their paper does, or hold samples
out for the server. If a suite does not set ``model.head``, ``train.weighting`` or ``data.public_samples``, it uses one
value for all algorithms; if it sets ``auto``, each algorithm has its own.
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


def share_settings(specs: Sequence[SweepSpec]) -> tuple[list[SweepSpec], list[str]]:
    """Returns the sweeps with the same model head, weighting and public set.

    The second value has a line for the user for each setting that some of the algorithms would not have by themselves.
    A setting that the suite sets or searches itself is left as it is.
    """
    algorithms = {label_of(spec): algorithm_of(spec) for spec in specs}
    common: dict[str, Any] = {}
    notes: list[str] = []
    for key, choose in (("model.head", _head), ("train.weighting", _weighting), ("data.public_samples", _public)):
        if not any(key in spec.base or key in spec.raw_space for spec in specs):
            common[key], why = choose(algorithms, specs)
            if why:
                notes.append(
                    f"{key}={common[key]} for all algorithms, {why}; with {key}=auto each algorithm has its own"
                )
    return [replace(spec, base={**spec.base, **common}) for spec in specs], notes


def algorithm_of(spec: SweepSpec) -> type[Algorithm]:
    """Returns the class of the algorithm that a sweep searches."""
    from fedray.algorithms import find_algorithm

    return find_algorithm(load(spec.base).algorithm.name)


def _head(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[str, str]:
    """Returns the smallest model head with which all algorithms can work, and why it is needed ("" if it is not)."""
    from fedray.models.heads import DEFAULT

    needing = [label for label, each in algorithms.items() if each.needs_head != "nothing"]
    most = max((each.needs_head for each in algorithms.values()), key=list(DEFAULT).index)
    return DEFAULT[most], f"because {' and '.join(needing)} can't do without" if needing else ""


def _weighting(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[str, str]:
    """Returns the weighting by the number of samples, and a reason if some algorithms would have another."""
    others = [label for label, each in algorithms.items() if each.weighting != "samples"]
    return "samples", f"although the papers of {', '.join(others)} have uniform weights" if others else ""


def _public(algorithms: Algorithms, specs: Sequence[SweepSpec]) -> tuple[int, str]:
    """Returns how many public samples are held out: the data source's default if any algorithm needs them, else 0.

    The second value says why, and is empty for 0.
    """
    from fedray.data.sources.source import source_of

    needing = [label for label, each in algorithms.items() if each.needs_public]
    if not needing:
        return 0, ""
    config = load(specs[0].base)
    public = source_of(config.data, config.task).public_by_default
    return public, f"held out of the clients' samples because the server of {' and '.join(needing)} trains on them"
