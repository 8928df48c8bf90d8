"""Files of a run folder that are damaged or changed after they were written: mended by going back, or named."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedray
from fedray import UserError, simulate
from fedray.cli.main import main
from fedray.engine.state.checkpoint import load_last
from fedray.results.runs import LeftOut, read_run
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult
from fedray.util.files import sha256_of_file

TABLES = ["metrics.csv", "profile.csv", "clients.parquet", "evaluation.parquet", "layers.parquet"]


def run(folder: Path, stop: int = 0, **keys: Any) -> RunResult:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    common = {"algorithm.name": "scaffold", "run.name": "run", "run.output": str(folder), "run.checkpoint_every": 2}
    calls = [lambda report: report.round == stop]
    return simulate({**SETTINGS, **common, **changed}, data=small_source(), callbacks=calls)


def everything(folder: Path, stop: int = 0, **keys: Any) -> RunResult:
    """A run that writes all tables that there are."""
    wanted = {
        "run__eval_clients": "all",
        "run__diagnostics": True,
        "engine__profile": True,
        "algorithm__name": "fedavg",
    }
    return run(folder, stop, **wanted, **keys)


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 255
    path.write_bytes(content)


def damaged_lines(folder: Path) -> list[str]:
    """Returns the lines of the log that tell of damage."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [line[20:] for line in lines if "warning: " in line and ("damaged" in line or "lacks" in line)]


def hashes(folder: Path) -> dict[str, str]:
    return {str(path): sha256_of_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def newest(folder: Path) -> tuple[Path, set[str]]:
    """Returns the last checkpoint, and the shared files that it has and the one before it has not."""
    older, last = sorted((folder / "checkpoints").glob("round-*"))[-2:]
    before, names = (json.loads((each / "checksums.json").read_text()).keys() for each in (older, last))
    return last, {name for name in names - before if name.startswith("shared/")}


@pytest.mark.parametrize(
    ("algorithm", "damage"),
    [("scaffold", "client"), ("local_ghbm", "model"), ("scaffold", "server"), ("scaffold", "checksums")],
)
def test_a_round_that_is_made_again_has_a_whole_checkpoint(tmp_path, algorithm, damage):
    whole = run(tmp_path / "whole", algorithm__name=algorithm)
    folder = run(tmp_path / "parts", stop=4, algorithm__name=algorithm).folder
    last, fresh = newest(folder)
    if damage == "checksums":
        (last / "checksums.json").write_text("{}")
    else:
        own = [last / "server.safetensors"] if damage == "server" else [folder / "checkpoints" / name for name in fresh]
        victims = [path for path in own if path.name.startswith(damage)]
        assert victims
        flip(victims[0])
    # the same round again, and then on from its checkpoint
    again = run(tmp_path / "parts", stop=4, algorithm__name=algorithm)
    assert (again.status, again.summary["rounds"]) == ("interrupted", 4)
    told: list[str] = []
    saved = load_last(folder / "checkpoints", told.append)
    assert (saved and saved.round, told) == (4, [])
    assert_same(whole, run(tmp_path / "parts", algorithm__name=algorithm))
    assert len(damaged_lines(folder)) == 1


def test_no_checkpoint_is_given_up_for_a_damaged_one(tmp_path):
    """Of two checkpoints the newer is damaged; the run ends before it has made that round again."""
    folder = run(tmp_path, stop=4, run__checkpoint_every=1).folder
    flip(newest(folder)[0] / "server.safetensors")
    run(tmp_path, stop=4, run__checkpoint_every=1)
    (first, second) = sorted((folder / "checkpoints").glob("round-*"))
    flip(second / "server.safetensors")
    saved = load_last(folder / "checkpoints", lambda line: None)
    assert saved is not None
    assert saved.round == int(first.name[-8:]) == 3


def change_a_digit(path: Path, row: int = 2) -> None:
    """Changes a digit of the first fraction in a row of a CSV file, or of a number in a Parquet file."""
    if path.suffix == ".csv":
        lines = path.read_text().splitlines(keepends=True)
        place = lines[row].index("0.") + 3
        lines[row] = lines[row][:place] + str((int(lines[row][place]) + 1) % 10) + lines[row][place + 1 :]
        path.write_text("".join(lines))
    else:
        flip(min(path.glob("part-*")), 40)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_was_changed_is_named_once(tmp_path, name):
    folder = everything(tmp_path, stop=4).folder
    change_a_digit(folder / name)
    line = f"warning: {name} was damaged or changed: up to round 4 it is not what was recorded"
    with pytest.warns(fedray.FedrayWarning, match=f"^{line.removeprefix('warning: ')}$"):
        everything(tmp_path, stop=5)
    assert damaged_lines(folder) == [line]
    everything(tmp_path)
    assert damaged_lines(folder) == [line]


def test_a_row_that_is_gone_is_only_counted(tmp_path):
    folder = everything(tmp_path, stop=4).folder
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:2] + lines[3:]))
    everything(tmp_path)
    assert damaged_lines(folder) == ["warning: metrics.csv lacks 1 of the rows up to round 4"]
    # a row that is there twice does not make up for one that is gone
    folder = everything(tmp_path, stop=4, run__name="twice").folder
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([*lines[:2], lines[1], *lines[3:]]))
    everything(tmp_path, run__name="twice")
    assert len(damaged_lines(folder)) == 1


