"""Statistics over seeds, against numbers by hand, SciPy and the definitions; and the table of a suite made of them."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from fedray.results.measure import Measure
from fedray.results.statistics import holm, margin_of, mean_and_margin, median_to_reach, paired_p_value, with_interval
from fedray.tuning.suite_rows import Row, compare_rows
from fedray.tuning.suite_table import _for_people, _notes, draw_curves

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)
ACCURACIES = st.floats(0, 1)


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12))
def test_intervals_are_students(values):
    mean, margin = mean_and_margin(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    error = stats.sem(values)
    if error > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (mean - margin, mean + margin) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))


def test_fewer_than_three_runs_have_no_interval():
    """Of two values that are 0.01 apart it would be +- 0.064, and of none the mean is unknown too."""
    for values, mean in (([0.5], 0.5), ([0.94, 0.95], 0.945)):
        assert mean_and_margin(values)[0] == pytest.approx(mean)
        assert math.isnan(mean_and_margin(values)[1])
    assert all(map(math.isnan, mean_and_margin([])))


def test_an_interval_from_a_deviation_is_that_of_the_values():
    """Student's factor for three values, from a printed table, is 4.303."""
    values = [0.1, 0.4, 0.2]
    assert margin_of(statistics.stdev(values), 3) == pytest.approx(mean_and_margin(values)[1])
    assert margin_of(1.0, 3) == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([95.0], "95.00"),
        ([95.0, 93.5], "95.00, 93.50"),
        # deviation 1, factor 4.3027 / sqrt(3)
        ([94.0, 95.0, 96.0], "95.00 ± 2.48"),
    ],
)
def test_a_cell_of_a_table_has_an_interval_from_three_runs_on(values, text):
    assert with_interval(values) == text


@given(st.lists(st.tuples(ACCURACIES, ACCURACIES), min_size=3, max_size=10))
def test_the_paired_test_is_students_on_the_differences(pairs):
    a, b = (list(side) for side in zip(*pairs, strict=True))
    differences = [x - y for x, y in pairs]
    if not any(differences):
        assert paired_p_value(a, b) == 1
        return
    deviation = statistics.stdev(differences)
    assume(deviation > 1e-6)
    t = statistics.fmean(differences) / (deviation / math.sqrt(len(pairs)))
    p = paired_p_value(a, b)
    assert p == pytest.approx(2 * stats.t.sf(abs(t), len(pairs) - 1), rel=1e-6)
    assert p == pytest.approx(paired_p_value(b, a))
    # the interval leaves zero out where p is below 5 %
    mean, margin = mean_and_margin(differences)
    if abs(p - 0.05) > 1e-6:
        assert (p < 0.05) == (abs(mean) > margin)


def test_two_pairs_have_no_p_value():
    assert math.isnan(paired_p_value([0.9, 0.8], [0.5, 0.4]))


@given(P_VALUES)
def test_holms_rule_by_its_definition(p_values):
    """In the order of the p-values, each times how many are left with it, and no less than any before it."""
    m, order = len(p_values), np.argsort(p_values, kind="stable")
    for place, adjusted in enumerate(holm(p_values)):
        rank = list(order).index(place)
        wanted = max(min(1.0, (m - j) * p_values[order[j]]) for j in range(rank + 1))
        assert adjusted == pytest.approx(wanted)


@given(P_VALUES, st.floats(0.001, 0.999))
def test_holms_rule_rejects_what_its_steps_reject(p_values, level):
    """Step down: reject the smallest while p <= level / (how many are left); the first that fails ends it."""
    adjusted = holm(p_values)
    assume(all(abs(p - level) > 1e-9 for p in adjusted))
    rejected: set[int] = set()
    for left, place in zip(range(len(p_values), 0, -1), np.argsort(p_values, kind="stable"), strict=True):
        if p_values[place] > level / left:
            break
        rejected.add(int(place))
    assert {place for place, p in enumerate(adjusted) if p <= level} == rejected


@given(P_VALUES, st.randoms())
def test_holms_rule_keeps_the_order_and_no_more_than_bonferroni(p_values, random):
    adjusted = holm(p_values)
    for (a, p), (b, q) in itertools.pairwise(sorted(zip(p_values, adjusted, strict=True))):
        assert p <= q or a == b
    assert all(p <= q <= min(1, len(p_values) * p + 1e-12) for p, q in zip(p_values, adjusted, strict=True))
    order = list(range(len(p_values)))
    random.shuffle(order)
    assert holm([p_values[place] for place in order]) == [adjusted[place] for place in order]


