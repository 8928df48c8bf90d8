"""Compares runs that have ended (``fedray compare``): groups them, and puts their results side by side."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError, near_miss
from fedray.remote.fetching import as_path
from fedray.results.clients import outcome_of_clients
from fedray.results.comparison import ComparisonTables, Environment
from fedray.results.grouping import Group, group_runs, is_ignored
from fedray.results.measure import AXES, Measure
from fedray.results.outcomes import AMOUNTS, correct, difference, order_of, outcome, reaching
from fedray.results.runs import LeftOut, RecordedRun, find_runs
from fedray.results.unequal import what_differs_between_environments, what_is_unequal
from fedray.tracking.folder import RESULT_KEYS_OF_ENGINE
from fedray.util.arguments import list_of, whole_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "fedavg"
"""The default baseline."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(ComparisonTables):
    """The result of :func:`compare`, as tables and as Matplotlib figures. The tables are pandas DataFrames: ``table``
    has the results of each group of runs, ``targets`` what it took each group to reach the targets, and ``curves()``
    returns the learning curves.

    Example:
        found = fedray.compare("runs/")
        best = found.table["final"].max()
        for sentence, figure in found.figures(): ...
    """

    def __repr__(self) -> str:
        from fedray.results.comparison_files import lines

        return "\n".join(lines(self))

    def figures(self) -> list[tuple[str, Figure]]:
        """Returns all figures of the comparison's page, report.html, as pairs: a sentence that says what the figure
        shows, and the figure."""
        # Matplotlib is loaded only if something is drawn
        from fedray.results.pictures import figures_of

        return list(figures_of(self))


def compare(
    *paths: str | PathLike[str],
    by: Sequence[str] = (),
    x: str = "rounds",
    targets: Sequence[float] = (),
    baseline: str | None = None,
    last: int | None = None,
    any_version: bool = False,
) -> Comparison:
    """Compares runs that have ended: the value of the metric that they reached, what that cost, and how certain it is.

    Runs that differ only in their seeds are one group. Groups are compared within an environment, which has the same
    data and the same model::

        found = fedray.compare("runs/", targets=[0.9])
        print(found.table[["group", "final", "final_margin"]], found.environments[0].notes)

    Args:
        paths: run folders, or folders that contain run folders at any depth; also their URIs, and results, which know
            their folders.
        by: dotted keys that distinguish the groups of an environment. By default these are all keys except the ones
            about data, task and model (:func:`~fedray.results.grouping.group_runs`).
        x: the axis of curves: ``rounds``, ``iterations``, ``bytes``, ``flops``, ``virtual_seconds``,
            ``joules`` or ``wall_seconds``.
        targets: values of the main metric, such as 0.9. By default they are the values of ``run.targets`` that all runs
            of an environment have, or else the mean of the baseline's final values.
        baseline: the name of a group or an algorithm, with which the other groups are compared; FedAvg by default.
        last: the number of rounds over which the column ``last`` is the mean; the last ten evaluations by default.
        any_version: whether to compare runs of all versions of fedray. By default only the version that made most of
            the runs is compared.

    Returns:
        The comparison, with tables, figures, and notes about what makes the groups unequal.

    Raises:
        UserError: a path has no runs, a key, axis or baseline is unknown, or no run is left to compare.
    """
    if x not in AXES:
        raise UserError(f"--x: there is no {x!r}{near_miss(x, AXES)}")
    if last is not None:
        whole_number(last, "--last")
    by = list_of(str, by, "by= takes a list of keys, as in ['algorithm.name']")
    targets = list_of(Real, targets, "targets= takes a list of numbers, as in [0.9]")
    folders = list(map(as_path, paths))
    runs, left_out = _comparable(folders, any_version)
    if all(run.rows[AXES[x]].isna().all() for run in runs):
        raise UserError(f"--x {x}: no run has it")
    request = _Request(_measure_of(runs), x, list(dict.fromkeys(targets)), baseline or BASELINE, last)
    groups = group_runs(runs, by)
    _check(request, baseline, groups)
    places = dict.fromkeys(group.place for group in groups)
    asked = {
        "paths": sorted(str(folder.resolve()) for folder in folders),
        "by": list(by), "x": x, "targets": list(targets), "baseline": baseline, "last": last,
        "any_version": any_version,
    }  # fmt: skip
    return Comparison(
        environments=[request.environment([group for group in groups if group.place == place]) for place in places],
        measure=request.measure,
        over=x,
        last=last,
        left_out=left_out,
        asked=asked,
        notes=what_differs_between_environments(groups),
    )


