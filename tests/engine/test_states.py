"""Clients' states: files that outlive whoever wrote them, checkpoints that share them, nodes that lose them."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from slow_runs import BUFFERED, slow_rounds

from fedray import ClientError, UserError, simulate
from fedray.engine.state.states import StateFile, StateFolder
from fedray.errors import StateLost
from fedray.testing.contracts import SETTINGS, assert_same, small_source

STATE = {"c": np.arange(32, dtype=np.float32), "model": np.ones(16, dtype=np.float32)}

STATEFUL = {**SETTINGS, "algorithm.name": "scaffold", "train.cohort_size": 2, "run.checkpoint_every": 1}


def run(folder, callback=None, **keys):
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    calls = [callback] if callback else []
    return simulate({**STATEFUL, "run.output": str(folder), **changed}, data=small_source(), callbacks=calls)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_what_is_written_is_read(tmp_path):
    folder = StateFolder(tmp_path / "made" / "when needed", "here")
    file = folder.write("client-3-1-0", STATE)
    assert (file.node, file.name) == ("here", "client-3-1-0")
    assert same(folder.read(file), STATE)
    assert os.listdir(folder.path) == ["client-3-1-0"]
    folder.drop([file, file])
    assert os.listdir(folder.path) == []
    folder.clear()
    folder.clear()
    assert not folder.path.exists()


def test_a_state_that_was_given_is_never_changed(tmp_path):
    """A file of the same name is another file: a checkpoint's name for the old one still holds the old state."""
    folder = StateFolder(tmp_path / "states")
    folder.store(folder.write("s", STATE), tmp_path / "kept")
    folder.write("s", {"c": np.zeros(2, np.float32)})
    assert same(load_file(tmp_path / "kept"), STATE)


def test_storing_and_adopting_copy_nothing(tmp_path):
    folder = StateFolder(tmp_path / "states")
    file = folder.write("s", STATE)
    folder.store(file, tmp_path / "kept")
    assert os.path.samefile(file.path, tmp_path / "kept")
    adopted = StateFolder(tmp_path / "others").adopt(tmp_path / "kept")
    assert os.path.samefile(adopted.path, tmp_path / "kept")
    assert same(folder.read(adopted), STATE)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system here")
def test_storing_on_another_disk_copies(tmp_path):
    folder = StateFolder(Path("/dev/shm") / f"fedray-test-{os.getpid()}")
    try:
        folder.store(folder.write("s", STATE), tmp_path / "kept")
        assert same(load_file(tmp_path / "kept"), STATE)
    finally:
        folder.clear()


def test_a_state_that_is_gone(tmp_path):
    folder = StateFolder(tmp_path)
    file = StateFile("", str(tmp_path / "nowhere"))
    for act in (folder.read, lambda file: folder.store(file, tmp_path / "kept")):
        with pytest.raises(StateLost, match=r"a client's state is gone: .*nowhere"):
            act(file)


