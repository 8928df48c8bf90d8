"""fedray compare: real runs in groups, what they reached, and the files about it."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from compared_runs import change, cut, diverge, other_input, write_metrics
from matplotlib.text import Text
from pages import Page
from scipy import stats

import fedray
from fedray.cli.main import main
from fedray.results.comparison_files import page_of, write
from fedray.results.grouping import NO_PART_OF_A_RESULT, name_of_values
from fedray.results.measure import Measure
from fedray.results.pictures import curves_figure
from fedray.results.statistics import with_interval
from fedray.results.style import lines_for, style, styled
from fedray.results.tables import digits_of, in_units, markdown, tables_of
from fedray.tracking.folder import KEYS_THAT_MAY_DIFFER


def test_groups_are_what_differs_beside_the_seeds(runs):
    found = fedray.compare(runs)
    assert [each.name for each in found.environments] == ["alpha=0.1", "alpha=5"]
    assert {row.label for each in found.environments for row in each.groups} == {"fedavg", "fedprox"}
    assert found.table["runs"].tolist() == [3, 3, 3, 3]
    by_alpha = fedray.compare(runs, by=["data.partition.alpha"])
    assert [each.name for each in by_alpha.environments] == ["fedavg", "fedprox"]
    assert {group.label for each in by_alpha.environments for group in each.groups} == {"alpha=0.1", "alpha=5"}
    # mu follows from the algorithm
    assert "algorithm.mu" not in found.table


def test_what_changes_no_result_divides_no_group(runs):
    for folder in runs.glob("*-1"):
        change(folder / "config.yaml", run__callbacks=["mine.py:Log"], run__loggers=["trackio"])
    assert fedray.compare(runs).table["runs"].tolist() == [3, 3, 3, 3]
    # a run may go on with more rounds, and with other weights behind the same path only
    assert {*KEYS_THAT_MAY_DIFFER} - {*NO_PART_OF_A_RESULT} == {"run.rounds", "model.weights"}


def test_what_was_reached_is_what_the_runs_wrote(runs):
    table = fedray.compare(runs, last=4).table.set_index(["environment", "group"])
    for alpha in ("0.1", "5.0"):
        for name in ("fedavg", "fedprox"):
            line = table.loc[(f"alpha={float(alpha):g}", name)]
            summaries = [json.loads((runs / f"{name}-{alpha}-{seed}/summary.json").read_text()) for seed in range(3)]
            metrics = [pd.read_csv(runs / f"{name}-{alpha}-{seed}/metrics.csv") for seed in range(3)]
            finals = [each["final_accuracy"] for each in summaries]
            low, high = stats.t.interval(0.95, 2, loc=np.mean(finals), scale=stats.sem(finals))
            assert sorted(map(float, line["finals"].split())) == sorted(finals)
            assert line["final"] == pytest.approx(np.mean(finals))
            assert line["final_margin"] == pytest.approx((high - low) / 2, nan_ok=True)
            assert line["best"] == pytest.approx(np.mean([each["best_accuracy"] for each in summaries]))
            # rounds 4 and 6 are the evaluated ones of the last four
            last = [each["test_accuracy"].dropna().iloc[-2:].mean() for each in metrics]
            assert line["last"] == pytest.approx(np.mean(last))
            assert line["bytes"] == np.mean(
                [each["bytes_down"].iloc[-1] + each["bytes_up"].iloc[-1] for each in metrics]
            )
            assert line["flops"] == pytest.approx(np.mean([each["flops"].iloc[-1] for each in metrics]))


def test_differences_are_those_of_equal_seeds_and_partitions(runs):
    table = fedray.compare(runs).table.set_index(["environment", "group"])

    def final(name, alpha, seed):
        return json.loads((runs / f"{name}-{alpha}-{seed}/summary.json").read_text())["final_accuracy"]

    wanted = [final("fedprox", "0.1", seed) - final("fedavg", "0.1", seed) for seed in range(3)]
    line = table.loc[("alpha=0.1", "fedprox")]
    assert [float(each) for each in line["differences"].split()] == pytest.approx(wanted)
    assert line["difference"] == pytest.approx(np.mean(wanted))
    # a partition of its own is no pair
    path = runs / "fedprox-0.1-2/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"partition_hash": "another"}))
    changed = fedray.compare(runs)
    line = changed.table.set_index(["environment", "group"]).loc[("alpha=0.1", "fedprox")]
    assert [float(each) for each in line["differences"].split()] == pytest.approx(wanted[:2])
    assert any("clients hold other samples" in note for note in changed.environments[0].notes)


def test_runs_of_equal_seeds_in_one_group_are_paired_as_their_mean(runs):
    """As runs from other initial weights are: which of them is read last must not decide."""
    shutil.copytree(runs / "fedavg-0.1-0", runs / "another-fedavg")
    path = runs / "another-fedavg/metrics.csv"
    metrics = pd.read_csv(path)
    write_metrics(path.parent, metrics.assign(test_accuracy=metrics.test_accuracy / 2))
    other_input(path.parent, **{"initialisation of the model": "another"})
    line = fedray.compare(runs).table.set_index(["environment", "group"]).loc[("alpha=0.1", "fedprox")]
    finals = [pd.read_csv(runs / f"{name}-0.1-0/metrics.csv").test_accuracy.iloc[-1] for name in ("fedavg", "fedprox")]
    assert float(line["differences"].split()[0]) == pytest.approx(finals[1] - 0.75 * finals[0])


def test_what_it_took_to_reach_a_target(runs):
    found = fedray.compare(runs, targets=[0.3, 1.0], x="bytes").targets.set_index(["environment", "group", "target"])
    line = found.loc[("alpha=5", "fedavg", 0.3)]
    firsts = []
    for seed in range(3):
        metrics = pd.read_csv(runs / f"fedavg-5.0-{seed}/metrics.csv")
        firsts.append(metrics[metrics["test_accuracy"] >= 0.3].iloc[0])
    assert line["reached"] == 3
    assert line["rounds_to"] == np.median([each["round"] for each in firsts])
    assert line["bytes_to"] == np.median([each["bytes_down"] + each["bytes_up"] for each in firsts])
    assert line["flops_to"] == np.median([each["flops"] for each in firsts])
    assert [line[f"{name}_speedup"] for name in ("rounds", "bytes", "flops", "seconds")] == [1, 1, 1, 1]
    other = found.loc[("alpha=5", "fedprox", 0.3)]
    for name in ("rounds", "bytes", "flops", "seconds"):
        assert other[f"{name}_speedup"] == pytest.approx(line[f"{name}_to"] / other[f"{name}_to"])
    never = found.loc[("alpha=5", "fedavg", 1.0)]
    assert never["reached"] == 0
    assert math.isinf(never["rounds_to"])
    assert math.isnan(never["rounds_speedup"])


def test_a_missed_target_is_above_what_the_runs_took_that_missed_it(runs):
    """Those are of 4 and 6 rounds here, and the third diverged: it would never have reached it, so that the median of
    the three is above 6."""
    cut(runs / "fedprox-5.0-0", 4)
    cut(runs / "fedprox-5.0-1", 2)
    diverge(runs / "fedprox-5.0-1")
    found = fedray.compare(runs, targets=[1.0])
    took = found.targets.set_index(["environment", "group"]).loc[("alpha=5", "fedprox")]
    assert (took["rounds_to"], took["rounds_bound"]) == (math.inf, 6)
    (environment,) = [each for each in found.environments if each.name == "alpha=5"]
    table = next(table for table in tables_of(found, environment) if "100.00 %" in table.title)
    assert table.cells.set_index("").loc["fedprox", ["reached", "rounds"]].tolist() == ["0 of 3", "> 6"]


def test_clients_scores_are_in_the_table(runs):
    line = fedray.compare(runs).table.set_index(["environment", "group"]).loc[("alpha=5", "fedavg")]
    paths = [runs / f"fedavg-5.0-{seed}/metrics.csv" for seed in range(3)]
    for what in ("mean", "worst_tenth", "std"):
        finals = [pd.read_csv(path)[f"clients_accuracy_{what}"].dropna().iloc[-1] for path in paths]
        assert line[f"clients_{what}"] == pytest.approx(np.mean(finals))
        assert line[f"clients_{what}_margin"] > 0


def test_figures_are_those_of_the_page(runs):
    found = fedray.compare(runs)
    captions = [caption for caption, _ in found.figures()]
    page = Page(page_of(found).html())
    assert [each["alt"] for each in page.all("img")] == captions


def test_values_at_which_runs_diverged_are_marked(runs):
    for seed in range(3):
        diverge(runs / f"fedavg-5.0-{seed}")
    diverge(runs / "fedprox-5.0-0")
    figures = dict(fedray.compare(runs).figures())
    caption = next(caption for caption in figures if caption.startswith("final test accuracy"))
    assert caption.endswith("over data.partition.alpha; bars are 95 % intervals; crosses: runs diverged")
    (axes,) = figures[caption].axes
    crosses = [list(line.get_xdata()) for line in axes.get_lines() if line.get_marker() == "x"]
    assert sorted(crosses) == [[5.0], [5.0]]


def test_partitions_are_compared_where_names_have_the_same_data(runs):
    """A key of the data in the names of some groups says nothing about the others."""
    for seed in range(3):
        path = runs / f"fedprox-5.0-{seed}/summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"partition_hash": "another"}))
        further = Path(shutil.copytree(runs / f"fedavg-5.0-{seed}", runs / f"public-{seed}"))
        change(further / "config.yaml", data__public_samples=5)
    notes = fedray.compare(runs, by=["algorithm.name", "data.public_samples"]).environments[-1].notes
    assert any("clients hold other samples" in note for note in notes)


def test_a_curve_is_the_mean_over_seeds_with_its_interval(runs):
    curves = fedray.compare(runs, x="iterations").curves()
    own = curves[(curves["environment"] == "alpha=5") & (curves["group"] == "fedavg")]
    each = [pd.read_csv(runs / f"fedavg-5.0-{seed}/metrics.csv").dropna(subset="test_accuracy") for seed in range(3)]
    values = np.array([rows["test_accuracy"] for rows in each])
    assert own["round"].tolist() == [2, 4, 6]
    assert own["x"].tolist() == [6, 12, 18]
    assert own["mean"].to_numpy() == pytest.approx(values.mean(0))
    low, high = stats.t.interval(0.95, 2, loc=values.mean(0), scale=stats.sem(values))
    assert own["low"].to_numpy() == pytest.approx(low)
    assert own["high"].to_numpy() == pytest.approx(high)


def test_diverged_runs_are_counted_and_in_no_mean(runs):
    for seed in (0, 1):
        path = runs / f"fedprox-5.0-{seed}/summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "diverged"}))
    found = fedray.compare(runs, targets=[0.1])
    line = found.table.set_index(["environment", "group"]).loc[("alpha=5", "fedprox")]
    final = json.loads((runs / "fedprox-5.0-2/summary.json").read_text())["final_accuracy"]
    assert (line["runs"], line["diverged"], line["final"]) == (3, 2, final)
    took = found.targets.set_index(["environment", "group"]).loc[("alpha=5", "fedprox")]
    assert took["reached"] == 1
    assert math.isinf(took["rounds_to"])


def test_targets_are_those_that_all_runs_have(runs):
    """``run.targets`` of the runs themselves, unless others are asked for."""
    for path in runs.glob("*-5.0-*/config.yaml"):
        change(path, run__targets=[0.2, 0.3] if "fedavg" in str(path) else [0.3, 0.4])
    change(runs / "fedavg-0.1-0/config.yaml", run__targets=[0.3])
    found = fedray.compare(runs)
    targets = found.targets.groupby("environment")["target"].unique()
    assert targets["alpha=5"].tolist() == [0.3]
    final = found.table.set_index(["environment", "group"]).loc[("alpha=0.1", "fedavg"), "final"]
    assert targets["alpha=0.1"].tolist() == [final]
    assert fedray.compare(runs, targets=[0.25]).targets["target"].unique().tolist() == [0.25]


def test_small_and_large_metrics_have_digits():
    loss = Measure("mean_squared_error", "min")
    assert with_interval([0.00061], digits_of([0.00061], loss)) == "0.0006100"
    assert with_interval([589831004.4], digits_of([589831004.4], loss)) == "589831004"
    assert digits_of([0.5], Measure()) == digits_of([], loss) == 2


def test_names_with_signs_are_drawn_as_they_are(runs, tmp_path):
    for seed in range(3):
        change(runs / f"fedprox-5.0-{seed}/config.yaml", algorithm__name="a$^$b_|%&<.py:Mine")
    write(fedray.compare(runs), tmp_path / "out")
    assert "a$^$b_|%&amp;&lt;:Mine" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/curves.png").exists()


def test_more_groups_than_a_panel_has_lines(compared, tmp_path):
    """Twelve groups: two panels, both with the baseline."""
    for number in range(12):
        folder = Path(shutil.copytree(compared / "fedavg-5.0-0", tmp_path / f"runs/{number}"))
        change(folder / "config.yaml", train__lr=0.05 if not number else 0.1 + number)
    found = fedray.compare(tmp_path / "runs", baseline="lr=0.05")
    from fedray.results.pictures import panels_of

    panels = list(panels_of(found, found.environments[0], ["test_accuracy"]))
    assert [len(panel.curves) for panel in panels] == [9, 4]
    assert all(panel.curves[0].name == "lr=0.05" for panel in panels)
    drawn = {curve.name for panel in panels for curve in panel.curves}
    assert drawn == {group.label for group in found.environments[0].groups}
    assert write(found, tmp_path / "out")


def test_runs_of_other_code_are_no_repetitions(runs):
    assert "algorithm.code" not in fedray.compare(runs).table
    for seed in range(3):
        copy = Path(shutil.copytree(runs / f"fedavg-0.1-{seed}", runs / f"new-{seed}"))
        other_input(copy, **{"code of the algorithm": "f" * 64})
    table = fedray.compare(runs).table
    own = table[(table["algorithm.name"] == "fedavg") & (table["environment"] == "alpha=0.1")]
    assert own["runs"].tolist() == [3, 3]
    assert "ffffffff" in own["algorithm.code"].tolist()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("code of the model", "model.code"),
        ("configuration of the model", "model.configuration"),
        ("code of the head", "model.head.code"),
        ("code of train.sampling", "train.sampling.code"),
        ("code of data.transform=mine.py:noise", "data.transform.code"),
        ("code of transform", "data.transform.code"),
        ("step 2 of train.upload", "train.upload.2.code"),
        ("loss", "task.loss.code"),
        ("metric accuracy", "task.metric.code"),
        ("training data", "data.training_set"),
        ("test data", "data.test_set"),
    ],
)
def test_runs_of_other_code_or_data_are_no_repetitions(runs, name, key):
    for seed in range(3):
        copy = Path(shutil.copytree(runs / f"fedavg-0.1-{seed}", runs / f"new-{seed}"))
        other_input(copy, **{name: "f" * 64})
    table = fedray.compare(runs).table
    own = table[table["algorithm.name"] == "fedavg"]
    new = own[own[key] == "ffffffff"]
    assert new["runs"].tolist() == [3]
    is_apart = key.startswith(("data.", "model.c", "task.metric"))
    assert (new["environment"].tolist() == own[own[key] != "ffffffff"]["environment"].tolist()[:1]) is not is_apart


def test_files_of_the_same_name_are_other_environments(runs):
    """One algorithm was run on the data of one file, the other on those of the other."""
    for name, folder in (("fedavg", "a"), ("fedprox", "b")):
        for seed in range(3):
            change(runs / f"{name}-0.1-{seed}/config.yaml", data__source=f"{folder}/mine.py:load")
    found = fedray.compare(*(runs / f"{name}-0.1-{seed}" for name in ("fedavg", "fedprox") for seed in range(3)))
    assert [each.name for each in found.environments] == ["a/mine.py:load", "b/mine.py:load"]


def test_markdown_and_numbers_are_as_they_were_written():
    table = pd.DataFrame({"": ["a_b<script>.py:X", "_x_ `*|[y] ~~z~~ &lt;"], "n": [1.0, 2.0]})
    text = markdown(table)
    assert r"a_b\<script>.py:X" in text
    assert r"\_x\_ \`\*\|\[y\] \~\~z\~\~ \&lt;" in text
    assert [in_units(value) for value in (12345.0, 0.01234567, 999.94)] == ["12,345", "0.01235", "999.9"]
    assert name_of_values({"train.lr": 0.0123456789}) != name_of_values({"train.lr": 0.0123456788})
    assert name_of_values({"train.lr": 0.1}) == "lr=0.1"


def test_lines_have_their_markers_at_different_points():
    for lines, points in ((9, 12), (5, 20), (3, 200), (9, 9)):
        places = [each.options(points)["markevery"] for each in lines_for([str(n) for n in range(lines)]).values()]
        marked = [{*range(start, points, every)} for start, every in places]
        assert all(marked)
        assert sum(map(len, marked)) == len(set.union(*marked))


def test_pictures_for_a_paper(runs, tmp_path, capsys):
    """As wide as a column, with text of a caption's size, in PDF with fonts that publishers take."""
    assert main(["compare", str(runs), "--style", "paper", "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"curves.pdf", "curves.svg", "figure-1.pdf"} <= files
    pdf = (tmp_path / "out" / "curves.pdf").read_bytes()
    assert b"/Type3" not in pdf
    (box,) = set(re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+)", pdf))
    assert float(box[0]) <= 2 * 3.3 * 72 + 1
    with styled("paper"):
        figure = curves_figure(fedray.compare(runs))
    sizes = {text.get_fontsize() for axes in figure.axes for text in axes.findobj(Text) if text.get_text()}
    assert max(sizes) <= 9
    assert len({line.get_linestyle() for line in figure.axes[0].lines}) > 1
    for seed in range(3):
        change(
            runs / f"fedprox-0.1-{seed}/config.yaml", algorithm__name="some/folder/mine.py:" + "Long" * (seed and 16)
        )
    with styled("paper"):
        figure = curves_figure(fedray.compare(runs))
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.x0 >= 0
        assert legend.x1 <= figure.bbox.width
        assert axes.get_window_extent().height > 100 * figure.dpi / 72
    assert style().formats == ("png", "svg")
    tex = (tmp_path / "out" / "comparison.tex").read_text()
    labels = re.findall(r"\\label\{tab:[a-z0-9-]+\}", tex)
    assert len(set(labels)) == len(labels) == tex.count(r"\begin{table}")


def test_names_leave_out_what_is_not_set():
    lora = {"algorithm.name": "fedavg", "model.peft.kind": "lora", "train.momentum": None}
    assert name_of_values(lora) == "fedavg, lora"
    assert name_of_values(lora | {"model.peft.kind": "none"}) == "fedavg"
    assert name_of_values({"model.private": None}) == "private=null"
    assert name_of_values({"train.upload": [{"clip": 1}, {"topk": 0.05}]}, False) == "upload=[{clip: 1}, {topk: 0.05}]"
