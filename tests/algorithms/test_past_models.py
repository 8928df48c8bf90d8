"""Models of earlier rounds that the server's rules ask for: each is written once, and none is held in memory."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from fedray import ServerError, UserError, simulate
from fedray.algorithms import Broadcast, Model
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import assert_same, small_source
from fedray.testing.pickling import pickling_workers

TAU = 10
SETTINGS = {
    "model.name": "mlp",
    "model.hidden": [256],
    "data.clients": 5,
    "train.local_steps": 1,
    "train.batch_size": 8,
    "run.rounds": 16,
    "run.checkpoint_every": 1,
    "run.name": "run",
    "engine.kind": "local",
    "engine.vectorize": False,
}


def run(folder, callbacks=(), **keys):
    keys = {"run.output": str(folder), "algorithm.name": "ghbm", "algorithm.tau": TAU} | keys
    keys = {key: value for key, value in (SETTINGS | keys).items() if value is not None}
    return simulate(keys, data=small_source(), callbacks=callbacks)


def sizes(folder: Path) -> dict[Path, int]:
    """Bytes of each file in the checkpoints."""
    files = (path for path in (folder / "run" / "checkpoints").rglob("*") if path.is_file())
    return {path: path.stat().st_size for path in files}


@pytest.mark.parametrize("warmup", ["zero", "init"])
def test_a_checkpoint_writes_one_model_of_the_window(warmup, tmp_path):
    """With a window of ten rounds, a checkpoint that comes every round has two models' bytes that the one before has
    not: the model itself, and the one that joins the window."""
    written, there = [], {}

    def look(report):
        nonlocal there
        now = sizes(tmp_path)
        written.append(sum(size for path, size in now.items() if path not in there))
        there = now

    result = run(tmp_path, [look], **{"algorithm.warmup": warmup})
    model = 4 * result.summary["parameters"]
    # the last round is reported before its checkpoint
    assert len(written) == 16
    assert all(2 * model < size < 2.6 * model for size in written[:-1])
    window = [path.name for path in (result.folder / "checkpoints" / "shared").iterdir()]
    assert len(window) == TAU + 1


def test_stopped_and_resumed_it_has_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole")
    for stop in (3, 12):
        run(tmp_path / "parts", [lambda report, stop=stop: report.round == stop])
    assert_same(whole, run(tmp_path / "parts"))


def test_on_other_workers_it_has_the_same_bits(tmp_path):
    keys = {"run.rounds": 4, "algorithm.tau": 2}
    local = run(tmp_path / "local", **keys)
    with pickling_workers(2):
        run(tmp_path / "two", [lambda report: report.round == 3], **keys)
        assert_same(local, run(tmp_path / "two", **keys))


def test_a_checkpoint_of_the_version_before_is_refused(tmp_path):
    """It had the window among the server's vectors, and no past models."""
    folder = run(tmp_path, [lambda report: report.round == 3]).folder
    for last in (folder / "checkpoints").glob("round-*"):
        record, sums = (json.loads((last / name).read_text()) for name in ("record.json", "checksums.json"))
        (last / "record.json").write_text(json.dumps(record | {"past": {}}))
        sums["record.json"] = hashlib.sha256((last / "record.json").read_bytes()).hexdigest()
        (last / "checksums.json").write_text(json.dumps(sums))
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(UserError, match=r"round 3 in .* lacks the model of round 1, .*: use run.resume=false"):
        run(tmp_path)
    assert (folder / "summary.json").read_bytes() == before


class Looks(FedAvg):
    """Notes what it is given of the past."""

    seen: list[tuple[int, int, Model]] = []

    @property
    def earlier_models(self):
        return 2

    def broadcast(self, server, phase):
        for back in range(min(3, server.round)):
            self.seen.append((server.round, server.round - back, server.model_of(server.round - back)))
        return Broadcast({"x": server["x"]})


def test_an_own_algorithm_sees_the_models_that_were_sent(tmp_path):
    Looks.seen.clear()
    run(tmp_path, **{"algorithm.name": "test_past_models:Looks", "run.rounds": 5} | {"algorithm.tau": None})
    sent = {now: model for now, then, model in Looks.seen if now == then}
    assert sorted(sent) == [1, 2, 3, 4, 5]
    for _, then, model in Looks.seen:
        assert torch.equal(model.row, sent[then].row)
    assert len(Looks.seen) == 1 + 2 + 3 * 3


class LooksTooFar(Looks):
    earlier_models = 1


def test_a_model_that_is_not_kept_is_said(tmp_path):
    with pytest.raises(ServerError, match=r"server.model_of\(1\) is not one of the earlier_models=1"):
        run(tmp_path, **{"algorithm.name": "test_past_models:LooksTooFar"} | {"algorithm.tau": None})