def test_a_full_disk(tmp_path):
    """The limit on a file's size stands for it."""
    folder = StateFolder(tmp_path / "states")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            UserError, match=r"state .* \(0.4 MB\) can't be written to .*states on .*: .*engine.spill_dir"
        ):
            folder.write("s", {"c": np.zeros(100_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(folder.path) == []


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"engine\.spill_dir names another place"):
        run(tmp_path / "runs", engine__spill_dir=str(tmp_path / "file"))


def named(checkpoint):
    return {key for key in json.loads((checkpoint / "checksums.json").read_text()) if key.startswith("shared/")}


def test_checkpoints_share_what_did_not_change(tmp_path):
    inodes: list[dict[str, int]] = []

    def callback(report):
        shared = tmp_path / "scaffold-small" / "checkpoints" / "shared"
        inodes.append({path.name: path.stat().st_ino for path in shared.iterdir()})
        return report.round == 5

    folder = run(tmp_path, callback).folder
    checkpoints = sorted((folder / "checkpoints").glob("round-*"))
    assert len(checkpoints) == 2
    # two clients a round: the last two checkpoints differ by what these two have
    assert len(named(checkpoints[1]) - named(checkpoints[0])) == 2
    there = {f"shared/{path.name}" for path in (folder / "checkpoints" / "shared").iterdir()}
    assert there == named(checkpoints[0]) | named(checkpoints[1])
    for before, after in itertools.pairwise(inodes):
        assert all(before[name] == after[name] for name in before.keys() & after.keys())
    clients = [int(name.split("-")[1]) for name in named(checkpoints[1])]
    assert len(set(clients)) == len(clients) > 2
    assert not (folder / ".states").exists()


@pytest.mark.parametrize("algorithm", ["ghbm", "local_ghbm"])
def test_earlier_models_are_written_once_and_named_by_all_checkpoints(algorithm, tmp_path):
    inodes: list[dict[str, int]] = []
    folder = tmp_path / f"{algorithm}-small"

    def callback(report):
        shared = {path.name: path for path in (folder / "checkpoints" / "shared").iterdir()}
        held = {path.name: path.stat().st_ino for path in (folder / ".states").iterdir()}
        if report.round == 6:  # the last round's checkpoint follows the report
            return
        assert held
        assert all(shared[name].stat().st_ino == inode for name, inode in held.items())
        inodes.append({name: path.stat().st_ino for name, path in shared.items()})

    tau = {"algorithm__tau": 3} if algorithm == "ghbm" else {}
    run(tmp_path, callback, algorithm__name=algorithm, run__checkpoint_every=1, **tau)
    for before, after in itertools.pairwise(inodes):
        assert all(before[name] == after[name] for name in before.keys() & after.keys())
        assert len(after.keys() - before.keys()) == 1
    # ghbm: the models of three rounds, in each of two checkpoints
    assert max(map(len, inodes)) <= (4 if algorithm == "ghbm" else len(inodes))


def test_spill_dir_is_used_and_left_empty(tmp_path):
    spill = tmp_path / "spill"
    seen = []

    def callback(report):
        seen.append(len(list(spill.glob("fedray-*/client-*"))))

    whole = run(tmp_path / "whole")
    assert_same(whole, run(tmp_path / "spilled", callback, engine__spill_dir=str(spill)))
    # two clients more, or the same again
    assert seen[0] == 2
    assert max(seen) > 4
    assert list(spill.iterdir()) == []


def test_a_damaged_state_makes_a_checkpoint_a_damaged_one(tmp_path):
    whole = run(tmp_path / "whole")
    folder = run(tmp_path / "parts", lambda report: report.round == 4).folder
    older, newer = sorted((folder / "checkpoints").glob("round-*"))
    victim = folder / "checkpoints" / min(named(newer) - named(older))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 255
    victim.write_bytes(content)
    resumed = run(tmp_path / "parts")
    assert "round-00000004 is damaged" in (folder / "log.txt").read_text()
    assert_same(whole, resumed)


def test_states_removed_under_a_local_run(tmp_path):
    def callback(report):
        if report.round == 3:
            shutil.rmtree(tmp_path / "scaffold-small" / ".states")

    with pytest.raises(ClientError, match="a client's state is gone"):
        run(tmp_path, callback, train__cohort_size=9)
    assert_same(run(tmp_path / "whole", train__cohort_size=9), run(tmp_path, train__cohort_size=9))


@pytest.mark.parametrize("algorithm", ["scaffold", pytest.param("fedhbm", marks=pytest.mark.slow)])
def test_states_removed_under_a_run_on_ray(algorithm, tmp_path, ray_cluster):
    """It goes back to its last checkpoint by itself."""
    keys = {"algorithm__name": algorithm, "train__cohort_size": 9, "run__checkpoint_every": 2}
    removed = []

    def callback(report):
        if report.round == 3 and not removed:
            removed.append(report.round)
            shutil.rmtree(tmp_path / "ray" / f"{algorithm}-small" / ".states")

    on_ray = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.1}
    found = run(tmp_path / "ray", callback, **on_ray, **keys)
    assert removed
    assert "resuming" in (found.folder / "log.txt").read_text()
    assert_same(run(tmp_path / "whole", **keys), found)


@pytest.mark.slow
def test_a_node_that_joins_is_used(tmp_path):
    """From the next round on, if there are as many actors as fit."""
    config = {**slow_rounds("scaffold"), "run.name": "run", "run.rounds": 100, "run.output": str(tmp_path / "local")}
    local = simulate(config, data=small_source())
    found = on_two_nodes(local, tmp_path / "cluster", "scaffold", "join")
    log = (found.folder / "log.txt").read_text()
    assert "the cluster has grown: starting 1 more client actor" in log
    assert len(re.findall("client actor: pid", log)) == 2
    assert len(found.summary["machine"]["processes"]) == 2
    assert_same(local, found)


def on_two_nodes(local, output, algorithm, fate):
    """The run on two nodes, by a program of its own. It leaves nothing, not even on a node that was lost."""
    program = Path(__file__).parents[1] / "support" / "two_nodes.py"
    command = [sys.executable, str(program), str(output), algorithm, fate]
    path = os.pathsep.join([str(program.parent), os.environ.get("PYTHONPATH", "")])
    temporary = output.parent / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [*temporary.glob("fedray-*"), *output.glob("run/.*")] == []
    return type(local)(output / "run", local.module)


@pytest.mark.parametrize(
    ("algorithm", "fate"),
    [
        pytest.param("scaffold", "keep", marks=pytest.mark.slow),
        pytest.param("scaffold", "lose", marks=pytest.mark.slow),
        pytest.param("scaffold", "silent", marks=pytest.mark.slow),
        pytest.param("scaffold", "late", marks=pytest.mark.slow),
        pytest.param("fedavg", "lose", marks=pytest.mark.slow),
        pytest.param("fedsiam_da", "keep", marks=pytest.mark.slow),
        pytest.param("fedavg", "sums", marks=pytest.mark.slow),
        pytest.param("local_ghbm", "keep", marks=pytest.mark.slow),
        pytest.param("fedavg", "buffered", marks=pytest.mark.slow),
    ],
)
def test_two_nodes(algorithm, fate, tmp_path):
    """Clients move between nodes, and their states with them, and the models that they received are sent where they
    are; a node that is lost with states takes the run back a few rounds."""
    config = {**slow_rounds(algorithm), **(BUFFERED if fate == "buffered" else {})}
    local = simulate(config | {"run.name": "run", "run.output": str(tmp_path / "local")}, data=small_source())
    found = on_two_nodes(local, tmp_path / "cluster", algorithm, fate)
    log = (found.folder / "log.txt").read_text()
    assert ("resuming" in log) == (fate in ("lose", "silent") and algorithm != "fedavg")
    assert (" answers again" in log) == (fate == "silent")
    assert "node actor: on" in log
    assert ("was lost on its host; doing them again" in log) == (fate == "sums")
    assert fate != "late" or "doing them elsewhere, too" in log
    assert fate != "sums" or log.count("node actor: on") == 2
    assert_same(local, found)
