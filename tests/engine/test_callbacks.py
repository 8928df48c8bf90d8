"""Callbacks see a run as it goes on, on each engine, and change nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from fedray import Callback, Report, RunStart, UserError, simulate, tune
from fedray.testing import CallbackContract
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult

KEYS = {**SETTINGS, "algorithm.name": "pfedmo", "run.rounds": 3, "engine.cpus_per_actor": 0.1}


def run(folder: Path, callbacks: Any = (), **changes: Any) -> RunResult:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return simulate({**KEYS, "run.output": str(folder), **keys}, data=small_source(), callbacks=callbacks)


class Watcher(Callback):
    """Notes all that it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.reports: list[Report] = []
        self.tables: list[tuple[pd.DataFrame, pd.DataFrame | None, pd.DataFrame | None]] = []
        self.models: list[nn.Module] = []

    def start(self, run: RunStart) -> None:
        self.seen.append(("start", run.round))
        assert run.rounds == run.config.rounds
        assert run.folder == Path(run.config.run.output) / str(run.config.run.name)

    def round(self, report: Report) -> None:
        self.seen.append(("round", report.round))
        self.reports.append(report)
        self.tables.append((report.clients, report.evaluation, report.layers))
        self.models.append(report.model())

    def end(self, result: RunResult) -> None:
        self.seen.append(("end", result.status))


class Meddling(Callback):
    """Changes all that it can reach."""

    def start(self, run: RunStart) -> None:
        torch.set_num_threads(2)

    def round(self, report: Report) -> None:
        torch.manual_seed(report.round)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float64)
        clients = report.clients
        clients.loc[:, "loss"] = 0.0
        report.metrics.clear()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in report.model().parameters():
                parameter.fill_(7)
        torch.set_default_dtype(torch.float32)


class TestMeddling(CallbackContract):
    callback = f"{__name__}:Meddling"


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_callback_sees_beginning_rounds_and_end(kind, tmp_path, request):
    if kind == "ray":
        request.getfixturevalue("ray_cluster")
    watcher = Watcher()
    result = run(tmp_path, [watcher], engine__kind=kind, engine__actors=1, run__diagnostics=True)
    assert watcher.seen == [("start", 0), *(("round", number) for number in (1, 2, 3)), ("end", "completed")]
    clients, evaluation, layers = (pd.concat(tables, ignore_index=True) for tables in zip(*watcher.tables, strict=True))
    order = ["round", "client"]
    pd.testing.assert_frame_equal(clients.sort_values(order, ignore_index=True), result.clients)
    pd.testing.assert_frame_equal(evaluation.sort_values(order, ignore_index=True), result.evaluation)
    assert set(layers["round"]) == {1, 2, 3}
    final = result.model().state_dict()
    for name, tensor in watcher.models[-1].state_dict().items():
        assert torch.equal(tensor, final[name])
    assert not all(torch.equal(p, final[name]) for name, p in watcher.models[0].state_dict().items())
    with pytest.raises(UserError, match="the model of round 3 can be asked for only while its callback is called"):
        watcher.reports[-1].model()


def test_on_ray_it_changes_no_bit_either(tmp_path, ray_cluster):
    ray = run(tmp_path / "ray", [Meddling()], engine__kind="ray", engine__actors=1)
    assert_same(ray, run(tmp_path / "local"))


def test_a_run_without_scores_and_diagnostics_has_none(tmp_path):
    def look(report: Report) -> None:
        assert report.evaluation is None
        assert report.layers is None
        with pytest.raises(UserError, match="fedavg has no model 'representation'"):
            report.model("representation")
        seen.append(report.round)

    seen: list[int] = []
    run(tmp_path, [look], algorithm__name="fedavg")
    assert seen == [1, 2, 3]


def test_a_resumed_run_says_from_which_round_it_goes_on(tmp_path):
    watcher = Watcher()
    run(tmp_path, [lambda report: report.round == 2], run__checkpoint_every=1)
    run(tmp_path, [watcher])
    assert watcher.seen == [("start", 2), ("round", 3), ("end", "completed")]
    run(tmp_path, [watcher])
    assert len(watcher.seen) == 3


FILE = """
class Writer:
    def __init__(self, path, fail=False):
        self.path, self.fail = path, fail

    def start(self, run):
        self.write("start")

    def round(self, report):
        if self.fail:
            raise KeyError("mine")
        self.write(report.round)

    def write(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what} ")


empty = object()
"""


def test_a_callback_is_named_in_a_config(tmp_path):
    """Its code is no part of the result, so that a run goes on with another one or without any."""
    file, path = tmp_path / "writer.py", tmp_path / "written"
    file.write_text(FILE)
    entry = {"name": f"{file}:Writer", "path": str(path)}
    run(tmp_path, [lambda report: report.round == 1], run__callbacks=[entry], run__checkpoint_every=1)
    assert path.read_text() == "start 1 "
    file.write_text(FILE.replace('"start"', '"begin"'))
    assert run(tmp_path, run__callbacks=[entry]).status == "completed"
    assert path.read_text() == "start 1 begin 2 3 "
    assert str(file) in (tmp_path / "pfedmo-small" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "FILE:Writer", "path": "written", "fail": True},
         r"run.callbacks: .*writer.py:Writer failed in round: KeyError: 'mine' \(writer.py, line 11\)"),
        ("FILE:Writer", r"run.callbacks=.*writer.py:Writer needs the option path"),
        ("FILE:Writter", "has no 'Writter' .did you mean 'Writer'"),
        ("FILE:empty", "run.callbacks: .*:empty: object has none of the methods start, round and end"),
        ({"path": "written"}, "run.callbacks: .* must have the key name"),
        ("writer", "run.callbacks: there is no 'writer'; your own is given as file.py:Name or module:Name"),
        ("other.py:Writer", "run.callbacks=other.py:Writer: can't read the file"),
    ],
)  # fmt: skip
def test_a_callback_that_fails_is_told_with_its_place(entry, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("writer.py").write_text(FILE)
    if isinstance(entry, str):
        entry = entry.replace("FILE", "writer.py")
    else:
        entry = {key: value.replace("FILE", "writer.py") if key == "name" else value for key, value in entry.items()}
    with pytest.raises(UserError, match=message):
        run(tmp_path / "runs", run__callbacks=[entry])


def test_an_exception_of_a_function_is_raised_as_it_is(tmp_path):
    def fail(report: Report) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run(tmp_path, [fail])
    notes = getattr(caught.value, "__notes__", ["test_callbacks.py"])
    assert "test_callbacks.py" in notes[0]


@pytest.mark.slow
def test_a_sweep_shows_its_callbacks_every_run(tmp_path, ray_cluster):
    file, path = tmp_path / "writer.py", tmp_path / "written"
    file.write_text(FILE)
    base = {**KEYS, "run.rounds": 1, "run.callbacks": [{"name": f"{file}:Writer", "path": str(path)}]}
    base = {key: value for key, value in base.items() if not key.startswith("engine.")}
    space = {"base": base, "spaces": {"small": {"train.lr": {"choice": [0.1, 0.2]}}}}

    def note(report: Report) -> None:
        with (tmp_path / "noted").open("a") as noted:
            noted.write(f"{report.round} ")

    settings = ["tune.trials=2", "tune.seeds=1", f"tune.output={tmp_path / 'sweeps'}"]
    tune(space, settings, data=small_source(), callbacks=[note])
    assert sorted(path.read_text().split()) == ["1", "1", "start", "start"]
    assert (tmp_path / "noted").read_text() == "1 1 "