def _comparable(folders: Sequence[Path], any_version: bool) -> tuple[list[RecordedRun], list[LeftOut]]:
    """Returns the runs in ``folders`` that can be compared, and the run folders that are left out, with reasons. Raises
    :class:`UserError` if no run can be compared."""
    runs, left_out = find_runs(folders)
    kept: dict[str, RecordedRun] = {}
    counts = Counter(map(_version, runs))
    # the version that most runs have; in a tie the newest
    version = max(counts, key=lambda each: (counts[each], each), default=())
    for run in runs:
        reason = None
        if not run.diverged and math.isnan(run.final(run.measure)):
            was_used = run.settings.get("run.eval_test", True)
            why = "no evaluation has a number" if was_used else "the test set was not used"
            reason = f"it has no {run.measure.column}: {why}"
        elif not any_version and _version(run) != version:
            reason = f"it is of another version of fedray, {run.versions.get('fedray')} (--any-version takes it)"
        elif (twin := kept.setdefault(_repetition(run), run)) is not run:
            keys = [f"engine.{name}" for name in RESULT_KEYS_OF_ENGINE]
            differ = [key for key in keys if run.settings.get(key) != twin.settings.get(key)]
            more = f", but for {' and '.join(differ)}" if differ else ""
            reason = f"it is the same run as {twin.folder}, with the same seeds{more}"
        if reason is not None:
            left_out.append(LeftOut(run.folder, reason))
    if not kept:
        first = f": {left_out[0].folder}: {left_out[0].reason}" if left_out else ""
        raise UserError(f"there is no run to compare{first}")
    return list(kept.values()), left_out


def _repetition(run: RecordedRun) -> str:
    """Returns a text that identifies a run by its settings, seeds and inputs. Two runs have the same text only if one
    of them is the other, made a second time."""
    settings = {key: value for key, value in run.settings.items() if not is_ignored(key)}
    return json.dumps([settings, run.seeds, dict(run.inputs)], sort_keys=True, default=str)


def _version(run: RecordedRun) -> tuple[tuple[int, str], ...]:
    """Returns the version of fedray that made a run as a tuple, so that versions can be sorted: 0.10 comes after
    0.9."""
    text = str(run.versions.get("fedray", ""))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in text.split("."))


def _measure_of(runs: Sequence[RecordedRun]) -> Measure:
    found = dict.fromkeys(run.measure for run in runs)
    if len(found) > 1:
        names = " and ".join(f"{each.metric}, {each.mode}" for each in found)
        raise UserError(f"these runs can't be compared: their main metrics differ ({names})")
    return next(iter(found))


def _check(request: _Request, baseline: str | None, groups: Sequence[Group]) -> None:
    """Checks the arguments of a comparison. Raises :class:`UserError` if no group matches the baseline, or if a target
    can't be reached."""
    known = {name for group in groups for name in (group.label, group.algorithm)}
    if baseline is not None and baseline not in known:
        raise UserError(f"--baseline: there is no group {baseline!r}{near_miss(baseline, known)}")
    for target in request.targets:
        if not math.isfinite(target) or (request.measure.percent and not 0 < target <= 1):
            kind = "between 0 and 1, as in 0.8 for 80 %" if request.measure.percent else "a number"
            raise UserError(f"--target must be {kind}, not {target:g}")


def _finals_by_pair(group: Group, measure: Measure) -> dict[Hashable, float]:
    """Returns the final value of the metric of each of a group's runs that did not diverge, by a key for pairs. Two
    runs of different groups are a pair if their keys are equal: they have the same seeds, and the clients hold the same
    samples. Several runs of one group with the same key count as their mean."""
    found: dict[Hashable, list[float]] = {}
    for run in group.ended:
        found.setdefault((*run.seeds, run.summary.get("partition_hash")), []).append(run.final(measure))
    return {key: math.fsum(values) / len(values) for key, values in found.items()}


