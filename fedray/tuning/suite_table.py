"""Makes the table of a suite: the accuracy that each algorithm's best trial reached on fresh seeds, and its cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedray.results.curves import mean_curve
from fedray.results.measure import Measure
from fedray.results.panel import Curve, Panel, bands_caption, draw_panels, parts_of
from fedray.results.style import lines_for
from fedray.results.tables import amount, markdown, p_value, shown_values
from fedray.results.unequal import public_samples
from fedray.tracking.folder import is_finished
from fedray.tuning.finals import fresh_seeds, label_of
from fedray.tuning.recorded import objective_of
from fedray.tuning.report import STATES, state_of
from fedray.tuning.storage import study_of
from fedray.tuning.study import best_trials, sampled_values
from fedray.tuning.suite import OF_OPTIMIZERS, Suite
from fedray.tuning.suite_rows import Row, compare_rows
from fedray.tuning.view import format_values
from fedray.util.files import replacement_of, write_whole

NOTES = (
    "Rounds and MB to the target are medians over all seeds: a run that did not reach it counts as infinite, and `> R` "
    "says that the median is above R, the least that a run took which did not reach it.",
    "Public samples used are the labelled ones on which the server trained, or that were divided among the clients; "
    "there are none if they were only held out. A representation model alone is evaluated in the same runs as the row "
    "of its algorithm, and has their cost. If there are personal models, rows are compared by the mean over all "
    "clients, each on its own test share: of its personal model, or of the deployed one, also fine-tuned.",
)
"""The sentences under every table."""


def suite_table(suite: Suite) -> pd.DataFrame:
    """Returns the results of a suite as a DataFrame with exact numbers: a row for each algorithm's best trial, which
    ran again on seeds that no trial had used. The best row comes first.

    :func:`fedray.tuning.suite_rows.compare_rows` describes its columns, and :func:`suite_rows` further ones. The table
    also shows what it cost each algorithm to reach a target. This is the last value of run.targets, or, if that key is
    not set, the mean accuracy of the baseline, or, if the baseline has none either, the worst mean of all rows.
    """
    return _compared(suite, suite_rows(suite))


def _compared(suite: Suite, rows: Sequence[Row]) -> pd.DataFrame:
    targets = suite.specs[0].base.get("run.targets")
    return compare_rows(rows, label_of(suite.baseline), float(targets[-1]) if targets else None)


def suite_rows(suite: Suite) -> list[Row]:
    """Returns that from which the table of a suite is computed. It is a list with a :class:`Row` for each configuration
    that runs on fresh seeds, which no trial has used (``suite.finals``).

    If an algorithm's server trains a representation model (as in pFedMo), a further row shows the results of this model
    alone, in the same runs. Each row has facts, which become further columns of the table:

    - ``trials``: how many trials of the sweep were begun; ``complete``, ``pruned``, ``diverged``, ``failed``: how many
      of them ended in this way.
    - ``seeds_asked``: the number of fresh seeds.
    - ``winner``: the number of the best trial; ``validation``: the objective's value in this trial. The second is left
      out for a configuration with changed keys, and for a representation model.
    - ``with``: a text with the best trial's sampled values, and with those of the optimizers' hyper-parameters that
      differ between the algorithms.
    - ``parameters``: the number of parameters of the model; ``weighting``: how clients are weighted (train.weighting);
      ``public_samples``: how many public samples were trained on (:func:`~fedray.results.unequal.public_samples`).
    """
    rows = []
    differ = [key for key in OF_OPTIMIZERS if len({spec.base.get(key) for spec in suite.specs}) > 1]
    for final in suite.finals:
        study = study_of(final.spec)
        states = Counter(state_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state in STATES)
        counts = {state: states[state] for state in ("complete", "pruned", "diverged", "failed")}
        facts: dict[str, Any] = {"trials": states.total(), **counts, "seeds_asked": suite.seeds}
        row, measure, tuned = Row(final.label, []), Measure(), {}
        for best in best_trials(study)[:1]:
            runs = [final.folder(best.number) / f"seed-{seed}" for seed in fresh_seeds(final.spec, suite.seeds)]
            row = replace(row, folders=[run for run in runs if is_finished(run)])
            values = {key: final.spec.base[key] for key in differ if key in final.spec.base} | sampled_values(best)
            facts |= {"winner": best.number, "with": format_values(values)}
            tuned = {} if final.changed else {"validation": best.value}
        if row.runs:
            first = row.runs[0]
            facts |= {"parameters": first.summary["parameters"], "weighting": first.settings["train.weighting"]}
            facts |= {"public_samples": public_samples(first)}
            measure = Measure(first.summary.get("metric", "accuracy"), first.summary.get("mode", "max"))
        rows.append(replace(row, measure=measure, facts=facts | tuned))
        alone = replace(measure, of="representation")
        if any(run.rows.get(alone.column, pd.Series()).notna().any() for run in row.runs):
            rows.append(Row(f"{final.label}, representation model alone", row.folders, alone, facts))
    rows = by_what_clients_have(rows)
    # rows without runs have the same measure as the others
    known = next((row.measure for row in rows if row.folders), Measure())
    return [row if row.folders else replace(row, measure=known) for row in rows]


def by_what_clients_have(rows: Sequence[Row]) -> list[Row]:
    """Returns ``rows``, or, if the personal models of all clients were scored in some of them (``run.eval_clients``),
    rows that compare what clients have: their personal models; for algorithms without any the deployed model and, as a
    further row, that model after fine-tuning (``run.finetune_steps``)."""

    def measured(row: Row, of: str) -> list[Row]:
        measure = replace(row.measure, of=of)
        there = any(run.rows.get(measure.column, pd.Series()).notna().any() for run in row.runs)
        name = {"clients_finetuned": f"{row.label}, fine-tuned"}.get(of, row.label)
        return [replace(row, label=name, measure=measure)] if there else []

    if not any(measured(row, "clients_personal") for row in rows):
        return list(rows)
    found = []
    # the server's representation model is none that clients have
    for row in (row for row in rows if row.measure.of != "representation"):
        others = [*measured(row, "clients"), *measured(row, "clients_finetuned")]
        found += measured(row, "clients_personal") or others or [row]
    return found


def write_suite(suite: Suite) -> list[Path]:
    """Writes the results of a suite into its folder: suite.csv (exact numbers), suite.md (a table for readers) and
    curves.png (the metric over the iterations). Returns the three paths."""
    paths = [suite.folder / name for name in ("suite.csv", "suite.md", "curves.png")]
    rows = suite_rows(suite)
    table = _compared(suite, rows)
    lists = {name: table[name].map(_spaced) for name in ("accuracies", "differences") if name in table}
    write_whole(paths[0], table.assign(**lists).to_csv(index=False))
    shown, notes = _with_notes(suite, rows, table)
    write_whole(paths[1], markdown(shown) + (f"\n{notes}\n" if notes else ""))
    draw_curves(rows, suite.name, paths[2])
    return paths


def suite_for_people(suite: Suite) -> tuple[pd.DataFrame, str]:
    """Returns the table of a suite in a readable form, and the paragraph under the table, which explains its numbers.

    The table has a row for each row of :func:`suite_table`. Its columns are named for readers, such as
    ``rounds to it (median)`` instead of ``rounds_to``. Accuracies are in percent and bytes in megabytes, and intervals
    stand beside their means, as in ``91.20 ± 0.35``.
    """
    rows = suite_rows(suite)
    return _with_notes(suite, rows, _compared(suite, rows))


def _with_notes(suite: Suite, rows: Sequence[Row], table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    baseline, measure = label_of(suite.baseline), rows[0].measure
    is_target_given = bool(suite.specs[0].base.get("run.targets"))
    notes = _notes(table, baseline, is_target_given, measure) if "accuracy" in table else ""
    return _for_people(table, objective_of(suite.specs[0]), baseline, measure), notes


def _spaced(values: Any) -> str:
    return " ".join(map(str, values)) if isinstance(values, tuple) else ""


def _for_people(table: pd.DataFrame, objective: str | None, baseline: str, measure: Measure) -> pd.DataFrame:
    """Returns the suite's table in a readable form, with texts as cells: accuracies in percent, bytes in megabytes,
    intervals beside means.

    ``objective`` is the objective by which trials were compared; None if no sweep has begun.
    """
    shown = table[["algorithm", "trials", "complete", "pruned", "diverged", "failed"]].copy()
    if "accuracy" not in table:
        return shown
    records: list[Any] = table.to_dict("records")
    unit, points = (", %", ", points") if measure.percent else ("", "")
    if objective == f"validation_{measure.metric}":
        shown[f"validation{unit}"] = measure.scale * table["validation"]
    elif objective is not None:
        shown[objective] = table["validation"]
    shown[f"{measure.title} (± 95 % interval)"] = [_accuracy(row, measure) for row in records]
    if "difference" in table:
        shown[f"difference to {baseline}{points} (± 95 % interval)"] = [
            _difference(row, baseline, measure) for row in records
        ]
    if "p_holm" in table:
        shown["p (Holm)"] = [p_value(p) for p in table["p_holm"]]
    if not math.isnan(target := table["target"].max()):
        shown[f"reached {measure.shown(target)}"] = [
            "" if math.isnan(row["seeds"]) else f"{row['reached']:.0f} of {row['seeds']:.0f}" for row in records
        ]
        shown["rounds to it (median)"] = [amount(row["rounds_to"], row["rounds_bound"]) for row in records]
        shown["MB to it (median)"] = [amount(row["bytes_to"] / 1e6, row["bytes_bound"] / 1e6) for row in records]
    shown["MB"] = table["bytes"] / 1e6
    for name, title in (("parameters", "parameters"), ("public_samples", "public samples used")):
        shown[title] = ["" if pd.isna(number) else f"{number:,.0f}" for number in table[name]]
    shown["weighting"] = table["weighting"].fillna("")
    shown["with"] = table["with"]
    return shown


def _accuracy(row: dict[str, Any], measure: Measure) -> str:
    if not isinstance(row["accuracies"], tuple):
        return ""
    text = shown_values(row["accuracies"], measure)
    ended = row["seeds"] - row["seeds_diverged"]
    lost = {"diverged": row["seeds_diverged"], "missing": row["seeds_asked"] - row["seeds"]}
    counts = "".join(f", {number:.0f} {how}" for how, number in lost.items() if number)
    return f"{text} ({ended:.0f} of {row['seeds_asked']:.0f}{counts})".strip() if counts else text


def _difference(row: dict[str, Any], baseline: str, measure: Measure) -> str:
    if row["algorithm"] == baseline:
        return "baseline"
    if not isinstance(row["differences"], tuple):
        return ""
    text = shown_values(row["differences"], measure, sign="+")
    pairs = len(row["differences"])
    return f"{text} ({pairs} pair{'s' if pairs > 1 else ''})" if pairs < row["seeds"] else text


def _notes(table: pd.DataFrame, baseline: str, is_target_given: bool, measure: Measure) -> str:
    """Returns the paragraph under the suite's table, which explains its numbers."""
    has_baseline = bool(table.loc[table["algorithm"] == baseline, "accuracy"].notna().any())
    tests = int(table["p"].notna().sum()) if "p" in table else 0
    lines = [
        "`±` is half the width of the 95 % confidence interval of the mean (Student's t) over seeds; of two seeds both "
        "values are shown, and of one its value.",
        f"A run that diverged is counted, is in no mean of {measure.words} or MB, and has not reached the target.",
    ]
    if has_baseline:
        points = ", in percentage points" if measure.percent else ""
        lines.append(f"Differences are those to {baseline} on the same seeds{points}.")
    else:
        lines.append(f"There are no differences to {baseline}, because none of its runs ended.")
    if tests:
        lines.append(
            "p is that of the paired t-test, corrected by Holm's rule for "
            f"{tests} comparison{'s' if tests > 1 else ''}; the intervals are not corrected."
        )
    if not is_target_given:
        of_whom = f"of {baseline}" if has_baseline else f"of the worst row, because {baseline} has none"
        lines.append(f"The target is the mean {measure.words} {of_whom}; run.targets sets another.")
    order = (
        f"Rows are sorted by mean {measure.words} over the runs that ended; of two with the same, the one with fewer "
        "diverged runs comes first."
    )
    return " ".join([*lines, *NOTES, order])


