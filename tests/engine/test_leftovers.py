"""`fedray clean`, and who removes what: what a living run uses stays, what a killed one has left goes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import loaded

from fedray.cli.main import main
from fedray.engine.machines import leftovers
from fedray.engine.machines.leftovers import QUIET_SECONDS, UNFINISHED_SECONDS, Leftover, find_leftovers
from fedray.engine.state.states import StateFolder
from fedray.util.folder_use import FolderUse, in_use

STATE = {"c": np.ones(8, dtype=np.float32)}
LIVING, DEAD, OTHER = (f"fedray-{digit * 16}" for digit in "abc")


def write_states(path: Path, begun: Event) -> None:
    """What a client actor does: it writes states until it is killed."""
    folder = StateFolder(path, run="/runs/x")
    while True:
        folder.write("state", STATE)
        begun.set()


@pytest.fixture
def write() -> Iterator[Any]:
    """Starts processes that write states, and returns them once they have written some."""
    processes = []

    def start(path: Path) -> Any:
        begun = loaded().Event()
        process = loaded().Process(target=write_states, args=(path, begun))
        process.start()
        processes.append(process)
        assert begun.wait(60)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of the test's own: a folder for temporary files, Ray's, the cache and runs."""
    for name in ("temporary", "ray", "cache", "w"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(leftovers, "SHORT_PLACES", (str(tmp_path / "temporary"),))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path


def test_a_run_that_ends_waits_for_those_who_still_write(tmp_path: Path, write: Any) -> None:
    """Otherwise a state that is written a moment later makes the folder anew."""
    path = tmp_path / "states"
    process = write(path)
    cleared = threading.Thread(target=StateFolder(path).clear, args=(60,))
    cleared.start()
    assert in_use(path)
    process.kill()
    cleared.join(60)
    process.join()
    assert not path.exists()


def test_a_run_removes_what_others_have_left_that_are_over(tmp_path: Path, write: Any) -> None:
    write(tmp_path / LIVING)
    killed = write(tmp_path / DEAD)
    killed.kill()
    killed.join()
    # without a mark it is another program's, or an older fedray's
    (tmp_path / OTHER).mkdir()
    (tmp_path / "fedray-notes").mkdir()
    StateFolder(tmp_path / "fedray-0123456789abcdef").clear_others()
    assert {path.name for path in tmp_path.iterdir()} == {LIVING, OTHER, "fedray-notes"}


def test_a_folder_that_somebody_removed_is_made_and_locked_again(tmp_path: Path) -> None:
    use = FolderUse(tmp_path / "folder")
    use.begin()
    os.rmdir(use.path)
    use.begin()
    assert in_use(use.path)
    assert not FolderUse(use.path).remove(patience=0)
    assert use.remove(patience=0)
    assert in_use(use.path) is None


def test_other_users_read_no_states(tmp_path: Path) -> None:
    StateFolder(tmp_path / "states").write("s", STATE)
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o700


def found(**arguments: Any) -> dict[str, Leftover]:
    return {Path(each.path).name: each for each in find_leftovers(["runs"], None, **arguments)}


def test_states(places: Path, write: Any) -> None:
    write(places / "temporary" / LIVING)
    for path in (places / "temporary" / DEAD, places / "w/runs/x/.states"):
        killed = write(path)
        killed.kill()
        killed.join()
    before = found()
    assert {name: each.used for name, each in before.items()} == {LIVING: True, DEAD: False, ".states": False}
    assert before[DEAD].run == "/runs/x"
    assert before[DEAD].size >= 4096
    assert time.time() - before[DEAD].changed < 600
    assert {name: each.removed for name, each in found(remove=True).items()} == {
        LIVING: False, DEAD: True, ".states": True,
    }  # fmt: skip
    assert list(found()) == [LIVING]


def test_unfinished_files(places: Path) -> None:
    mine = [".notes.2024", ".exp.1/config.yaml", ".exp.1/summary.json", "y/.todo.1", "x/.results.1/a", "x/metrics.csv"]
    mine += ["x/.results.2023", "x/notes/.results.2023", "x/notes/.a.csv.2023"]
    # a project with a configuration of its own
    mine += ["config.yaml", "metrics.csv", ".todo.txt.2023", "notes/.results.2023", "notes/.a.csv.2023"]
    for name in (
        "runs/x/.metrics.csv.123", "runs/x/checkpoints/.round-00000001.123/a", "runs/x/config.yaml",
        "runs/x/inputs.json", "runs/x/checkpoints/shared/.client-0-1-0.123", *(f"runs/{each}" for each in mine),
    ):  # fmt: skip
        path = places / "w" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    unfinished = {".metrics.csv.123", ".round-00000001.123", ".client-0-1-0.123"}
    assert {name: each.used for name, each in found().items()} == dict.fromkeys(unfinished, True)
    past = time.time() - UNFINISHED_SECONDS - 60
    for path in (places / "w/runs").rglob("*"):
        os.utime(path, (past, past))
    assert {name: each.removed for name, each in found(remove=True).items()} == dict.fromkeys(unfinished, True)
    assert sorted(path.name for path in (places / "w/runs/x").iterdir() if path.is_file()) == [
        ".results.2023", "config.yaml", "inputs.json", "metrics.csv",
    ]  # fmt: skip
    # what has such a name, but is the user's, or a run that is called so
    assert all((places / "w/runs" / each).exists() for each in mine)


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["run.output=s3://bucket/runs"], "cache/fedray/working/s3/bucket/runs"),
        (["run.output=s3://bucket/runs", "run.working_copy=copy"], "w/copy"),
        (["tune.output=s3://bucket/sweeps"], "cache/fedray/working/s3/bucket/sweeps"),
        (["tune={output: 's3://bucket/sweeps', working_copy: copy}"], "w/copy"),
        (["tune={output: mine}"], "w/mine"),
    ],
)
def test_working_copies(places: Path, capsys: pytest.CaptureFixture[str], words: list[str], folder: str) -> None:
    left = places / folder / "x" / ".metrics.csv.123"
    left.parent.mkdir(parents=True)
    for path in (left, left.with_name("config.yaml"), left.with_name("inputs.json")):
        path.touch()
    assert main(["clean", *words]) == 0
    assert str(left) in capsys.readouterr().out


