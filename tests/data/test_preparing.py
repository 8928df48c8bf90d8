"""``fedray data info`` and ``fedray data prepare``: what they say, what stops them; they go on after a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_runs import refused
from PIL import Image
from test_image_sources import SIZE, own_cache, settings, split  # noqa: F401

from fedray import UserError, simulate
from fedray.cli.main import main
from fedray.data.partitions.describe import histogram, label_skew
from fedray.data.storage.lazy import LazyItems
from fedray.data.storage.mapping import Filling, map_arrays


def words(folder: Path) -> list[str]:
    return ["federated_csv", f"data.root={folder}", f"data.image_size={SIZE}", "engine.kind=local"]


def prepare(folder: Path) -> int:
    return main(["data", "prepare", *words(folder)])


def cached(folder: Path) -> Path:
    (found,) = (path for path in (folder / "cache" / "fedray" / "mapped").iterdir() if path.is_dir())
    return found


def test_what_is_prepared_is_what_a_run_reads(tmp_path, capsys):
    folder = split(tmp_path / "split")
    assert prepare(folder) == 0
    assert "prepared 50 training and 10 test samples in " in capsys.readouterr().out
    made = {path.name: path.stat().st_mtime_ns for path in cached(tmp_path).glob("*.npy")}
    assert set(made) == {"x.npy", "y.npy", "x_test.npy", "y_test.npy"}
    result = simulate(settings(folder, **{"data.access": "mapped"}))
    assert result.summary["status"] == "completed"
    assert {path.name: path.stat().st_mtime_ns for path in cached(tmp_path).glob("*.npy")} == made
    assert prepare(folder) == 0
    assert "reading samples" not in capsys.readouterr().out


KILLED = """
import os, pathlib, signal, sys, time
import fedray.data.sources.images as images, fedray.data.storage.mapping as mapping
from fedray.run import main

mapping.CHUNK_BYTES, real, written = 2 * 3 * 16 * 16, mapping.Filling.write, []

def dying(filling, chunk, blocks):
    written.append(chunk)
    if len(written) >= 9:
        # five of them are noted, whoever is held up
        cache = pathlib.Path(os.environ["XDG_CACHE_HOME"])
        while sum(len(journal.read_text().splitlines()) for journal in cache.glob("**/*.done")) < 1 + 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(filling, chunk, blocks)

mapping.Filling.write = dying
main()
"""


def test_killed_while_preparing_and_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedray.data.storage.mapping.CHUNK_BYTES", 2 * 3 * SIZE * SIZE)
    folder = split(tmp_path / "split")
    command = [sys.executable, "-c", KILLED, "data", "prepare", *words(folder)]
    done = subprocess.run(command, env=os.environ, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert cached(tmp_path).suffix == ".partial"
    read: list[int] = []
    real = Filling.load
    monkeypatch.setattr(Filling, "load", lambda *arguments: (read.append(2), real(*arguments))[1])
    assert prepare(folder) == 0
    assert 60 - 2 * 9 <= sum(read) <= 60 - 2 * 5
    assert not cached(tmp_path).suffix


def test_more_nodes_than_one_read(tmp_path, ray_cluster, capsys):
    """With nobody else in the cluster, and with nodes that read the driver's files: the same bytes."""
    import ray

    from fedray.engine.ray.preparing import map_on_cluster
    from fedray.experiment.resolve import resolve_data

    folder = split(tmp_path / "split")
    lines: list[str] = []
    found = resolve_data(
        load_settings(folder),
        map_all=lambda arrays, place: map_on_cluster(arrays, place, lambda done, total: None, lines.append),
    )
    assert len(lines) == len([node for node in ray.nodes() if node["Alive"]]) - 1
    alone = map_arrays({"x": lazy_of(folder)}, tmp_path / "alone")
    np.testing.assert_array_equal(found.data.x, alone["x"])


def load_settings(folder: Path):
    from fedray.config import load

    keys = {"data.source": "federated_csv", "data.root": str(folder), "data.image_size": SIZE, "data.access": "mapped"}
    return load({**keys, "algorithm.name": "fedavg"})


def lazy_of(folder: Path):
    from fedray.data.sources.source import source_of

    config = load_settings(folder)
    return source_of(config.data, config.task).x_train


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["prepare", "mnits"], "there is no source or file 'mnits' (did you mean 'mnist'?)"),
        (["pepare", "mnist"], "there is no source or file 'pepare' (did you mean 'prepare'?)"),
        (["prepare", "data.access=lazy"], "data.access=lazy: data are prepared for data.access=mapped"),
        (["prepare", "--plot", "x.png"], "--plot goes with fedray data info, not with prepare"),
        (["prepare", "gldv2", "data.root=nowhere"], "data.root=nowhere is not a folder"),
    ],
)
def test_what_is_refused(arguments, line, capsys):
    assert refused(capsys, *arguments, command="data", base=[]) == line


def test_an_image_that_is_damaged_stops_it_and_is_named(tmp_path, capsys):
    folder = split(tmp_path / "split")
    victim = next((folder / "train").rglob("*.jpg"))
    victim.write_bytes(b"GIF89a, or so it says")
    assert prepare(folder) == 2
    assert f"{victim} is not an image that Pillow knows" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("columns.json"))


