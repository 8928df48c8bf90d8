"""fedray compare: real runs in groups, what they reached, and what is told of those that can't be compared."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from pages import Page
from scipy import stats

import fedray
from fedray.cli import main
from fedray.comparing.files import page_of, write
from fedray.comparing.grouping import shown
from fedray.comparing.measure import Measure
from fedray.comparing.statistics import with_interval
from fedray.comparing.style import lines_for
from fedray.comparing.tables import digits_of, in_units, markdown, tables_of
from fedray.errors import UserError

SETTINGS = {
    "data.source": "sample", "data.clients": 8, "data.partition.kind": "dirichlet", "model.name": "logistic",
    "train.cohort_size": 4, "train.local_steps": 3, "train.lr": 0.05, "run.rounds": 6, "run.eval_every": 2,
    "run.checkpoint_every": 0, "engine.kind": "local", "run.eval_clients": "all",
}  # fmt: skip


def make(folder: Path, name: str, **settings) -> Path:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return fedray.simulate(SETTINGS | keys | {"run.output": str(folder), "run.name": name}).folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two algorithms at two alphas over three seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for alpha in (0.1, 5.0):
        for seed in range(3):
            common = {"data__partition__alpha": alpha, "run__seed": seed, "data__seed": seed}
            make(folder, f"fedavg-{alpha}-{seed}", algorithm__name="fedavg", **common)
            make(folder, f"fedprox-{alpha}-{seed}", algorithm__name="fedprox", algorithm__mu=1.0, **common)
    return folder


@pytest.fixture
def runs(made, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


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


def cut(folder: Path, rounds: int) -> None:
    """Makes a run one that ended after so many rounds."""
    metrics = pd.read_csv(folder / "metrics.csv").iloc[:rounds]
    metrics.to_csv(folder / "metrics.csv", index=False)
    summary = json.loads((folder / "summary.json").read_text())
    final = float(metrics["test_accuracy"].dropna().iloc[-1])
    (folder / "summary.json").write_text(json.dumps(summary | {"rounds": rounds, "final": final}))


def diverge(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "diverged"}))


def test_a_missed_target_is_above_what_the_runs_took_that_missed_it(runs):
    """Those are of 4 and 6 rounds here; the run that diverged after 2 would never have reached it."""
    cut(runs / "fedprox-5.0-0", 4)
    cut(runs / "fedprox-5.0-1", 2)
    diverge(runs / "fedprox-5.0-1")
    found = fedray.compare(runs, targets=[1.0])
    took = found.targets.set_index(["environment", "group"]).loc[("alpha=5", "fedprox")]
    assert (took["rounds_to"], took["rounds_bound"]) == (math.inf, 4)
    (environment,) = [each for each in found.environments if each.name == "alpha=5"]
    table = next(table for table in tables_of(found, environment) if "100.00 %" in table.title)
    assert table.cells.set_index("").loc["fedprox", ["reached", "rounds"]].tolist() == ["0 of 3", "> 4"]


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


def test_of_several_versions_that_of_most_runs_is_compared(runs):
    path = runs / "fedavg-5.0-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": {"fedray": "99.0.0"}}))
    found = fedray.compare(runs)
    assert [each.folder.name for each in found.left_out] == ["fedavg-5.0-0"]
    assert found.table["runs"].sum() == 11


def test_other_processors_are_told(runs):
    for seed in range(3):
        path = runs / f"fedavg-5.0-{seed}/summary.json"
        machine = {"processes": [{"device": "another"}]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine}))
    notes = fedray.compare(runs).environments[1].notes
    assert any(note.startswith("the processors differ, on which seconds depend: another in fedavg") for note in notes)


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


def change(path: Path, **keys) -> None:
    config = yaml.safe_load(path.read_text())
    for key, value in keys.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    path.write_text(yaml.safe_dump(config))


def test_folders_that_cannot_be_compared_are_named_and_left_out(runs):
    def summary(name: str, **keys) -> None:
        path = runs / name / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    (runs / "fedavg-0.1-0/summary.json").unlink()
    summary("fedavg-0.1-1", status="interrupted", rounds=3)
    (runs / "fedavg-5.0-0/metrics.csv").write_text("round,test_accuracy\n1,0.5\n")
    (runs / "fedavg-5.0-1/summary.json").write_text("{")
    (runs / "fedprox-0.1-0/config.yaml").write_text("run: [")
    summary("fedprox-0.1-1", versions={"fedray": "0.0.9"})
    (runs / "fedprox-5.0-0").rename(runs / "fedprox-5.0-0.bak-1")
    metrics = pd.read_csv(runs / "fedprox-5.0-1/metrics.csv")
    metrics.assign(test_accuracy=np.nan).to_csv(runs / "fedprox-5.0-1/metrics.csv", index=False)
    found = fedray.compare(runs)
    reasons = {each.folder.name: each.reason for each in found.left_out}
    wanted = {
        "fedavg-0.1-0": "has not ended",
        "fedavg-0.1-1": "interrupted after 3 of 6 rounds",
        "fedavg-5.0-0": "metrics.csv is damaged",
        "fedavg-5.0-1": "is damaged",
        "fedprox-0.1-0": "not valid YAML",
        "fedprox-0.1-1": "another version of fedray, 0.0.9",
        "fedprox-5.0-0.bak-1": "set aside",
        "fedprox-5.0-1": "no test_accuracy",
    }
    assert reasons.keys() == wanted.keys()
    assert all(wanted[name] in reasons[name] for name in wanted)
    assert found.table["runs"].sum() == 4
    assert "fedprox-0.1-1" not in {each.folder.name for each in fedray.compare(runs, any_version=True).left_out}


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("metrics.csv", lambda lines: lines[:4], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: lines[:3] + lines[4:], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: lines + lines[-1:], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: [], "it is empty"),
        (
            "metrics.csv",
            lambda lines: [*lines[:-1], lines[-1].replace("0.", "x.")],
            "In CSV column #6: CSV conversion error",
        ),
        ("summary.json", lambda lines: [], "Expecting value: line 1 column 1"),
        ("summary.json", lambda lines: ["[]"], "it does not hold status"),
        ("config.yaml", lambda lines: [], "it lacks run, algorithm, data, model, train, engine"),
        ("config.yaml", lambda lines: lines[:12], "it lacks algorithm, data, model, train, engine"),
        ("config.yaml", lambda lines: lines[:-3], "it lacks its end"),
        ("inputs.json", lambda lines: ["{"], "Expecting property name"),
    ],
)
def test_a_damaged_file_is_named(runs, capsys, name, damage, reason):
    path = runs / "fedavg-0.1-0" / name
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.folder == path.parent
    assert f"{name} is damaged: {reason}" in left_out.reason
    assert main(["report", str(path.parent)]) == 2
    assert f"{name} is damaged: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (("metrics.csv", "summary.json"), "can't read the config file"),
        (("config.yaml", "inputs.json"), "the run has not ended"),
        (("config.yaml", "summary.json"), "can't read metrics.csv: No such file"),
    ],
)
def test_a_run_of_which_files_are_gone_is_named(runs, kept, reason):
    folder = runs / "fedavg-0.1-0"
    for name in {"config.yaml", "inputs.json", "metrics.csv", "summary.json"}.difference(kept):
        (folder / name).unlink()
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.folder == folder
    assert left_out.reason.startswith(reason)


@pytest.mark.parametrize("rounds", [[], "many", None])
def test_a_value_of_another_type_is_damage(runs, rounds):
    path = runs / "fedavg-0.1-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rounds": rounds}))
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.reason.startswith("it is damaged: ")


def test_an_evaluation_that_is_gone_is_missed(runs):
    path = runs / "fedavg-0.1-0/metrics.csv"
    rows = pd.read_csv(path)
    rows.loc[5, "test_accuracy"] = np.nan
    rows.to_csv(path, index=False)
    (left_out,) = fedray.compare(runs).left_out
    assert "metrics.csv is damaged: it ends with 0." in left_out.reason


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


def test_what_makes_groups_unequal_is_told(runs):
    for seed in range(3):
        folder = runs / f"fedprox-5.0-{seed}"
        change(folder / "config.yaml", train__weighting="uniform", train__batch_size=16)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"parameters": 99}))
    shutil.rmtree(runs / "fedavg-5.0-2")
    alike, unequal = fedray.compare(runs, targets=[0.1]).environments
    assert alike.notes == []
    assert unequal.notes == [
        "the models differ in their parameters: 7,850 in fedavg; 99 in fedprox",
        "clients are weighted differently (train.weighting): samples in fedavg; uniform in fedprox",
        "the batches differ in size: 64 in fedavg; 16 in fedprox",
        "the seeds differ: 0 1 in fedavg; 0 1 2 in fedprox",
    ]


def test_the_files(runs, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["compare", str(runs), "--output", str(output), "--target", "0.3"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "alpha=0.1" in out
    assert "what it took to reach 30.00 %" in out
    names = {path.name for path in output.iterdir()}
    tables = {"comparison.csv", "targets.csv", "comparison.md", "comparison.tex"}
    assert names == {"comparison.json", "curves.png", "curves.svg", "report.html", *tables}
    assert len(pd.read_csv(output / "comparison.csv")) == 4
    tex = (output / "comparison.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 8
    assert re.search(r"(?<!\\)%", tex) is None
    assert "±" not in tex
    page = Page((output / "report.html").read_text())
    page.check()
    assert len(page.all("table")) == 8
    # the accuracy, two losses and the distribution over clients of each environment; over alpha the accuracy, the
    # rounds to the target, and the seconds
    assert len(page.all("img")) == 11
    # the baseline's paired difference is told in the page as in the command's table
    assert "difference to fedavg, points" in page.text
    # the same comparison again replaces its files; another one does not
    before = (output / "report.html").read_bytes()
    assert main(command) == 0
    assert (output / "report.html").read_bytes() == before
    capsys.readouterr()
    assert main([*command, "--by", "data.partition.alpha"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "holds something else than this comparison" in said.err
    assert (output / "report.html").read_bytes() == before


def test_no_folder_is_named_and_none_is_overwritten(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for x in ("rounds", "flops", "rounds"):
        assert main(["compare", "runs", "--x", x]) == 0
    assert "into comparison-2" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("comparison*")) == ["comparison", "comparison-2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not there: give folders of runs"),
        (["empty"], "there is no run folder in empty"),
        (["runs", "--by", "algorithm.nam"], "--by algorithm.nam: there is no such key .did you mean 'algorithm.name'"),
        (["runs", "--by", "lr"], r"--by lr: there is no such key .did you mean 'train.lr'..; these runs differ in alg"),
        (["runs", "--by", "xyzzy"], "--by xyzzy: there is no such key; these runs differ in algorithm.name, "),
        (["runs", "--by", "train.lr"], "--by train.lr: all runs have the same; these runs differ in algorithm.name, "),
        (["runs", "--x", "round"], "--x: there is no 'round' .did you mean 'rounds'"),
        (["runs", "--x", "virtual_seconds"], "--x virtual_seconds: no run has it"),
        (["runs", "--baseline", "fedavgg"], "--baseline: there is no group 'fedavgg' .did you mean 'fedavg'"),
        (["runs", "--target", "much"], "argument --target: invalid float value: 'much'"),
        (["runs", "--target", "80"], "--target must be between 0 and 1, as in 0.8 for 80 %, not 80"),
        (["runs", "--target", "nan"], "--target must be between 0 and 1, as in 0.8 for 80 %, not nan"),
        (["runs", "--by", "run.seed"], "--by run.seed: it is no part of a result"),
        (["runs", "--last", "0"], "--last must be at least 1, not 0"),
        ([], "give folders of runs, as in: fedray compare runs/"),
    ],
)
def test_mistakes(words, message, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(made)
    (tmp_path / "empty").mkdir()
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "runs"]


def test_runs_without_the_axis(runs):
    """A group without virtual seconds was missing in the picture without a word."""
    for path in runs.glob("fedprox-*/metrics.csv"):
        pd.read_csv(path).assign(virtual_seconds=1.5).to_csv(path, index=False)
    for environment in fedray.compare(runs, x="virtual_seconds").environments:
        assert "fedavg has runs without virtual_seconds, so that there is no curve of it" in environment.notes
        assert not any("fedprox has" in note for note in environment.notes)


def test_a_run_made_twice_counts_once(runs):
    """Three copies of one run were a mean with the interval 0."""
    for name in ("copy", "another"):
        shutil.copytree(runs / "fedavg-5.0-0", runs / name)
    (runs / "deep").mkdir()
    (runs / "deep/link").symlink_to(runs / "fedavg-5.0-1")
    other = runs / "another/config.yaml"
    other.write_text(other.read_text().replace("channels_last: false", "channels_last: true"))
    found = fedray.compare(runs)
    assert found.table["runs"].tolist() == [3, 3, 3, 3]
    assert all("it is the same run as" in each.reason for each in found.left_out)
    assert any(each.reason.endswith("with the same seeds, but for engine.channels_last") for each in found.left_out)


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


def test_what_is_said_of_the_baseline(runs):
    """One that is missing, one of several, and one that does not reach the target itself."""
    for seed in range(3):
        change(runs / f"fedavg-0.1-{seed}/config.yaml", algorithm__name="scaffold")
        change(runs / f"fedprox-5.0-{seed}/config.yaml", algorithm__name="fedavg", train__lr=0.5)
    first, second = fedray.compare(runs, targets=[0.99]).environments
    missing = "there is no fedavg here, so that there are no differences and speed-ups"
    assert missing in first.notes
    assert (
        f"{missing}, and the target is the mean of the group that ends worst"
        in fedray.compare(runs).environments[0].notes
    )
    best = max(second.rows, key=lambda row: row["final"])["group"]
    assert second.baseline.label == best
    assert f"the baseline is {best}, the best of 2 groups of fedavg" in second.notes
    assert f"{best} reached 99.00 % in 0 of 3 runs, so that there are no speed-ups to it" in second.notes


def test_small_and_large_metrics_have_digits():
    loss = Measure("mean_squared_error", "min")
    assert with_interval([0.00061], digits_of([0.00061], loss)) == "0.0006100"
    assert with_interval([589831004.4], digits_of([589831004.4], loss)) == "589831004"
    assert digits_of([0.5], Measure()) == digits_of([], loss) == 2


def test_a_linked_run_below_a_folder_is_found(runs, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a").symlink_to(runs / "fedavg-5.0-0")
    (tmp_path / "links/back").symlink_to(tmp_path / "links")
    assert fedray.compare(tmp_path / "links").table["runs"].tolist() == [1]


def test_settings_and_data_that_differ_are_told(runs):
    """Another rate of one algorithm, and within a group another loss and other data."""
    for seed in range(3):
        change(runs / f"fedprox-5.0-{seed}/config.yaml", train__lr=0.5)
    path = runs / "fedavg-5.0-1/inputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"training data": "0123", "loss": "4567"}))
    notes = fedray.compare(runs, by=["algorithm.name"]).environments[-1].notes
    assert any(note.startswith("the training data differ: ") and "0123" in note for note in notes)
    assert any(note.startswith("the losses differ: ") and "4567" in note for note in notes)
    found = fedray.compare(*(runs / f"{name}-5.0-{seed}" for name in ("fedavg", "fedprox") for seed in range(3)))
    assert "train.lr differs: 0.05 in fedavg; 0.5 in fedprox" in found.environments[0].notes


def test_names_with_signs_are_drawn_as_they_are(runs, tmp_path):
    for seed in range(3):
        change(runs / f"fedprox-5.0-{seed}/config.yaml", algorithm__name="a$^$b_|%&<.py:Mine")
    write(fedray.compare(runs), tmp_path / "out")
    assert "a$^$b_|%&amp;&lt;.py:Mine" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/curves.png").exists()


def test_other_main_metrics_are_refused(runs):
    path = runs / "fedavg-5.0-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metric": "mean_squared_error", "mode": "min"}))
    rows = pd.read_csv(runs / "fedavg-5.0-0/metrics.csv")
    rows.assign(test_mean_squared_error=rows["test_accuracy"]).to_csv(runs / "fedavg-5.0-0/metrics.csv", index=False)
    with pytest.raises(UserError, match="main metrics differ"):
        fedray.compare(runs)


def test_more_groups_than_a_panel_has_lines(made, tmp_path):
    """Twelve groups: two panels, both with the baseline."""
    for number in range(12):
        folder = Path(shutil.copytree(made / "fedavg-5.0-0", tmp_path / f"runs/{number}"))
        change(folder / "config.yaml", train__lr=0.05 if not number else 0.1 + number)
    found = fedray.compare(tmp_path / "runs", baseline="lr=0.05")
    from fedray.comparing.pictures import panels_of

    panels = list(panels_of(found, found.environments[0], ["test_accuracy"]))
    assert [len(panel.curves) for panel in panels] == [9, 4]
    assert all(panel.curves[0].name == "lr=0.05" for panel in panels)
    drawn = {curve.name for panel in panels for curve in panel.curves}
    assert drawn == {group.label for group in found.environments[0].groups}
    assert write(found, tmp_path / "out")


def other_input(folder: Path, **inputs) -> None:
    path = folder / "inputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | inputs))


def notes_of(runs: Path, **options) -> list[str]:
    found = fedray.compare(runs, **options)
    return [*(note for each in found.environments for note in each.notes), *found.notes]


def test_runs_of_other_code_are_no_repetitions(runs):
    assert "algorithm.code" not in fedray.compare(runs).table
    for seed in range(3):
        copy = Path(shutil.copytree(runs / f"fedavg-0.1-{seed}", runs / f"new-{seed}"))
        other_input(copy, **{"code of the algorithm": "f" * 64})
    table = fedray.compare(runs).table
    own = table[(table["algorithm.name"] == "fedavg") & (table["environment"] == "alpha=0.1")]
    assert own["runs"].tolist() == [3, 3]
    assert "ffffffff" in own["algorithm.code"].tolist()


def test_scores_of_other_clients_are_told(runs):
    for seed in range(3):
        change(runs / f"fedprox-0.1-{seed}/config.yaml", run__eval_clients=2)
    assert "different clients were scored one by one (run.eval_clients): all in fedavg; 2 in fedprox" in notes_of(runs)


def test_settings_that_differ_between_environments_are_told(runs, capsys):
    for folder in runs.glob("f*-5.0-*"):
        change(folder / "config.yaml", train__lr=0.5)
    line = "train.lr differs: 0.05 in alpha=0.1; 0.5 in alpha=5"
    assert fedray.compare(runs).notes == [line]
    assert main(["compare", str(runs), "--output", str(runs.parent / "out")]) == 0
    assert line in capsys.readouterr().out
    assert line in (runs.parent / "out/report.html").read_text()
    assert line in (runs.parent / "out/comparison.md").read_text()


def test_settings_of_an_algorithm_that_differ_together_are_told(runs):
    for folder in runs.glob("fedavg-*"):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["algorithm"] = {"name": "slowmo", "beta": 0.5, "alpha": 1.0}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        copy = Path(shutil.copytree(folder, folder.with_name(folder.name.replace("fedavg", "other"))))
        change(copy / "config.yaml", algorithm__beta=0.25, algorithm__alpha=0.5)
    lines = [note for note in notes_of(runs) if "alpha differs" in note or "beta differs" in note]
    assert len(lines) == 2
    assert all("slowmo" in line for line in lines)


def test_curves_of_a_part_of_the_rounds_are_told(runs):
    cut(runs / "fedprox-0.1-0", 4)
    line = "the curve of fedprox has 2 of its 3 evaluated rounds: those in which all its runs were evaluated"
    assert line in notes_of(runs)


def test_without_a_baseline_that_ended_there_is_no_target(runs):
    for seed in range(3):
        diverge(runs / f"fedavg-0.1-{seed}")
    assert any(note.startswith("there is no target, because none of the runs has ended") for note in notes_of(runs))


def test_seeds_of_the_data_alone_are_told(runs):
    for seed in range(3):
        change(runs / f"fedprox-0.1-{seed}/config.yaml", data__seed=100 + seed)
    (line,) = [note for note in notes_of(runs) if note.startswith("the seeds differ")]
    assert "0 (data.seed=100) 1 (data.seed=101) 2 (data.seed=102) in fedprox" in line


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("evaluation.parquet", lambda path: max(path.glob("part-*")).write_bytes(b"PAR1")),
        ("metrics.csv", lambda path: path.write_text(path.read_text().replace("cohort_size", "other", 1))),
        (
            "summary.json",
            lambda path: path.write_text(path.read_text().replace('"versions": {', '"versions": 3, "x": {')),
        ),
    ],
)
def test_what_is_damaged_leaves_out_the_run_alone(runs, name, damage):
    damage(runs / "fedavg-0.1-0" / name)
    (left_out,) = fedray.compare(runs).left_out
    assert f"{name} is damaged" in left_out.reason


@pytest.mark.parametrize("name", ["clients.parquet/part-*", "partition.parquet"])
def test_a_page_of_a_damaged_run_is_refused(runs, name, capsys):
    next((runs / "fedavg-0.1-0").glob(name)).write_bytes(b"PAR1")
    assert main(["report", str(runs / "fedavg-0.1-0")]) == 2
    assert f"{name.partition('/')[0]} is damaged" in capsys.readouterr().err


def test_markdown_and_numbers_are_as_they_were_written():
    table = pd.DataFrame({"": ["a_b<script>.py:X", "_x_ `*|[y]"], "n": [1.0, 2.0]})
    text = markdown(table)
    assert r"a_b\<script>.py:X" in text
    assert r"\_x\_ \`\*\|\[y\]" in text
    assert [in_units(value) for value in (12345.0, 0.01234567, 999.94)] == ["12,345", "0.01235", "999.9"]
    assert shown({"train.lr": 0.0123456789}) != shown({"train.lr": 0.0123456788})
    assert shown({"train.lr": 0.1}) == "lr=0.1"


def test_lines_have_their_markers_at_different_points():
    for lines, points in ((9, 12), (5, 20), (3, 200), (9, 9)):
        places = [each.options(points)["markevery"] for each in lines_for([str(n) for n in range(lines)]).values()]
        marked = [{*range(start, points, every)} for start, every in places]
        assert all(marked)
        assert sum(map(len, marked)) == len(set.union(*marked))
