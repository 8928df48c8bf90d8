"""States that are read ahead and written later, as on a GPU, with tensors on the CPU."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedray import UserError, simulate
from fedray.engine.state import traffic as state_traffic
from fedray.engine.state.states import StateFile, StateFolder
from fedray.engine.state.traffic import StateTraffic
from fedray.errors import StateLost
from fedray.testing.contracts import SETTINGS, assert_same, small_source

STATE = {"c": torch.arange(96.0).view(3, 32), "model": torch.arange(48.0).view(3, 16) - 7}
NAMES = ["client-1-1-0", "client-4-1-0", "client-9-1-0"]


class SlowFolder(StateFolder):
    """A folder that reads and writes when it is told to, and counts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go, self.reads, self.writes = threading.Event(), [], []

    def write(self, name, state):
        self.go.wait(20)
        self.writes.append(name)
        return super().write(name, state)

    def read_into(self, file, memory):
        self.reads.append(file.name)
        return super().read_into(file, memory)


@pytest.fixture
def folder(tmp_path):
    return SlowFolder(tmp_path / "states")


@pytest.fixture
def traffic(folder):
    found = StateTraffic(folder, torch.device("cpu"), lambda handle: handle, beside=True)
    yield found
    folder.go.set()
    found.close()


def written(traffic, folder):
    folder.go.set()
    files = traffic.write(NAMES, STATE)
    traffic.settle()
    return files


def same(found, row):
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name][row]) for name in STATE)


def test_new_states_are_written_beside_the_computation(traffic, folder):
    state = {name: rows.clone() for name, rows in STATE.items()}
    files = traffic.write(NAMES, state)
    assert [file.name for file in files] == NAMES
    assert not folder.path.exists()
    # what computes goes on with its memory
    for rows in state.values():
        rows.zero_()
    folder.go.set()
    traffic.settle()
    assert folder.writes == NAMES
    for row, file in enumerate(files):
        assert same({name: torch.from_numpy(each) for name, each in load_file(file.path).items()}, row)


def test_what_is_expected_is_read_before_it_is_taken(traffic, folder):
    files = written(traffic, folder)
    traffic.expect([files[2], None, files[0], files[2]])
    assert same(traffic.take(files[0]), 0)
    assert folder.reads == [files[2].name, files[0].name]
    assert same(traffic.take(files[2]), 2)
    assert len(folder.reads) == 2
    # one that nobody has announced, and one that is taken once more
    assert same(traffic.take(files[1]), 1)
    assert same(traffic.take(files[2]), 2)


def test_an_object_of_another_node_is_fetched_ahead(folder):
    asked = []

    def fetch(handle):
        asked.append((handle, threading.current_thread() is threading.main_thread()))
        return {name: rows[1].numpy() for name, rows in STATE.items()}

    found = StateTraffic(folder, torch.device("cpu"), fetch, beside=True)
    found.expect(["reference"])
    assert same(found.take("reference"), 1)
    found.close()
    assert asked == [("reference", False)]


def test_no_more_is_read_ahead_than_there_is_room_for(traffic, folder, monkeypatch):
    files = written(traffic, folder)
    size = Path(files[0].path).stat().st_size
    for room, read in ((1, 1), (2 * size, 2), (3 * size, 3)):
        monkeypatch.setattr(state_traffic, "MOST_BYTES", room)
        folder.reads.clear()
        traffic.expect(files)
        for row, file in enumerate(files[:read]):
            assert same(traffic.take(file), row)
        assert len(folder.reads) == read
        traffic.settle()


def test_no_more_waits_to_be_written_than_there_is_room_for(traffic, folder, monkeypatch):
    monkeypatch.setattr(state_traffic, "MOST_BYTES", 2 * 48 * 4)
    began, ended = threading.Event(), threading.Event()

    def write():
        began.set()
        traffic.write(NAMES, STATE)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(20)
    # the first two wait, and the third for them
    assert not ended.wait(0.05)
    folder.go.set()
    thread.join(20)
    traffic.settle()
    assert folder.writes == NAMES


def test_what_was_expected_in_vain_is_forgotten(traffic, folder):
    files = written(traffic, folder)
    traffic.expect(files)
    traffic.settle()
    Path(files[0].path).unlink()
    with pytest.raises(StateLost, match=r"a client's state is gone: .*client-1-1-0"):
        traffic.take(files[0])


def test_a_state_that_is_lost(traffic, folder):
    with pytest.raises(StateLost, match=r"a client's state is gone: .*nowhere"):
        traffic.expect([StateFile("", str(folder.path / "nowhere"))])


def test_a_state_that_cannot_be_written_is_told_when_it_settles(tmp_path):
    (tmp_path / "file").touch()
    found = StateTraffic(StateFolder(tmp_path / "file"), torch.device("cpu"), lambda handle: handle, beside=True)
    found.write(NAMES, STATE)
    with pytest.raises(UserError, match=r"engine\.spill_dir names another place"):
        found.settle()
    found.close()


def test_on_a_cpu_a_file_is_there_at_once(folder):
    folder.go.set()
    found = StateTraffic(folder, torch.device("cpu"), lambda handle: handle)
    files = found.write(NAMES, STATE)
    assert [path.name for path in sorted(folder.path.iterdir())] == NAMES
    found.expect(files)
    assert same(found.take(files[1]), 1)
    assert folder.reads == []
    found.close()


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedhbm", "local_ghbm"])
def test_a_run_whose_states_travel_beside_it_has_the_same_bits(algorithm, vectorize, tmp_path, monkeypatch):
    """Also one that is stopped and goes on, and it leaves no thread behind."""
    keys = {
        **SETTINGS, "algorithm.name": algorithm, "train.cohort_size": 4, "run.checkpoint_every": 1,
        "engine.vectorize": vectorize, "engine.chunk": 2,
    }  # fmt: skip
    plain = simulate({**keys, "run.output": str(tmp_path / "plain")}, data=small_source())
    monkeypatch.setattr("fedray.engine.clients.StateTraffic", partial(StateTraffic, beside=True))
    keys["run.output"] = str(tmp_path / "beside")
    seen = []

    def stop(report):
        files = plain.folder.parents[1] / "beside" / plain.folder.name / "checkpoints" / "shared"
        seen.append(sum(path.stat().st_size > 0 for path in files.glob("*")))
        return report.round == 3

    begun = simulate(keys, data=small_source(), callbacks=[stop])
    assert begun.summary["status"] == "interrupted"
    assert seen[-1] > 0
    assert_same(plain, simulate(keys, data=small_source()))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("states")]


def test_a_file_is_read_into_memory_that_is_there(tmp_path):
    states = StateFolder(tmp_path)
    file = states.write("s", {"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 3), np.float32)})
    memory = torch.empty(Path(file.path).stat().st_size, dtype=torch.uint8)
    found = states.read_into(file, memory)
    expected = states.read(file)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array)
        assert found[name].shape == array.shape
