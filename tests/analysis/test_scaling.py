"""The program that measures how rounds grow: what it measures, that it goes on, and its model of a round's time."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedray

ANALYSIS = Path(fedray.__file__).parent.parent / "analysis"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    # as the program itself does
    monkeypatch.syspath_prepend(ANALYSIS / "benchmarks")


TRUE = {
    "round": 0.006, "task": 0.0015, "client": 5e-5, "registered client": 1e-8, "million parameters": 0.012,
    "actor": 0.0005, "MB of sums": 0.0009, "MB between hosts": 0.002,
    "step of logistic regression": 0.00015, "step of LeNet-5": 0.003, "step of GHBM's CNN": 0.015,
    "step of ResNet-18": 0.11,
}  # fmt: skip

PARAMETERS = {"logistic": 7850, "lenet5": 61_706, "ghbm_cnn": 797_962, "resnet18": 11_181_642}


def made_up(quick=False, hosts=3, noise=0.0):
    """Measured points of the whole grid, as the model with the coefficients ``TRUE`` says, times random errors."""
    from round_time.model import Fit, Measured, step_of
    from round_time.points import WORKS, grid
    from round_time.traffic import Known

    steps = {model: TRUE[step_of(model)] for model in WORKS}
    truth = Fit(TRUE, {m: Known(PARAMETERS[m], steps[m] / WORKS[m].batch) for m in WORKS})
    rng = np.random.default_rng(1)
    rows = []
    for point in grid(quick, hosts, gpu=False):
        seconds, work = truth.seconds(point, 2), steps[point.model] * point.steps * point.cohort
        errors = np.exp(noise * rng.standard_normal(2))
        rows.append(Measured(point, errors[0] * seconds, errors[1] * work, 2, PARAMETERS[point.model]))
    return rows, truth


@pytest.mark.parametrize(("quick", "hosts"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_no_point_is_measured_twice(quick, hosts):
    from round_time.points import expected_minutes, grid

    points = grid(quick, hosts, gpu=True, turns=2)
    assert len(set(points)) == len(points)
    assert {point.turn for point in points} == {0, 1}
    assert max(point.hosts for point in points) == hosts
    assert all(point.cohort <= point.clients and point.actors >= point.hosts for point in points)
    assert expected_minutes(grid(quick, hosts, gpu=False), 1.5 if quick else 5.0) < (5 if quick else 60)


def test_the_fit_finds_the_coefficients_of_made_up_points():
    from round_time.model import COHORT, PROJECTED, checks, fit, projected

    rows, truth = made_up()
    assert fit(rows).seconds_of == pytest.approx(TRUE, rel=1e-3)
    # a term that takes no time gets none
    without = replace(truth, seconds_of=TRUE | {"actor": 0.0})
    rows = [replace(row, seconds=without.seconds(row.point, 2)) for row in rows]
    assert fit(rows).seconds_of["actor"] == 0
    noisy, _ = made_up(noise=0.05)
    # and one point that was disturbed
    noisy[20] = replace(noisy[20], seconds=3 * noisy[20].seconds)
    fitted = fit(noisy)
    for model, steps in PROJECTED:
        point, processors = projected(model, 100, 4, steps=steps, **COHORT)
        assert fitted.seconds(point, processors) == pytest.approx(truth.seconds(point, processors), rel=0.2)
    found = {check.name: check for check in checks(noisy)}
    assert len(found) == 4
    for check in found.values():
        assert np.median(np.abs(check.errors)) < 0.1, check.name


def test_what_reaches_the_server_is_what_fedray_sends():
    from round_time.points import Point
    from round_time.traffic import Known, sent

    found = sent(Point("lenet5", 100, actors=2), Known(61_706, 0.0002))
    # the README of the engine: 40, 40, 8, 8, 2 and 2 clients
    assert found.tasks == 6
    # counted in a run on Ray
    assert found.nodes == 13
    stacked = sent(Point("logistic", 100, actors=2), Known(7850, 1e-5))
    # 50 clients are no subtree: 32 + 16 + 2, and 2 + 4 + 8 + 32 + 4
    assert (stacked.tasks, stacked.nodes) == (2, 7)
    # too few clients for stacks: as on Ray
    few = sent(Point("logistic", 10, actors=2), Known(7850, 5e-5))
    assert few.nodes == 5
    # what two and three hosts sent to the server's: one node of the tree for half a cohort, more for a third
    two, three = (sent(Point("resnet18", 16, actors=n, hosts=n), Known(11_181_642, 0.05)) for n in (2, 3))
    assert (two.nodes, two.nodes_from_others, two.models_to_others) == (6, 1, 1)
    assert (three.nodes_from_others, three.models_to_others) == (6, 2)


def test_points_that_are_done_are_skipped(tmp_path, monkeypatch, capsys):
    import scaling

    measured = []

    def stand_in(point, seconds, hosts):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point)
        return row_of(point), ""

    monkeypatch.setattr(scaling, "_measured", stand_in)
    command = [str(tmp_path), "--quick", "--only", "logistic"]
    assert scaling.main(command) == 130
    assert "5 points, 5 to measure" in capsys.readouterr().out
    file = tmp_path / "points.jsonl"
    assert len(file.read_text().splitlines()) == 2
    # killed while it wrote
    file.write_text(file.read_text() + '{"point": {"mod')
    first = list(measured)
    measured[:] = []
    assert scaling.main(command) == 130
    said = capsys.readouterr().out
    assert "the last line was not written to its end" in said
    assert "5 points, 3 to measure" in said
    assert not set(first) & set(measured)
    assert [json.loads(line)["point"]["model"] for line in file.read_text().splitlines()] == ["logistic"] * 4


def row_of(point):
    """What a measured point is written down as."""
    return {
        "point": vars(point), "seconds": 0.1, "quartiles": [0.09, 0.11], "rounds": 3, "tasks": 6.0, "sum_bytes": 1e6,
        "received": 2e6, "sent": 1e6, "bytes_down": 1e6, "bytes_up": 1e6, "worker_seconds": 0.1, "parameters": 7850,
        "memory": dict.fromkeys(("driver", "server", "actor", "shared", "all"), 100.0), "processors": 2, "machines": 1,
        "foreign": 0.5,
    }  # fmt: skip


@pytest.mark.slow
def test_tables_and_pictures_of_made_up_points(tmp_path, monkeypatch):
    from round_time import model, report
    from round_time.report import write

    monkeypatch.setattr(report, "resampled", lambda rows: model.resampled(rows, times=4))
    rows, _ = made_up(hosts=2, noise=0.05)
    about = {
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 8.0},
        "versions": {"fedray": "abc"},
    }
    written = [
        {**row_of(row.point), "seconds": row.seconds, "worker_seconds": row.worker_seconds, **about,
         "parameters": row.parameters}
        for row in rows
    ]  # fmt: skip
    paths = write(written, tmp_path, None, 10.0)
    assert {path.name for path in paths if path.suffix == ".png"} == {
        "time.png", "resources.png", "model.png", "projection.png",
    }  # fmt: skip
    text = (tmp_path / "scaling.md").read_text()
    assert text.count("| ResNet-18 |") >= 9
    assert "The hosts were containers on one machine" in text
    assert re.search(r"step of LeNet-5 \| (2,9|3,0)", text)
    assert "bytes on the network" in text
    # too few points for the model: what was measured is shown all the same
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    write(written[:3], tmp_path, None, 10.0)
    text = (tmp_path / "scaling.md").read_text()
    assert "## Measured" in text
    assert "## Checks" not in text


@pytest.mark.slow
def test_a_point_is_measured(tmp_path, capsys):
    """The whole way of two points, each a run on Ray in a process of its own."""
    import scaling

    assert scaling.main([str(tmp_path), "--quick", "--only", "LeNet-5, 10 of"]) == 0
    (row,) = map(json.loads, (tmp_path / "points.jsonl").read_text().splitlines())
    assert row["seconds"] > 0
    # each task sends a vector in double precision, or more
    assert row["sum_bytes"] % (8 * 61_712) == 0
    assert row["sum_bytes"] >= row["tasks"] * 8 * 61_712
    assert row["bytes_up"] == 10 * 4 * 61_706
    assert all(row["memory"][kind] > 50 for kind in ("driver", "server", "actor"))
    assert row["memory"]["all"] > row["memory"]["actor"]
    assert "| LeNet-5 | 10 | 10,000 |" in (tmp_path / "scaling.md").read_text()
    assert scaling.main([str(tmp_path), "--quick", "--only", "LeNet-5, 10 of"]) == 0
    assert "1 points, 0 to measure" in capsys.readouterr().out
