"""Means, curves, boxes and seeds of published tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from published_tables import ASKED, write_run
from reproduce import main
from reproducing.measure import frame, measured
from reproducing.pictures import curves, picture
from reproducing.provenance import made_by
from reproducing.published import read_table
from reproducing.report import text_of


def test_a_mean_of_rounds_needs_all_runs_to_reach_the_target(mine):
    runs = mine / "runs/paper/small"
    for seed, first in enumerate((1, 2, 6)):
        write_run(runs / f"fedavg_run.stop_at_0.3/seed-{seed}", [0.1] * (first - 1) + [0.4])
        write_run(runs / f"fedprox_run.stop_at_0.3/seed-{seed}", [0.1] * 3 + [0.4] * (seed > 0))
    table = replace(read_table("paper/rounds"), over_runs="mean")
    text = text_of(table, measured(table, mine / "runs", 3), made_by(ASKED, []))
    assert "Rounds until the target, as means over seeds" in text
    # Student's t of two degrees of freedom, times the deviation of 1, 2 and 6
    margin = 4.302653 * np.std([1, 2, 6], ddof=1) / 3**0.5
    assert f"| fedavg | 3 ± {margin:.2g} (4) |" in text
    # rounds 4 and 4, and more than 3
    assert "| fedprox | > 3.67, 2 of 3 reached it (8) |" in text


def test_the_interval_of_a_ratio_of_means(mine):
    """Rounds 3, 4 and 8 over 2, 2 and 5: the ratio is 5/3, and the deviations 3 - 5/3 * 2 and so on are -1/3, 2/3 and
    -1/3, so that their mean has the margin t * 1/3, over 3."""
    runs = mine / "runs/paper/small"
    for seed, (ours, first) in enumerate(((3, 2), (4, 2), (8, 5))):
        write_run(runs / f"fedavg_run.stop_at_0.3/seed-{seed}", [0.1] * (first - 1) + [0.4])
        write_run(runs / f"fedprox_run.stop_at_0.3/seed-{seed}", [0.1] * (ours - 1) + [0.4])
    table = replace(read_table("paper/ratio"), over_runs="mean")
    first, ratio = measured(table, mine / "runs", 3)
    assert (first.value, ratio.value) == pytest.approx((3, 5 / 3))
    assert first.margin == pytest.approx(4.302653 * 3**0.5 / 3**0.5)
    assert ratio.margin == pytest.approx(4.302653 / 9)


def test_curves_of_the_runs(mine):
    """Each column has a panel; columns of the same runs share it. A row whose runs all diverged is named."""
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg/seed-0", [0.1, 0.4, 0.5])
    write_run(runs / "fedprox/seed-0", [0.1, 0.2], "diverged")
    column = {"experiment": "paper/small"}
    columns = {"1": column | {"round": 1}, "2": column | {"round": 2}, "3": column | {"with": {"train.lr": 0.5}}}
    table = {"title": "T", "measure": "at_round", "seeds": 1, "rows": ["fedavg", "fedprox"], "columns": columns}
    (mine / "experiments/paper/published/at.yaml").write_text(yaml.safe_dump(table))
    read = read_table("paper/at")
    (axes,) = curves(read, measured(read, mine / "runs", 1)).axes
    assert axes.get_title(loc="left") == "1 and 2; one seed"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fedavg", "fedprox (1 of 1 diverged)"]
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([10, 40, 50])
    assert curves(read, measured(read, mine / "nowhere", 1)) is None


def test_a_column_may_name_its_seeds(mine, capsys):
    column = {"experiment": "paper/small", "seeds": [4, 7]}
    table = {"title": "T", "measure": "final", "seeds": 2, "rows": ["fedavg"], "columns": {"a": column}}
    (mine / "experiments/paper/published/chosen.yaml").write_text(yaml.safe_dump(table))
    write_run(mine / "runs/paper/small/fedavg/seed-7", [0.1, 0.5])
    read = read_table("paper/chosen")
    (cell,) = read.cells
    planned = cell.planned(2, {})
    assert [run.folder.rpartition("/")[2] for run in planned] == ["seed-4", "seed-7"]
    assert [run.settings["data.seed"] for run in planned] == [4, 7]
    (one,) = measured(read, mine / "runs", 2)
    assert (one.value, len(one.runs)) == (50, 1)
    assert main(["paper/chosen", "--seeds", "3"]) == 2
    said = "fedray: --seeds 3: paper/chosen has columns with 2 chosen seeds, and no others"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_the_best_round_of_the_clients_models(mine):
    column = {"experiment": "paper/small", "published": [45.0, 31.0]}
    rows = ["fedavg", {"its clients": {"with": {"algorithm.name": "fedavg"}, "of": "local"}}]
    table = {"title": "T", "measure": "best", "seeds": 2, "rows": rows, "columns": {"a": column}}
    (mine / "experiments/paper/published/best.yaml").write_text(yaml.safe_dump(table))
    for seed, values in enumerate(([0.1, 0.5, 0.4], [0.1, 0.2, 0.4])):
        folder = mine / f"runs/paper/small/fedavg/seed-{seed}"
        write_run(folder, values)
        rows_of_run = pd.read_csv(folder / "metrics.csv")
        rows_of_run.assign(local_accuracy=rows_of_run["test_accuracy"] / 2).to_csv(folder / "metrics.csv", index=False)
    read = read_table("paper/best")
    found = measured(read, mine / "runs", 2)
    assert [one.value for one in found] == pytest.approx([45, 22.5])
    text = text_of(read, found, made_by(ASKED, []))
    assert "Test accuracy of the round in which it was best, in percent" in text
    assert "In the row 'its clients' it is the mean test accuracy of the clients' models before they are" in text


def test_the_loss_at_the_end(mine):
    column = {"experiment": "paper/small", "published": [2.0]}
    table = {"title": "T", "measure": "loss", "seeds": 2, "rows": ["fedavg"], "columns": {"a": column}}
    (mine / "experiments/paper/published/loss.yaml").write_text(yaml.safe_dump(table))
    for seed, losses in enumerate(([2.3, 1.0], [2.2, 2.0])):
        folder = mine / f"runs/paper/small/fedavg/seed-{seed}"
        write_run(folder, [0.1, 0.2])
        pd.read_csv(folder / "metrics.csv").assign(test_loss=losses).to_csv(folder / "metrics.csv", index=False)
    read = read_table("paper/loss")
    found = measured(read, mine / "runs", 2)
    assert found[0].value == pytest.approx(1.5)
    assert frame(read, found)["deviation"].item() == pytest.approx(-0.25)
    text = text_of(read, found, made_by(ASKED, []))
    assert "Test loss at the end, as the mean over seeds" in text
    (axes,) = curves(read, found).axes
    assert axes.get_ylabel() == "test loss"
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([2.25, 1.5])
    (axes,) = picture(read, found).axes
    assert axes.get_xlabel().startswith("test loss")


def test_smoothed_curves_and_boxes_of_the_last_rounds(mine):
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg/seed-0", [0.1, 0.4, 0.5])
    write_run(runs / "fedavg/seed-1", [0.2, 0.3, 0.6])
    table = {"title": "T", "measure": "last", "seeds": 2, "rows": ["fedavg"], "smoothing": 0.5, "marks": "boxes"}
    (mine / "experiments/paper/published/box.yaml").write_text(
        yaml.safe_dump(table | {"columns": {"a": {"experiment": "paper/small"}}})
    )
    read = read_table("paper/box")
    (one,) = measured(read, mine / "runs", 2)
    assert sorted(one.spread) == pytest.approx([10, 20, 30, 40, 50, 60])
    (axes,) = curves(read, [one]).axes
    # (0.1, 0.25, 0.375) and (0.2, 0.25, 0.425) on average
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([15, 25, 40])
    (axes,) = picture(read, [one]).axes
    assert "boxes: last rounds of all runs" in axes.get_xlabel()
    assert any(list(line.get_xdata()) == pytest.approx([35, 35]) for line in axes.get_lines())