def test_ray_files(places: Path) -> None:
    living, dead = (f"session_2026-01-0{day}_00-00-00_000000_1" for day in (1, 2))
    link = places / "temporary" / f"fedray-{os.getuid()}" / ("d" * 16)
    # of a job of Slurm, and of another user whose number has as many digits
    job, other = places / "temporary" / "fedray-3fVJ1g", places / "temporary" / "fedray-100000"
    (other / "ray").mkdir(parents=True)
    for path in (
        places / "ray/ray" / living,
        places / "ray/ray" / dead,
        places / "ray/ray-abcdefgh/ray",
        link.parent,
        job / "ray",
    ):
        path.mkdir(parents=True)
    link.symlink_to(places / "ray/ray")
    # a cluster whose processes can't be seen would write
    assert found()[dead].used
    past = time.time() - QUIET_SECONDS - 1
    for path in (*(places / "ray").rglob("*"), job, job / "ray"):
        os.utime(path, (past, past))
    command = [sys.executable, "-c", "print(flush=True); input()", f"{link}/{living}/sockets"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # before, its command may still be that of this process
        assert holder.stdout is not None
        holder.stdout.readline()
        names = {living: True, dead: False, "ray-abcdefgh": False, link.name: True, job.name: False}
        assert {name: each.used for name, each in found().items()} == names
        found(remove=True)
        assert set(found()) == {living, link.name}
    finally:
        holder.kill()
        holder.wait()
    found(remove=True)
    assert found() == {}
    assert (places / "ray/ray").is_dir()
    assert (other / "ray").is_dir()


def test_files_of_a_sweep(places: Path) -> None:
    living, dead = (places / "temporary" / f"fedray-tune-{letter * 8}" for letter in "ab")
    for path in (living, dead):
        path.mkdir()
    # also if its process is hidden from this one, in another container
    use = FolderUse(living, "process 1 on another")
    use.begin()
    assert {name: each.used for name, each in found().items()} == {living.name: True, dead.name: False}
    assert found()[living.name].run == "process 1 on another"
    found(remove=True)
    assert set(found()) == {living.name}
    use.remove(patience=0)
    assert found() == {}


def test_what_the_command_says(places: Path, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "nothing is left\n"
    write(places / "temporary" / LIVING)
    killed = write(places / "spilt" / DEAD)
    killed.kill()
    killed.join()
    spill = f"engine.spill_dir={places}/spilt"
    assert main(["clean", spill, "tune.output=sweeps"]) == 0
    _, *rows, advice = capsys.readouterr().out.splitlines()
    assert [("in use" in row, "left" in row) for row in rows] == [(False, True), (True, False)]
    assert advice.startswith("fedray clean --yes removes the 1 that nobody uses")
    assert main(["clean", spill, "--yes"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not (places / "spilt" / DEAD).exists()
    assert main(["clean", "tune={outputs: x}"]) == 2
    assert "tune.outputs" in capsys.readouterr().err
    assert (places / "temporary" / LIVING).exists()