def test_holms_rule_on_numbers_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.integers(1, 100), max_size=5), st.integers(0, 5))
def test_medians_in_which_never_counts_as_more_than_anything(reached, never):
    """With a number larger than all others for those that did not reach it, the ordinary median says the same."""
    assume(reached or never)
    median = median_to_reach([*map(float, reached), *[math.inf] * never])
    plain = statistics.median([*reached, *[10**9] * never])
    assert median == plain if plain <= 100 else median == math.inf


def run(folder: Path, accuracies: list[float], status: str = "completed", alone: float = 0.5) -> Path:
    """A run folder as far as the table reads it: one evaluation a round, 10 iterations and 2 MB each."""
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": status, "rounds": len(accuracies)}))
    config = {"run": {"seed": int(folder.name.partition("-")[2]), "rounds": len(accuracies)}}
    config |= {key: {} for key in ("algorithm", "data", "model", "train")} | {"engine": {"portable_bits": False}}
    (folder / "config.yaml").write_text(json.dumps(config))
    amounts = ("iterations", "bytes_down", "bytes_up", "flops", "round_seconds", "wall_seconds")
    columns = ("round", "cohort_size", *amounts, "test_accuracy")
    with (folder / "metrics.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "representation_accuracy"])
        for number, accuracy in enumerate(accuracies, 1):
            spent = [10 * number, 10**6 * number, 10**6 * number, 1e9, 1.0, 1.0]
            writer.writerow([number, 4, *spent, accuracy, alone])
    return folder


def row(tmp_path: Path, label: str, finals: list[float], rounds: int = 4, diverged: int = 0, first: int = 1) -> Row:
    """Runs that climb to their final accuracy in the last round; the last ``diverged`` of them end after two."""
    folders = []
    for place, final in enumerate(finals):
        lost = place >= len(finals) - diverged
        curve = [0.1, 0.1] if lost else [*np.linspace(0.1, 0.2, rounds - 1), final]
        folders.append(run(tmp_path / label / f"seed-{first + place}", curve, "diverged" if lost else "completed"))
    return Row(label, folders, facts=dict.fromkeys(("trials", "complete", "pruned", "diverged", "failed"), 1))


def shown(rows: list[Row], baseline: str | None = None, target: float | None = None):
    """The table as people see it, by label."""
    table = compare_rows(rows, baseline, target).assign(validation=0.5, **{"with": ""})
    table = table.assign(parameters=61706, public_samples=0, weighting="samples", seeds_asked=table["seeds"].max())
    assert _notes(table, str(baseline), target is not None, Measure()).count("\n") == 0
    return _for_people(table, "validation_accuracy", str(baseline), Measure()).set_index("algorithm")


def test_a_diverged_run_is_counted_and_in_no_mean(tmp_path):
    """[.95, .95, 0] was 63.33 +- 136.25, and its bytes were the mean with a run that ended in its second round."""
    lost = row(tmp_path, "lost", [0.95, 0.95, 0.0], diverged=1)
    (line,) = compare_rows([lost], None, 0.9).to_dict("records")
    assert (line["seeds"], line["seeds_diverged"], line["accuracies"]) == (3, 1, (0.95, 0.95))
    assert (line["accuracy"], line["bytes"], line["rounds"]) == (0.95, 8e6, 4)
    assert line["reached"] == 2
    people = shown([lost], target=0.9).loc["lost"]
    assert people["test accuracy, % (± 95 % interval)"] == "95.00, 95.00 (2 of 3, 1 diverged)"
    assert people["MB"] == 8


def test_a_run_that_diverged_after_it_had_reached_the_target_has_not_reached_it(tmp_path):
    """Its few bytes would make it the cheapest of all."""
    folders = [run(tmp_path / f"seed-{i}", [0.9, 0.9], "diverged") for i in range(2)]
    lost = Row("lost", [*folders, run(tmp_path / "seed-2", [0.1, 0.1, 0.9, 0.9])])
    (line,) = compare_rows([lost], None, 0.8).to_dict("records")
    assert (line["reached"], line["rounds_to"], line["bytes_to"]) == (1, math.inf, math.inf)


def test_runs_that_all_end_alike_reach_their_own_mean(tmp_path):
    """The mean of three times 0.36 is more than 0.36, by rounding."""
    even = Row("even", [run(tmp_path / f"seed-{i}", [0.1, 0.36]) for i in range(3)])
    (line,) = compare_rows([even], "even", None).to_dict("records")
    assert line["target"] > 0.36
    assert (line["reached"], line["rounds_to"]) == (3, 2)


def test_of_all_runs_diverged_nothing_is_claimed(tmp_path):
    all_lost, good = row(tmp_path, "lost", [0.0] * 3, diverged=3), row(tmp_path, "good", [0.2] * 3)
    people = shown([all_lost, good], "lost", 0.15)
    assert list(people.index) == ["good", "lost"]
    assert people.loc["lost", "test accuracy, % (± 95 % interval)"] == "(0 of 3, 3 diverged)"
    assert people.loc["lost", "rounds to it (median)"] == "diverged"
    assert people.loc["good", "rounds to it (median)"] == "2"


def test_a_target_reached_by_one_seed_does_not_beat_one_reached_by_all(tmp_path):
    """1 of 5 in round 10 was "10 rounds", before 5 of 5 in round 30."""
    rare = Row("rare", [run(tmp_path / f"r/seed-{i}", [0.1] * 9 + [0.9 if i == 0 else 0.2] * 31) for i in range(5)])
    sure = Row("sure", [run(tmp_path / f"s/seed-{i}", [0.1] * 29 + [0.9] * 11) for i in range(5)])
    table = compare_rows([rare, sure], "sure", 0.8).set_index("algorithm")
    assert table["reached"].to_dict() == {"rare": 1, "sure": 5}
    assert table["rounds_to"].to_dict() == {"rare": math.inf, "sure": 30}
    assert table["bytes_to"].to_dict() == {"rare": math.inf, "sure": 60e6}
    assert table["rounds_to"].idxmin() == "sure"
    facts = dict.fromkeys(("trials", "complete", "pruned", "diverged", "failed"), 1)
    people = shown([Row(each.label, each.folders, facts=facts) for each in (rare, sure)], "sure", 0.8)
    assert people["reached 80.00 %"].to_dict() == {"rare": "1 of 5", "sure": "5 of 5"}
    assert people["rounds to it (median)"].to_dict() == {"rare": "> 40", "sure": "30"}
    assert people["MB to it (median)"].to_dict() == {"rare": "> 80", "sure": "60"}


def test_two_seeds_are_two_values(tmp_path):
    """[.95, .70] was 82.50 +- 158.83."""
    people = shown([row(tmp_path, "a", [0.95, 0.70]), row(tmp_path, "b", [0.90, 0.75])], "b")
    assert people.loc["a", "test accuracy, % (± 95 % interval)"] == "95.00, 70.00"
    assert people.loc["a", "difference to b, points (± 95 % interval)"] == "+5.00, -5.00"
    assert people.loc["b", "difference to b, points (± 95 % interval)"] == "baseline"


def test_a_row_that_lacks_runs_says_so(tmp_path):
    people = shown([row(tmp_path, "a", [0.9, 0.9]), row(tmp_path, "b", [0.9, 0.8, 0.7])], "b")
    assert people.loc["a", "test accuracy, % (± 95 % interval)"] == "90.00, 90.00 (2 of 3, 1 missing)"


def test_the_notes_say_what_the_target_is(tmp_path):
    lost, good = row(tmp_path, "lost", [0.0] * 3, diverged=3), row(tmp_path, "good", [0.2] * 3)
    with_baseline = _notes(compare_rows([lost, good], "good", None), "good", False, Measure())
    assert "Differences are those to good" in with_baseline
    assert "The target is the mean accuracy of good;" in with_baseline
    without = _notes(compare_rows([lost, good], "lost", None), "lost", False, Measure())
    assert "There are no differences to lost, because none of its runs ended." in without
    assert "The target is the mean accuracy of the worst row, because lost has none;" in without
    assert "The target" not in _notes(compare_rows([lost, good], "good", 0.5), "good", True, Measure())


def test_differences_are_paired_by_seed_and_corrected(tmp_path):
    base = [0.50, 0.70, 0.90, 0.60]
    gains = {
        "better": [0.02, 0.03, 0.02, 0.03],
        "same": [0.02, -0.02, 0.01, -0.01],
        "worse": [-0.1, -0.12, -0.1, -0.11],
    }
    rows = [row(tmp_path, "base", base)]
    for label, gain in gains.items():
        rows.append(row(tmp_path, label, [a + b for a, b in zip(base, gain, strict=True)]))
    # in another order of its seeds
    rows[1] = Row("better", list(reversed(rows[1].folders)))
    table = compare_rows(rows, "base", None).set_index("algorithm")
    assert table["target"].unique() == [pytest.approx(0.675)]
    p_values = {label: stats.ttest_1samp(gain, 0).pvalue for label, gain in gains.items()}
    for label, gain in gains.items():
        low, high = stats.t.interval(0.95, 3, loc=np.mean(gain), scale=stats.sem(gain))
        line = table.loc[label]
        assert line["difference"] == pytest.approx((low + high) / 2)
        assert line["difference_margin"] == pytest.approx((high - low) / 2)
        assert line["p"] == pytest.approx(p_values[label])
    ranked = sorted(p_values, key=p_values.__getitem__)
    assert table.loc[ranked[0], "p_holm"] == pytest.approx(3 * p_values[ranked[0]])
    assert table.loc[ranked[1], "p_holm"] == pytest.approx(2 * p_values[ranked[1]])
    assert math.isnan(table.loc["base", "p_holm"])
    # far apart as the seeds are, the paired test sees the gain that two intervals hide
    assert table.loc["better", "p_holm"] < 0.05 < table.loc["better", "margin"]


def test_pairs_are_seeds_that_ended_in_both(tmp_path):
    base = row(tmp_path, "base", [0.5, 0.6, 0.7, 0.0], diverged=1)
    other = row(tmp_path, "other", [0.6, 0.7, 0.9], first=2)
    line = compare_rows([base, other], "base", None).set_index("algorithm").loc["other"]
    # seeds 2 and 3
    assert line["differences"] == (pytest.approx(0.0), pytest.approx(0.0))
    assert math.isnan(line["p"])
    people = shown([base, other], "base")
    assert people.loc["other", "difference to base, points (± 95 % interval)"].endswith("(2 pairs)")


def test_rows_are_sorted_by_mean_and_then_by_how_few_diverged(tmp_path):
    rows = [
        row(tmp_path, "lost", [0.0], diverged=1),
        row(tmp_path, "half", [0.900001, 0.900001, 0.0], diverged=1),
        row(tmp_path, "whole", [0.9, 0.9, 0.9]),
        row(tmp_path, "best", [0.95, 0.95, 0.0], diverged=1),
    ]
    assert compare_rows(rows, "whole", None)["algorithm"].tolist() == ["best", "whole", "half", "lost"]


def test_a_row_may_count_another_column_and_have_facts_of_its_own(tmp_path):
    whole = row(tmp_path, "pfedmo", [0.9] * 3)
    alone = Row("representation model alone", whole.folders, Measure(of="representation"), {"bytes": math.nan})
    table = compare_rows([whole, alone], "pfedmo", None).set_index("algorithm")
    assert table.loc["representation model alone", "accuracy"] == 0.5
    assert math.isnan(table.loc["representation model alone", "bytes"])
    assert table.loc["pfedmo", "bytes"] == 8e6


def test_the_picture_of_a_suite(tmp_path):
    """It counts runs that diverged, and has at most nine lines in a panel."""
    rows = [row(tmp_path, "a", [0.8, 0.9, 0.0], diverged=1), row(tmp_path, "b", [0.0], diverged=1)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_curves(rows, "mine", tmp_path / "curves.svg")
        text = (tmp_path / "curves.svg").read_text()
        assert "bands: from one of 2 seeds to the other" in text
        assert all(words in text for words in ("a (1 of 3 diverged)", "b (1 of 1 diverged)", "test accuracy, %"))
        draw_curves([Row(f"row {i}", rows[0].folders) for i in range(12)], "mine", tmp_path / "many.svg")
    assert (tmp_path / "many.svg").read_text().count("test accuracy, %") == 2