def test_a_full_disk_stops_it_before_it_begins(tmp_path, capsys, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    assert prepare(split(tmp_path / "split")) == 2
    assert "where 0 GB are free" in capsys.readouterr().err


def test_info(tmp_path, capsys):
    assert main(["data", "info", *words(split(tmp_path / "split")), "--plot", str(tmp_path / "who.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("5 clients with samples: 7 to 10 samples")
    assert any(line.startswith(f"inputs [3, {SIZE}, {SIZE}] uint8; ") for line in lines)
    assert any(line.startswith("4 classes: ") for line in lines)
    assert (tmp_path / "who.png").stat().st_size > 1000


def test_info_without_classes(capsys, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), rng.normal(size=60)
    np.savez(tmp_path / "a.npz", x_train=x[:50], y_train=y[:50], x_test=x[50:], y_test=y[50:])
    assert main(["data", "npz", f"data.root={tmp_path / 'a.npz'}", "data.clients=5"]) == 0
    out = capsys.readouterr().out
    assert "task.kind=regression" in out
    assert "label skew" not in out


def test_label_skew_is_what_it_says():
    assert label_skew(np.array([[5, 5], [2, 2]])) == 0
    assert label_skew(np.array([[8, 0], [0, 8]])) == 0.5
    assert label_skew(np.eye(10) * 3) == pytest.approx(0.9)
    # a client of 3 at distance 0.25, and one of 1 at distance 0.75
    assert label_skew(np.array([[3, 0], [0, 1]])) == pytest.approx((3 * 0.25 + 0.75) / 4)


def test_a_histogram_has_a_bar_where_somebody_is():
    assert histogram(np.array([1, 1, 1, 1, 9])).strip(" ") == histogram(np.array([1, 1, 1, 1, 9]))
    assert histogram(np.array([4, 4])) == "█"


def test_images_that_were_written_since_are_read_again(tmp_path, monkeypatch):
    """Also those of the same size that are not among the few whose content is in the digest."""
    monkeypatch.setattr("fedray.data.storage.lazy.HASHED", 2)
    folder = tmp_path / "classes"
    for i in range(30):
        path = folder / "train" / "abc"[i % 3] / f"{i:02d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, i, i)).save(path)
        if i < 6:
            (folder / "test" / "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "test" / "abc"[i % 3])
    settings = {
        "data.source": "image_folder",
        "data.root": str(folder),
        "data.image_size": 8,
        "data.access": "mapped",
        "data.clients": 2,
        "data.partition.kind": "iid",
    }

    def read() -> np.ndarray:
        from fedray.config import load
        from fedray.experiment.resolve import resolve_data

        return np.array(resolve_data(load({**settings, "algorithm.name": "fedavg"})).data.x)

    before = read()
    Image.new("RGB", (8, 8), (200, 200, 200)).save(folder / "train" / "b" / "13.bmp")
    after = read()
    assert (before != after).any(axis=(1, 2, 3)).sum() == 1
    assert (after == 200).all(axis=(1, 2, 3)).sum() == 1


def test_a_journal_that_was_cut_is_believed_as_far_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("fedray.data.storage.mapping.CHUNK_BYTES", 2 * 3 * SIZE * SIZE)
    items = lazy_of(split(tmp_path / "split"))
    whole = map_arrays({"x": items}, tmp_path / "whole")["x"]
    staging = tmp_path / "cut.partial"
    staging.mkdir()
    np.lib.format.open_memmap(staging / "x.npy", mode="w+", dtype=np.uint8, shape=whole.shape)[:2] = whole[:2]
    (staging / "x.done").write_text("2 50\n0\n1")  # of 12, 13, ...
    np.testing.assert_array_equal(map_arrays({"x": items}, tmp_path / "cut")["x"], whole)
    staging.mkdir()
    (staging / "x.done").write_text("4 50\n0\n1\n2\n")  # by another version, in other chunks
    np.testing.assert_array_equal(map_arrays({"x": items}, tmp_path / "cut2")["x"], whole)


class OneFile:
    """A Dataset whose items are read from one open file, as few can do it from several threads."""

    def __init__(self, path: Path, count: int) -> None:
        self.file, self.count, self.targets = path.open("rb"), count, np.arange(count) % 2

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.file.seek(64 * i)
        time.sleep(0)
        return np.frombuffer(self.file.read(64), np.uint8), int(self.targets[i])


def test_a_dataset_of_a_users_is_read_by_one_thread_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("fedray.data.storage.mapping.CHUNK_BYTES", 64 * 3)
    content = np.random.default_rng(0).integers(0, 256, (2000, 64), dtype=np.uint8)
    (tmp_path / "content").write_bytes(content.tobytes())
    items = LazyItems(OneFile(tmp_path / "content", 2000), "data")
    found = map_arrays({"x": items}, tmp_path / "folder", readers=lambda path: [Filling.load] * 8)
    np.testing.assert_array_equal(found["x"], content)


def test_items_of_which_nothing_tells_whether_they_changed_are_not_kept(tmp_path):
    (tmp_path / "content").write_bytes(bytes(64))
    with pytest.raises(UserError, match=r"data.access=mapped keeps the items of data .*method digest\(\)"):
        LazyItems(OneFile(tmp_path / "content", 1), "data").stamp()