def test_rows_that_nothing_can_be_made_of(tmp_path):
    folder = everything(tmp_path, stop=4).folder
    text = (folder / "metrics.csv").read_text()
    for damage, what in ((text.replace(",0.", ",x.", 1), "x."), (text.replace("\n2,", ",9\n2,", 1), "too much")):
        (folder / "metrics.csv").write_text(damage)
        before = hashes(folder)
        with pytest.raises(UserError, match=rf"metrics.csv is damaged: in round 1 .*{what}.*; mend it, or use run.res"):
            everything(tmp_path)
        assert hashes(folder) == before


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_nothing_is_said_of_what_was_not_changed(tmp_path, kind, request):
    """Rows after the checkpoint, as a kill leaves them, are no damage; nor is a checkpoint of an older version."""
    if kind == "ray":
        request.getfixturevalue("ray_cluster")
    folder = everything(tmp_path, stop=5, engine__kind=kind, engine__vectorize=False).folder
    last, _ = newest(folder)
    shutil.rmtree(last)
    again = everything(tmp_path, stop=5, engine__kind=kind, engine__vectorize=False)
    assert again.metrics["round"].tolist() == [1, 2, 3, 4, 5]
    assert damaged_lines(folder) == []
    last, _ = newest(folder)
    record = json.loads((last / "record.json").read_text())
    assert sorted(record.pop("records")) == sorted(TABLES)
    (last / "record.json").write_text(json.dumps(record))
    sums = json.loads((last / "checksums.json").read_text())
    sums["record.json"] = sha256_of_file(last / "record.json")
    (last / "checksums.json").write_text(json.dumps(sums))
    change_a_digit(folder / "metrics.csv")
    ended = everything(tmp_path, engine__kind=kind, engine__vectorize=False)
    assert (ended.status, damaged_lines(folder)) == ("completed", [])
    assert sorted(ended.summary["records"]) == sorted([*TABLES, "model.safetensors", "partition.parquet"])


@pytest.mark.parametrize("name", ["metrics.csv", "evaluation.parquet"])
def test_a_comparison_leaves_out_a_run_whose_numbers_were_changed(tmp_path, name):
    folder = everything(tmp_path).folder
    assert not isinstance(read_run(folder), LeftOut)
    change_a_digit(folder / name)
    assert read_run(folder) == LeftOut(folder, f"{name} is damaged: it is not what the run recorded")


def test_a_model_that_was_changed_is_refused(tmp_path):
    result = run(tmp_path, run__save_best=True)
    for name in ("model-best.safetensors", "model.safetensors"):
        fedray.evaluate(result.folder / name, data=small_source())
        flip(result.folder / name)
        with pytest.raises(UserError, match=f"{name} is damaged: it is not what the run recorded"):
            fedray.evaluate(result.folder / name, data=small_source())
    with pytest.raises(UserError, match=r"model.safetensors is damaged: it is not what the run recorded"):
        result.model()


def test_what_is_left_of_a_run_is_named(tmp_path, capsys):
    for number in range(2):
        run(tmp_path, run__name=f"run-{number}", run__seed=number)
    half = tmp_path / "half"
    half.mkdir()
    (half / "metrics.csv").write_text("round,iterations,coh")
    (tmp_path / "below" / "clients.parquet").mkdir(parents=True)
    run(tmp_path / "below", run__name="run-2", run__seed=2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.yaml").write_text("a: 1")
    (tmp_path / "notes" / "log.txt").write_text("mine")
    (tmp_path / "config.yaml").write_text("train.lr: 0.1")
    found = fedray.compare(tmp_path)
    reasons = {each.folder.name: each.reason for each in found.left_out}
    assert sorted(reasons) == ["below", "half"]
    assert all("config.yaml: No such file or directory" in reason for reason in reasons.values())
    assert found.table["runs"].sum() == 3
    assert main(["compare", str(half), f"--output={tmp_path / 'out'}"]) == 2
    assert f"there is no run to compare: {half}: can't read the config" in capsys.readouterr().err


def test_digests_are_of_the_cells_and_not_of_the_layout(tmp_path):
    """A column that a newer version adds is empty in older rows."""
    from fedray.tracking.records import digest_of

    path = tmp_path / "metrics.csv"
    digests = set()
    for text in ("round,a\n1,2.5\n", "a,round,b\r\n2.5,1,\r\n", "round,a\n1,2.6\n", "round,a\n1,2.5\n1,2.5\n"):
        path.write_text(text)
        digests.add(digest_of(path))
    assert len(digests) == 3
    assert all(len(each) == len(hashlib.sha256().hexdigest()) for each in digests if each)
