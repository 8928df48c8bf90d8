"""Compares runs that have ended (``fedray compare``): groups them, and puts what they reached side by side."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.errors import UserError, near_miss
from fedray.results.clients import outcome_of_clients
from fedray.results.comparison import Compared, Environment
from fedray.results.grouping import ALGORITHM, Group, group_runs, is_aside
from fedray.results.measure import AXES, Measure
from fedray.results.outcomes import AMOUNTS, Finals, correct, difference, order_of, outcome, reaching
from fedray.results.runs import LeftOut, Run, find_runs
from fedray.results.unequal import what_differs_between_environments, what_is_unequal
from fedray.tracking.folder import RESULT_KEYS_OF_ENGINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN = "fedavg"
"""The algorithm that is the baseline unless another is named."""


@dataclass(frozen=True, eq=False)
class Comparison(Compared):
    """What :func:`compare` returns: tables, and figures of them."""

    def figures(self) -> list[tuple[str, Figure]]:
        """Returns the pictures of the page, each with a sentence that says what it shows."""
        # Matplotlib is loaded only if something is drawn
        from fedray.results.pictures import figures_of

        return list(figures_of(self))


def compare(
    *paths: str | Path,
    by: Sequence[str] = (),
    x: str = "rounds",
    targets: Sequence[float] = (),
    baseline: str | None = None,
    last: int | None = None,
    any_version: bool = False,
) -> Comparison:
    """Compares the runs in the folders ``paths`` and below them.

    Runs that differ in their seeds alone are one group. Groups are compared within an environment: those on the same
    data and model. ``by`` are the keys in which the groups of an environment differ
    (:func:`~fedray.results.grouping.group_runs`). ``x`` is what curves are drawn over: ``rounds``, ``iterations``,
    ``bytes``, ``flops``, ``virtual_seconds`` or ``wall_seconds``. ``targets`` are values of the main metric; unless
    given, they are those of ``run.targets`` that all runs of an environment have, or else the mean that the baseline
    ends with. ``baseline`` is the name of a group or an algorithm: FedAvg, unless given. ``last`` is the number of
    rounds over which the column ``last`` is the mean. With ``any_version`` runs of other versions of fedray than
    most of them are not left out.

    Raises :class:`~fedray.UserError` for a path without runs, an unknown key, axis or baseline, and if no run is left.
    """
    if x not in AXES:
        raise UserError(f"--x: there is no {x!r}{near_miss(x, AXES)}")
    if last is not None and last < 1:
        raise UserError(f"--last must be at least 1, not {last}")
    runs, left_out = find_runs(map(Path, paths))
    runs, further = _comparable(runs, any_version)
    left_out = [*left_out, *further]
    if not runs:
        first = f": {left_out[0].folder}: {left_out[0].reason}" if left_out else ""
        raise UserError(f"there is no run to compare{first}")
    measure = _measure_of(runs)
    if all(run.rows[AXES[x]].isna().all() for run in runs):
        raise UserError(f"--x {x}: no run has it")
    groups = group_runs(runs, by)
    _check_baseline(baseline, groups)
    _check_targets(targets, measure)
    asked = _Asked(measure, x, list(dict.fromkeys(targets)), baseline or PLAIN, last)
    places = dict.fromkeys(group.place for group in groups)
    environments = [asked.of([group for group in groups if group.place == place]) for place in places]
    what = {"by": list(by), "x": x, "targets": list(targets), "baseline": baseline, "last": last}
    folders = sorted(str(Path(path).resolve()) for path in paths)
    asked_for = {"paths": folders, **what, "any_version": any_version}
    notes = what_differs_between_environments(groups)
    return Comparison(environments, measure, x, last, left_out, asked_for, notes)


def _comparable(runs: Sequence[Run], any_version: bool) -> tuple[list[Run], list[LeftOut]]:
    """Returns the runs that have a value to compare, and those that are left out."""
    kept, left_out = [], []
    seen: dict[str, Run] = {}
    counts = Counter(map(_version, runs))
    # the newest of those that most runs have
    version = max(counts, key=lambda each: (counts[each], each), default=())
    for run in runs:
        measure = Measure(run.summary.get("metric", "accuracy"), run.summary.get("mode", "max"))
        if not run.diverged and math.isnan(run.final(measure)):
            was_used = run.settings.get("run.eval_test", True)
            why = "no evaluation has a number" if was_used else "the test set was not used"
            left_out.append(LeftOut(run.folder, f"it has no {measure.column}: {why}"))
        elif not any_version and _version(run) != version:
            of = run.versions.get("fedray")
            left_out.append(LeftOut(run.folder, f"it is of another version of fedray, {of} (--any-version takes it)"))
        elif (twin := seen.setdefault(_identity(run), run)) is not run:
            keys = [f"engine.{name}" for name in RESULT_KEYS_OF_ENGINE]
            differ = [key for key in keys if run.settings.get(key) != twin.settings.get(key)]
            more = f", but for {' and '.join(differ)}" if differ else ""
            left_out.append(LeftOut(run.folder, f"it is the same run as {twin.folder}, with the same seeds{more}"))
        else:
            kept.append(run)
    return kept, left_out


def _identity(run: Run) -> str:
    """Returns what two runs have in common that are the same run, made twice."""
    settings = {key: value for key, value in run.settings.items() if not is_aside(key)}
    return json.dumps([settings, run.seeds, dict(run.inputs)], sort_keys=True, default=str)


def _version(run: Run) -> tuple[tuple[int, str], ...]:
    """Returns the version of fedray that made a run, as numbers can be compared."""
    text = str(run.versions.get("fedray", ""))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in text.split("."))


def _measure_of(runs: Sequence[Run]) -> Measure:
    found = dict.fromkeys((run.summary.get("metric", "accuracy"), run.summary.get("mode", "max")) for run in runs)
    if len(found) > 1:
        names = " and ".join(f"{metric}, {mode}" for metric, mode in found)
        raise UserError(f"these runs can't be compared: their main metrics differ ({names})")
    return Measure(*next(iter(found)))


def _check_targets(targets: Sequence[float], measure: Measure) -> None:
    for target in targets:
        if not math.isfinite(target) or (measure.percent and not 0 < target <= 1):
            kind = "between 0 and 1, as in 0.8 for 80 %" if measure.percent else "a number"
            raise UserError(f"--target must be {kind}, not {target:g}")


def _check_baseline(baseline: str | None, groups: Sequence[Group]) -> None:
    known = {name for group in groups for name in _names(group)}
    if baseline is not None and baseline not in known:
        raise UserError(f"--baseline: there is no group {baseline!r}{near_miss(baseline, known)}")


def _names(group: Group) -> tuple[str, str]:
    return group.label, str(group.runs[0].settings.get(ALGORITHM))


def _shared_targets(groups: Sequence[Group]) -> list[float]:
    """Returns the values of ``run.targets`` that all runs of ``groups`` have."""
    each = [run.settings.get("run.targets") or [] for group in groups for run in group.runs]
    return [target for target in each[0] if all(target in targets for targets in each)]


def _pair(run: Run) -> tuple[Any, ...]:
    """Runs of two groups are a pair if they have the same seeds, and clients hold the same samples."""
    return *run.seeds, run.summary.get("partition_hash")


def _keys(group: Group) -> dict[str, Any]:
    return {"environment": group.place, "group": group.label} | {**group.environment, **group.own}


@dataclass(frozen=True)
class _Asked:
    """What a comparison is to tell of the groups of each environment; the fields are parameters of :func:`compare`."""

    measure: Measure
    over: str
    targets: Sequence[float]
    baseline: str
    last: int | None

    def of(self, groups: Sequence[Group]) -> Environment:
        """Returns an environment with what its groups reached."""
        reached = {
            group: outcome(group.runs, self.measure, self.last) | outcome_of_clients(group.runs, self.measure)
            for group in groups
        }
        named = [group for group in groups if self.baseline in _names(group)]
        baseline = min(named, key=lambda group: order_of(reached[group], self.measure), default=None)
        finals = {group: Finals.of(group.runs, self.measure, _pair) for group in groups}
        rows = {}
        for group in groups:
            rows[group] = _keys(group) | reached[group]
            if baseline is not None and group is not baseline:
                rows[group] |= difference(finals[group], finals[baseline])
        correct(list(rows.values()))
        ordered = sorted(groups, key=lambda group: order_of(rows[group], self.measure))
        given = self.targets or _shared_targets(groups)
        targets = given or self._implied_target([rows[each] for each in groups if baseline in (None, each)])
        to_targets = [row for target in targets for row in self._to(target, ordered, baseline)]
        return Environment(
            name=groups[0].place,
            groups=ordered,
            baseline=baseline,
            rows=[rows[group] for group in ordered],
            targets=to_targets,
            notes=[
                *what_is_unequal(groups),
                *self._about_baseline(groups, named, baseline, to_targets, implied=not given),
                *self._about_targets(groups, targets),
                *self._about_curves(ordered),
            ],
        )

    def _about_baseline(
        self,
        groups: Sequence[Group],
        named: Sequence[Group],
        baseline: Group | None,
        to_targets: Sequence[Mapping[str, Any]],
        *,
        implied: bool,
    ) -> Iterator[str]:
        """Yields lines about a baseline that is not there, is one of several, or does not reach a target itself."""
        if baseline is None:
            if len(groups) > 1:
                target = ", and the target is the mean of the group that ends worst" if implied else ""
                yield f"there is no {self.baseline} here, so that there are no differences and speed-ups{target}"
            return
        if len(named) > 1:
            yield f"the baseline is {baseline.label}, the best of {len(named)} groups of {self.baseline}"
        for row in to_targets:
            if row["group"] == baseline.label and len(groups) > 1 and math.isinf(row["rounds_to"]):
                runs = f"{row['reached']} of {row['runs']} runs"
                target = self.measure.shown(row["target"])
                yield f"{baseline.label} reached {target} in {runs}, so that there are no speed-ups to it"

    def _about_targets(self, groups: Sequence[Group], targets: Sequence[float]) -> Iterator[str]:
        """Yields a line for each value of ``run.targets`` that is left out, and one if there is no target at all."""
        if not self.targets:
            wanted = {
                target for group in groups for run in group.runs for target in run.settings.get("run.targets") or []
            }
            for target in sorted(wanted.difference(targets)):
                yield f"run.targets={target:g} is left out, because not all runs have it (--target {target:g} takes it)"
        if not targets:
            yield "there is no target, because none of the runs has ended that would give it (--target sets one)"

    def _about_curves(self, groups: Sequence[Group]) -> Iterator[str]:
        """Yields a line for each group whose curve can't be drawn, or only in a part of its rounds."""
        for group in groups:
            ended = [run for run in group.runs if not run.diverged]
            if any(run.rows[AXES[self.over]].isna().all() for run in ended):
                yield f"{group.label} has runs without {self.over}, so that there is no curve of it"
                continue
            rounds = [set(run.evaluations(self.measure)["round"]) for run in ended]
            if rounds and (common := set.intersection(*rounds)) != (every := set.union(*rounds)):
                yield (
                    f"the curve of {group.label} has {len(common)} of its {len(every)} evaluated rounds: those in which"
                    " all its runs were evaluated"
                )

    def _implied_target(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns the worst mean of ``rows``, which are the baseline's alone or those of all groups."""
        sign = self.measure.sign
        means = [sign * row["final"] for row in rows if not math.isnan(row["final"])]
        return [sign * min(means)] if means else []

    def _to(
        self,
        target: float,
        groups: Sequence[Group],
        baseline: Group | None,
    ) -> Iterator[dict[str, Any]]:
        """Yields what each group took to reach ``target``, and how many times as much the baseline took."""
        found = {group: reaching(group.runs, self.measure, target) for group in groups}
        for group, row in found.items():
            own = _keys(group) | row
            for amount in AMOUNTS:
                mine, theirs = row[f"{amount}_to"], found[baseline][f"{amount}_to"] if baseline else math.nan
                has_both = math.isfinite(theirs) and math.isfinite(mine) and mine > 0
                own[f"{amount}_speedup"] = theirs / mine if has_both else math.nan
            yield own
