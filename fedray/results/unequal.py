"""Finds what makes a comparison unequal: groups that differ in more than what their names say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.algorithms import find_algorithm
from fedray.errors import UserError
from fedray.results.grouping import ALGORITHM, Group
from fedray.results.runs import Run

LISTED = 6
"""The most groups that a line names."""


def public_samples(run: Run) -> int | None:
    """Returns on how many labelled public samples the server trained, or the clients to whom they were dealt.

    It is 0 if they were only held out, and None if the algorithm, which says whether it needs them, is not there.
    """
    settings = run.settings
    try:
        needs_them = find_algorithm(str(settings["algorithm.name"])).needs_public
    except UserError:
        # an algorithm of the user's whose file is not there any more
        return None
    used = settings["data.public_to"] == "clients" or needs_them
    return int(settings["data.public_samples"] or 0) if used else 0


@dataclass(frozen=True)
class Fact:
    """Something that groups should have in common.

    ``differs`` tells that they have not, ``of`` returns it for a run, and ``keys`` are those that tell it where they
    are part of a group's name.
    """

    differs: str
    of: Callable[[Run], Any]
    keys: tuple[str, ...] = ()


FACTS = (
    Fact("the models differ in their parameters", lambda run: run.summary.get("parameters"), ("model.name",)),
    Fact(
        "clients are weighted differently (train.weighting)",
        lambda run: run.settings.get("train.weighting"),
        ("train.weighting",),
    ),
    Fact("the labelled public samples that were trained on differ", public_samples),
    Fact(
        "the rounds differ",
        lambda run: int(run.rows["round"].iloc[-1]),
        ("run.rounds", "run.stop_at", "run.patience"),
    ),
    Fact(
        "the local steps of a client in all rounds differ",
        lambda run: int(run.rows["iterations"].iloc[-1]),
        ("run.rounds", "run.stop_at", "run.patience", "train.local_steps", "train.local_epochs", "train.batch_size"),
    ),
    Fact("the batches differ in size", lambda run: run.settings.get("train.batch_size"), ("train.batch_size",)),
    Fact(
        "the cohorts differ in size",
        lambda run: int(run.rows["cohort_size"].max()),
        ("train.cohort_size", "train.participation"),
    ),
    Fact(
        "evaluations lie apart by different numbers of rounds (run.eval_every)",
        lambda run: run.settings.get("run.eval_every"),
    ),
    Fact(
        "different clients were scored one by one (run.eval_clients)",
        lambda run: str(run.settings.get("run.eval_clients")),
    ),
    Fact("the test sets differ", lambda run: run.inputs.get("test data", "unknown")[:8], ("data.source",)),
    Fact("the training data differ", lambda run: run.inputs.get("training data", "unknown")[:8], ("data.source",)),
    Fact("the losses differ", lambda run: run.inputs.get("loss", "the task's")[:8]),
    Fact("the versions of torch differ", lambda run: run.versions.get("torch")),
    Fact(
        "the processors differ, on which seconds depend",
        lambda run: ", ".join(sorted({str(each["device"]) for each in _processes(run)})),
    ),
    Fact("the numbers of processes differ, on which seconds depend", lambda run: len(_processes(run))),
)


def _processes(run: Run) -> list[dict[str, Any]]:
    return list((run.summary.get("machine") or {}).get("processes", []))


SAID_BY_ANOTHER = ("model.code",)
"""Keys of which no line is needed, because models are told by their names."""


def what_is_unequal(groups: Sequence[Group]) -> list[str]:
    """Returns a line for each fact in which groups of one environment differ, and their names do not say so."""
    lines = []
    for fact in FACTS:
        # a run that diverged has ended early, and is in no mean
        ended = {group.label: [run for run in group.runs if not run.diverged] for group in groups}
        found = {label: sorted({_text(fact.of(run)) for run in runs}) for label, runs in ended.items() if runs}
        values = {label: " and ".join(each) for label, each in found.items()}
        is_told = any(key in group.own for key in fact.keys for group in groups)
        differs = len(set(values.values())) > 1 and not is_told
        if differs or any(len(each) > 1 for each in found.values()):
            lines.append(f"{fact.differs}: {_by_value(values)}")
    return [*lines, *_settings(groups), *_partitions(groups), *_seeds(groups)]


def _settings(groups: Sequence[Group]) -> list[str]:
    """Tells the further settings in which groups differ, as another learning rate of each algorithm. Settings of an
    algorithm are compared between groups of this algorithm."""
    told = {*(key for fact in FACTS for key in fact.keys), *SAID_BY_ANOTHER}
    lines = []
    for key in dict.fromkeys(key for group in groups for key in group.further if key not in told):
        alike: dict[Any, dict[str, str]] = {}
        for group in groups:
            if key in group.further:
                kind = group.runs[0].settings.get(ALGORITHM) if key.startswith("algorithm.") else None
                alike.setdefault(kind, {})[group.label] = _text(group.further[key])
        differ = [values for values in alike.values() if len(set(values.values())) > 1]
        lines += [f"{key} differs: {_by_value(values)}" for values in differ]
    return lines


def what_differs_between_environments(groups: Sequence[Group]) -> list[str]:
    """Returns a line for each setting that is the same within each environment, and differs between environments whose
    names do not say so: pictures over a number show them side by side."""
    lines = []
    for key in dict.fromkeys(key for group in groups for key in group.further):
        values: dict[str, set[str]] = {}
        for group in groups:
            if key in group.further:
                values.setdefault(group.place, set()).add(_text(group.further[key]))
        is_one_each = all(len(each) == 1 for each in values.values())
        found = {place: next(iter(each)) for place, each in values.items()}
        if is_one_each and len(set(found.values())) > 1 and not key.startswith(("algorithm.", *SAID_BY_ANOTHER)):
            lines.append(f"{key} differs: {_by_value(found)}")
    return lines


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _by_value(values: Mapping[str, str]) -> str:
    """Returns the groups of each value, as ``uniform in scaffold; samples in all others``."""
    groups: dict[str, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    *few, (value, most) = sorted(groups.items(), key=lambda item: len(item[1]))
    parts = [f"{each} in {_listed(labels)}" for each, labels in few]
    return "; ".join([*parts, f"{value} in {'all others' if len(most) > 1 else most[0]}"])


def _listed(labels: Sequence[str]) -> str:
    """Returns names of groups as a text. Names have commas of their own."""
    rest = len(labels) - LISTED
    return " and ".join([*labels[:LISTED], *([f"{rest} more"] if rest > 0 else [])])


def _partitions(groups: Sequence[Group]) -> list[str]:
    """Tells whether clients hold other samples in one group than in another with the same seeds, though the names of
    both have the same settings of the data."""
    found: dict[tuple[Any, ...], set[Any]] = {}
    for group in groups:
        of_data = str({key: value for key, value in group.own.items() if key.startswith("data.")})
        for run in group.runs:
            found.setdefault((of_data, *run.seeds), set()).add(run.summary.get("partition_hash"))
    differ = any(len(hashes) > 1 for hashes in found.values())
    return ["clients hold other samples in some groups than in others with the same seeds"] if differ else []


def _seeds(groups: Sequence[Group]) -> list[str]:
    if len({frozenset(run.seeds for run in group.runs) for group in groups}) < 2:
        return []
    names = {
        group.label: " ".join(_seed(*seeds) for seeds in sorted({run.seeds for run in group.runs})) for group in groups
    }
    return [f"the seeds differ: {_by_value(names)}"]


def _seed(seed: Any, of_data: Any) -> str:
    return str(seed) if of_data in (seed, None) else f"{seed} (data.seed={of_data})"