@dataclass(frozen=True)
class _Request:
    """The parameters of :func:`compare` by which the groups of each environment are compared."""

    measure: Measure
    over: str
    targets: Sequence[float]
    baseline: str
    last: int | None

    def environment(self, groups: Sequence[Group]) -> Environment:
        """Compares ``groups``, which have the same data and the same model, with each other. Returns them with their
        results. Groups with private layers come last, and without a difference, because what is measured is their
        global model."""
        rows = {}
        for group in groups:
            rows[group] = _keys(group) | outcome(group.runs, self.measure, self.last)
            rows[group] |= outcome_of_clients(group.runs, self.measure)
        ordered = sorted(groups, key=lambda group: (group.has_private_layers, order_of(rows[group], self.measure)))
        named = [group for group in ordered if self.baseline == group.label]
        named = named or [group for group in ordered if self.baseline == group.algorithm]
        baseline = named[0] if named else None
        if baseline is not None:
            finals = {group: _finals_by_pair(group, self.measure) for group in groups}
            for group in groups:
                if group is not baseline and _are_comparable(group, baseline):
                    rows[group] |= difference(finals[group], finals[baseline])
        correct(list(rows.values()))
        asked = self.targets or _shared_targets(groups)
        alike = [group for group in ordered if group.has_private_layers == ordered[0].has_private_layers]
        targets = asked or self._default_target([rows[each] for each in ([baseline] if baseline else alike)])
        to_targets = [row for target in targets for row in self._to_target(target, ordered, baseline)]
        notes = [
            *what_is_unequal(groups),
            *self._about_baseline(groups, named, to_targets, is_default=not asked),
            *self._about_targets(groups, targets),
            *self._about_curves(ordered),
        ]
        return Environment(groups[0].place, ordered, baseline, [rows[each] for each in ordered], to_targets, notes)

    def _default_target(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns the target if the user has set none: the worst of the final means in ``rows``, as a list of one
        number. ``rows`` is the row of the baseline; if there is none, those of all groups, but for groups with private
        layers beside others. The list is empty if no run ended."""
        sign = self.measure.sign
        means = [sign * row["final"] for row in rows if not math.isnan(row["final"])]
        return [sign * min(means)] if means else []

    def _to_target(self, target: float, groups: Sequence[Group], baseline: Group | None) -> Iterator[dict[str, Any]]:
        """Yields a row of the table ``targets`` for each group: what it took the group to reach ``target``, and its
        speed-up, which is the baseline's amount divided by the group's."""
        found = {group: reaching(group.runs, self.measure, target) for group in groups}
        for group, row in found.items():
            speedups, of = {}, baseline if baseline and _are_comparable(group, baseline) else None
            for amount in AMOUNTS:
                took = row[f"{amount}_to"]
                baseline_took = found[of][f"{amount}_to"] if of else math.nan
                has_both = math.isfinite(baseline_took) and math.isfinite(took) and took > 0
                speedups[f"{amount}_speedup"] = baseline_took / took if has_both else math.nan
            yield _keys(group) | row | speedups

    def _about_baseline(
        self, groups: Sequence[Group], named: Sequence[Group], to_targets: Sequence[Mapping[str, Any]], is_default: bool
    ) -> Iterator[str]:
        """Yields notes for the reader of a comparison: that there is no baseline, that several groups match it, or that
        the baseline does not reach a target itself."""
        if len(groups) == 1:
            return
        if not named:
            target = ", and the target is the mean of the group that ends worst" if is_default else ""
            yield f"there is no {self.baseline} here, so that there are no differences and speed-ups{target}"
            return
        label = named[0].label
        if len(named) > 1:
            yield f"the baseline is {label}, the best of {len(named)} groups of {self.baseline}"
        for row in to_targets:
            if row["group"] == label and math.isinf(row["rounds_to"]):
                target = self.measure.shown(row["target"])
                runs = f"{row['reached']} of {row['runs']} runs"
                yield f"{label} reached {target} in {runs}, so that there are no speed-ups to it"

    def _about_targets(self, groups: Sequence[Group], targets: Sequence[float]) -> Iterator[str]:
        """Yields a note for each value of ``run.targets`` that is left out, and one if there is no target at all."""
        if not self.targets:
            wanted = {target for each in _targets_of_runs(groups) for target in each}
            for target in sorted(wanted.difference(targets)):
                yield f"run.targets={target:g} is left out, because not all runs have it (--target {target:g} takes it)"
        if not targets:
            yield "there is no target, because none of the runs has ended that would give it (--target sets one)"

    def _about_curves(self, groups: Sequence[Group]) -> Iterator[str]:
        """Yields a note for each group whose curve can't be drawn, or is drawn for some of its rounds only."""
        for group in groups:
            if any(run.rows[AXES[self.over]].isna().all() for run in group.ended):
                yield f"{group.label} has runs without {self.over}, so that there is no curve of it"
                continue
            rounds = [set(run.evaluations(self.measure)["round"]) for run in group.ended]
            if rounds and (common := set.intersection(*rounds)) != (every := set.union(*rounds)):
                yield (
                    f"the curve of {group.label} has {len(common)} of its {len(every)} evaluated rounds: those in which"
                    " all its runs were evaluated"
                )


def _are_comparable(group: Group, baseline: Group) -> bool:
    """Returns whether a difference between the global models of two groups means something."""
    return not (group.has_private_layers or baseline.has_private_layers)


def _keys(group: Group) -> dict[str, Any]:
    return {"environment": group.place, "group": group.label, **group.environment, **group.values}


def _targets_of_runs(groups: Sequence[Group]) -> list[list[float]]:
    return [run.settings.get("run.targets") or [] for group in groups for run in group.runs]


def _shared_targets(groups: Sequence[Group]) -> list[float]:
    """Returns the values of ``run.targets`` that all runs of ``groups`` have."""
    first, *others = _targets_of_runs(groups)
    return [target for target in first if all(target in targets for targets in others)]