def draw_curves(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws the main metric on the test set over the iterations, for a suite or any other groups of runs: for each of
    ``rows``, the mean over its runs as a line, and the 95 % interval of the mean as a band.

    The picture, with ``title``, is written to ``path``. Runs that diverged are left out; the legend counts them. If
    there are more than nine rows, the picture has several panels.
    """
    measure = rows[0].measure if rows else Measure()
    panels = []
    for part in parts_of(rows):
        curves = []
        for row, line in zip(part, lines_for([row.label for row in part]).values(), strict=True):
            lost = sum(run.diverged for run in row.runs)
            name = f"{row.label} ({lost} of {len(row.runs)} diverged)" if lost else row.label
            if row.runs:
                curves.append(Curve(name, line, mean_curve(row.runs, row.measure.column, "iterations")))
        ceiling = 100.0 if measure.percent else math.inf
        ylabel = measure.title
        if curves:
            seeds = max(int(curve.points["runs"].max()) if len(curve.points) else 0 for curve in curves)
            panels.append(
                Panel(f"{title}; {bands_caption(seeds)}", ylabel, "iterations", curves, measure.scale, ceiling)
            )
    figure = draw_panels(panels)
    with replacement_of(path) as staging:
        figure.savefig(staging, format=path.suffix[1:], dpi=150)
