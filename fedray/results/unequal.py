"""Finds what makes a comparison unequal: differences between groups that their names do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.algorithms import find_algorithm
from fedray.errors import UserError
from fedray.results.grouping import Group
from fedray.results.runs import RecordedRun
from fedray.tracking.folder import BY_HAND

LISTED = 6
"""The largest number of groups that a line names."""


def public_samples(run: RecordedRun) -> int | None:
    """Returns how many labelled public samples a run used for training. These samples are held out of the clients'
    data; the server trains on them, or clients get them.

    The number is 0 if public samples were only held out. It is None if the algorithm's file no longer exists, because
    then it is unknown whether the algorithm uses them.
    """
    settings = run.settings
    try:
        needs_them = find_algorithm(str(settings["algorithm.name"])).needs_public
    except UserError:
        # a user-defined algorithm whose file no longer exists
        return None
    used = settings["data.public_to"] == "clients" or needs_them
    return int(settings["data.public_samples"] or 0) if used else 0


@dataclass(frozen=True)
class Fact:
    """A property of runs in which the groups of a fair comparison should agree, such as the number of parameters.

    If the groups do not agree, the comparison shows a note (a line of text) that begins with ``title``. The function
    ``value`` gets a run and returns its property. ``keys`` are the settings on which the property depends, by dotted
    key. If one of them is part of the groups' names, there is no note, because the names already show the difference.
    But if the runs of one group do not agree with each other, there is a note in any case.
    """

    title: str
    value: Callable[[RecordedRun], Any]
    keys: tuple[str, ...] = ()


def _setting(title: str, key: str) -> Fact:
    return Fact(title, lambda run: run.settings.get(key), (key,))


def _last(title: str, column: str, *keys: str) -> Fact:
    return Fact(title, lambda run: int(run.rows[column].iloc[-1]), ("run.rounds", "run.stop_at", "run.patience", *keys))


FACTS = (
    Fact("the models differ in their parameters", lambda run: run.summary.get("parameters"), ("model.name",)),
    _setting("clients are weighted differently (train.weighting)", "train.weighting"),
    Fact("the labelled public samples that were trained on differ", public_samples),
    _last("the rounds differ", "round"),
    _last(
        "the local steps of a client in all rounds differ", "iterations",
        "train.local_steps", "train.local_epochs", "train.batch_size",
    ),
    _setting("the batches differ in size", "train.batch_size"),
    # what was asked for: drop-out, or chance in who takes part, gives rounds of other sizes with each seed
    Fact(
        "the cohorts differ in size",
        lambda run: run.settings.get("train.cohort_size"),
        ("train.cohort_size", "train.participation"),
    ),
    _setting("evaluations lie apart by different numbers of rounds (run.eval_every)", "run.eval_every"),
    _setting("different clients were scored one by one (run.eval_clients)", "run.eval_clients"),
    Fact("the losses differ", lambda run: run.digests.get("task.loss.code", "the task's"), ("task.loss.code",)),
    Fact("the versions of torch differ", lambda run: run.versions.get("torch")),
    Fact(
        "the processors differ, on which seconds depend",
        lambda run: ", ".join(sorted({str(each["device"]) for each in _processes(run)})),
    ),
    Fact("the numbers of processes differ, on which seconds depend", lambda run: len(_processes(run))),
)  # fmt: skip


def _processes(run: RecordedRun) -> list[dict[str, Any]]:
    return list((run.summary.get("machine") or {}).get("processes", []))


MODEL_CODE = "model.code"
"""A key that gets no line, because users know models by their names."""


def what_is_unequal(groups: Sequence[Group]) -> list[str]:
    """Returns notes about what makes a comparison of ``groups``, which are on the same data and model, unequal. There
    is a line for each property or setting that differs between groups although their names do not show it, such as
    ``train.lr differs: 0.1 in fedavg; 0.01 in fedprox``."""
    lines = []
    for fact in FACTS:
        # a run that diverged ended early, and is in no mean
        found = {
            group.label: sorted({_text(fact.value(run)) for run in group.ended}) for group in groups if group.ended
        }
        values = {label: " and ".join(each) for label, each in found.items()}
        in_names = any(key in group.values for key in fact.keys for group in groups)
        differs = len(set(values.values())) > 1 and not in_names
        if differs or any(len(each) > 1 for each in found.values()):
            lines.append(f"{fact.title}: {_by_value(values)}")
    changed = {
        group.label: sorted({run.inputs[BY_HAND] for run in group.ended if BY_HAND in run.inputs}) for group in groups
    }
    lines += [f"changed by hand in {label}: {' and '.join(what)}" for label, what in changed.items() if what]
    return [*lines, *_private_layers(groups), *_settings(groups), *_partitions(groups), *_seeds(groups)]


def _private_layers(groups: Sequence[Group]) -> Iterator[str]:
    """Yields a note if the evaluated global model lacks what clients of a group have learnt in their private layers."""
    labels = [group.label for group in groups if group.has_private_layers]
    if labels:
        yield (
            f"the global model of {_listed(labels)} has initial values in its private layers: compare the personal "
            "models, in the table for single clients (run.eval_clients=all)"
        )


def _settings(groups: Sequence[Group]) -> Iterator[str]:
    """Yields notes about settings that differ between groups and that no :class:`Fact` is about, such as the learning
    rate of each algorithm. Settings of an algorithm are only compared between groups of this algorithm."""
    in_facts = {MODEL_CODE, *(key for fact in FACTS for key in fact.keys)}
    for key in _further_keys(groups):
        if key in in_facts:
            continue
        by_algorithm: dict[str, dict[str, str]] = {}
        for group in groups:
            if key in group.further:
                algorithm = group.algorithm if key.startswith("algorithm.") else ""
                value = group.further[key]
                by_algorithm.setdefault(algorithm, {})[group.label] = "not set" if value is None else _text(value)
        for values in by_algorithm.values():
            if len(set(values.values())) > 1:
                yield f"{key} differs: {_by_value(values)}"


def _further_keys(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(key for group in groups for key in group.further))


def what_differs_between_environments(groups: Sequence[Group]) -> list[str]:
    """Returns notes (lines of text) about settings that differ between the environments of a comparison although the
    environments' names do not show it. An environment is those of the comparison's ``groups`` that have the same data
    and model.

    There is a line for each such setting that does not differ within an environment. Hyper-parameters of algorithms are
    left out. Readers need the notes for pictures in which environments are side by side, for example with the number of
    clients on the horizontal axis.
    """
    lines = []
    for key in _further_keys(groups):
        values: dict[str, set[str]] = {}
        for group in groups:
            if key in group.further:
                values.setdefault(group.place, set()).add(_text(group.further[key]))
        is_one_each = all(len(each) == 1 for each in values.values())
        found = {place: next(iter(each)) for place, each in values.items()}
        if is_one_each and len(set(found.values())) > 1 and not key.startswith(("algorithm.", MODEL_CODE)):
            lines.append(f"{key} differs: {_by_value(found)}")
    return lines


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _by_value(values: Mapping[str, str]) -> str:
    """Returns a text that names the groups with each value, such as ``uniform in scaffold; samples in all others``.
    ``values`` has the value of each group, by the group's name."""
    groups: dict[str, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    *few, (value, most) = sorted(groups.items(), key=lambda item: len(item[1]))
    parts = [f"{each} in {_listed(labels)}" for each, labels in few]
    return "; ".join([*parts, f"{value} in {'all others' if len(most) > 1 else most[0]}"])


def _listed(labels: Sequence[str]) -> str:
    """Returns the names of groups as text, joined by "and" because the names contain commas. Only the first six are
    named."""
    rest = len(labels) - LISTED
    return " and ".join([*labels[:LISTED], *([f"{rest} more"] if rest > 0 else [])])


def _partitions(groups: Sequence[Group]) -> Iterator[str]:
    """Yields a note if clients hold different samples in two runs with the same seeds and the same settings of the
    data."""
    found: dict[tuple[Any, ...], set[Any]] = {}
    for group in groups:
        of_data = str({key: value for key, value in group.values.items() if key.startswith("data.")})
        for run in group.runs:
            found.setdefault((of_data, *run.seeds), set()).add(run.summary.get("partition_hash"))
    if any(len(hashes) > 1 for hashes in found.values()):
        yield "clients hold other samples in some groups than in others with the same seeds"


def _seeds(groups: Sequence[Group]) -> Iterator[str]:
    """Yields notes about seeds: those that groups do not have in common, and those that several runs of a group have,
    with the inputs in which these runs differ."""
    for group in groups:
        by_seeds: dict[tuple[Any, ...], list[Mapping[str, str]]] = {}
        for run in group.runs:
            by_seeds.setdefault(run.seeds, []).append(run.inputs)
        for seeds, inputs in sorted(by_seeds.items(), key=lambda item: str(item[0])):
            differ = sorted({name for each in inputs for name in each if len({one.get(name) for one in inputs}) > 1})
            if len(inputs) > 1:
                yield f"{group.label} has {len(inputs)} runs with seed {_seed(*seeds)}: {_listed(differ)} differ"
    if len({frozenset(run.seeds for run in group.runs) for group in groups}) > 1:
        names = {
            group.label: " ".join(_seed(*seeds) for seeds in sorted({run.seeds for run in group.runs}))
            for group in groups
        }
        yield f"the seeds differ: {_by_value(names)}"


def _seed(seed: Any, of_data: Any) -> str:
    return str(seed) if of_data in (seed, None) else f"{seed} (data.seed={of_data})"
