"""Data sets of Hugging Face: columns of every kind, the same bits wherever rows are read, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from hf_sets import (
    CLIENTS,
    FAST,
    ROWS,
    SIZE,
    TESTS,
    X,
    Y,
    as_parquet,
    divided,
    made,
    numbers,
    picture,
    pictures,
    read,
    saved,
    settings,
)
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.sources.hf_items import Rows
from fedray.data.sources.source import source_of
from fedray.data.sources.user_data import user_source
from fedray.data.storage.lazy import LazyItems
from fedray.experiment.resolve import resolve_data

pytestmark = pytest.mark.usefixtures("without_hub")


def test_tables_have_the_same_bits_in_every_form():
    sets = divided(numbers(client=CLIENTS.tolist()))
    of_disk = simulate(settings(saved(sets), run__name="disk"))
    of_parquet = simulate(settings(as_parquet(sets), run__name="parquet"))
    given = {"data": sets["train"], "test": sets["test"], "label_column": "target"}
    of_objects = simulate({**FAST, "run.name": "objects"}, **given)
    frames = {name: sets[name].to_pandas() for name in sets}
    of_frames = simulate(
        {**FAST, "run.name": "frames"}, data=frames["train"], test=frames["test"], label_column="target"
    )
    runs = (of_disk, of_parquet, of_objects, of_frames)
    assert len({run.summary["model_sha256"] for run in runs}) == 1
    assert set(of_disk.clients["client_name"]) == set("abef")
    assert simulate(settings("mine", run__name="disk")).summary == of_disk.summary


@pytest.mark.parametrize("form", ["images", "tokens", "both"])
def test_the_same_bits_in_memory_mapped_and_lazy(form):
    if form == "images":
        root, model = saved(pictures()), None
    else:
        words = (np.arange(7 * (ROWS + TESTS)).reshape(-1, 7) * 31 % 50).tolist()
        features: dict[str, Any] = {"words": List(Value("int32")), "target": ClassLabel(names=["x", "y", "z"])}
        columns: dict[str, Any] = {"words": words, "target": Y.tolist()}
        if form == "both":
            columns |= {"age": X[:, 0].tolist(), "grid": X.reshape(-1, 2, 2).tolist()}
            features |= {"age": Value("float64"), "grid": Array2D((2, 2), "float32")}
        root, model = saved(divided(columns, features)), Both if form == "both" else Words
    shas, keys = {}, settings(root, data__image_size=SIZE if form == "images" else None)
    for access in ("auto", "memory", "mapped", "lazy"):
        result = simulate({**keys, "data.access": access, "run.name": access}, model=model)
        shas[access] = result.summary["model_sha256"]
    assert len(set(shas.values())) == 1, shas
    # where samples are does not make another run, unless items themselves are compared
    first = "lazy" if form == "images" else "memory"
    again = simulate({**keys, "data.access": "mapped", "run.name": first}, model=model)
    assert again.summary["model_sha256"] == shas[first]


class Words(nn.Module):
    """A model of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x).mean(1))


class Both(Words):
    """A model of named inputs."""

    def forward(self, words: Tensor, age: Tensor, grid: Tensor) -> Tensor:
        assert age.shape[1:] == (1,)
        assert grid.shape[1:] == (2, 2)
        return super().forward(words) * age + grid.sum((1, 2))[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("access", ["lazy", "mapped"])
def test_on_ray(access, ray_cluster):
    root = saved(pictures())
    keys = {"data__image_size": SIZE, "data__access": access}
    local = simulate(settings(root, run__name="local", **keys))
    on_ray = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.5}
    assert simulate(settings(root, **keys, **on_ray)).summary["model_sha256"] == local.summary["model_sha256"]
    sets = pictures((SIZE, SIZE))
    in_memory = simulate(
        {**settings(root, run__name="memory", **on_ray), "data.source": "sample", "data.root": None},
        data=sets["train"], test=sets["test"], label_column="target",
    )  # fmt: skip
    assert in_memory.summary["status"] == "completed"


def test_images_are_what_those_of_files_are():
    """The same code reads both; a PNG loses nothing."""
    source = read(saved(pictures()), image_size=SIZE)
    assert isinstance(source.x_train, LazyItems)
    assert (source.class_names, source.scale.tolist()) == (("x", "y", "z"), [np.float32(1 / 255)] * 3)
    folder = Path("classes")
    for i in range(ROWS + TESTS):
        place = folder / ("train" if i < ROWS else "test") / "xyz"[Y[i]]
        place.mkdir(parents=True, exist_ok=True)
        picture(i).save(place / f"{i:03}.png")
    config = load({"data.source": "image_folder", "data.root": str(folder), "data.image_size": SIZE})
    files = source_of(config.data, config.task)
    every = np.arange(ROWS)
    order = np.argsort(Y[:ROWS], kind="stable")
    assert np.array_equal(files.x_train.chosen(every), source.x_train.chosen(every)[order])


class Pictured(nn.Module):
    """A model of an image and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * SIZE * SIZE + 1, 3)

    def forward(self, image: Tensor, b: Tensor) -> Tensor:
        return self.last(torch.cat((image.flatten(1), b), 1))


def test_an_image_and_a_number():
    """Both are inputs by name, whose image is scaled and whose number stays as it is."""
    columns = numbers(image=[picture(i) for i in range(ROWS + TESTS)])
    features = {**dict.fromkeys("abcd", Value("float32")), "target": Value("int64"), "image": Image()}
    divided(columns, features).save_to_disk("both")
    bits = set()
    for access in ("memory", "mapped", "lazy"):
        keys = {"access": access, "image_size": SIZE, "input_columns": ["image", "b"]}
        source = read("both", **keys)
        assert source.scale["b"] is None
        np.testing.assert_allclose(source.scale["image"], 1 / 255, rtol=1e-6)
        result = simulate(
            {**settings("both"), **{f"data.{key}": value for key, value in keys.items()}, "run.name": access},
            model=Pictured,
        )
        bits.add(result.summary["model_sha256"])
    assert len(bits) == 1


def test_images_without_a_size_must_be_alike():
    source = read(saved(pictures((SIZE, SIZE + 2))))
    assert source.x_train.first.shape == (1, 3, SIZE, SIZE + 2)
    assert np.array_equal(source.x_train.first[0].transpose(1, 2, 0), np.asarray(picture(0, (SIZE, SIZE + 2))))
    source = read(saved(pictures(lambda i: (9, 9) if i == 7 else (8, 9)), "uneven"))
    with pytest.raises(UserError, match=r"row 7 of column 'image' has 9x9 pixels, another one 9x8: data.image_size"):
        source.x_train.chosen(np.arange(ROWS))


OWNERS = {
    "numbers": (np.arange(80) % 4, None, "0123"),
    "numbers with gaps": (np.arange(80) % 4 * 10 + 7, None, ("7", "17", "27", "37")),
    "text": (CLIENTS, None, "abef"),
    "whole floats": ((np.arange(80) % 4).astype(float), None, "0123"),
    "dates": (pd.date_range("2024-01-30", periods=3).to_pydatetime()[np.arange(80) % 3], None, None),
    "booleans": (np.arange(80) % 2 == 0, None, ("False", "True")),
    "classes": (np.arange(80) % 2, ClassLabel(names=["home", "away"]), ("away", "home")),
}


@pytest.mark.parametrize(("owners", "feature", "expected"), OWNERS.values(), ids=OWNERS.keys())
def test_clients_of_any_type(owners, feature, expected):
    sets = divided(numbers(client=owners.tolist()))
    if feature is not None:
        sets = sets.cast_column("client", feature)
    result = simulate(settings(saved(sets)))
    shown = result.clients.get("client_name", result.clients["client"].astype(str))
    if expected is None:
        assert {name[:10] for name in shown} == {"2024-01-30", "2024-01-31", "2024-02-01"}
    else:
        assert set(shown) == set(expected)


def test_categories_in_parquet():
    frame = pd.DataFrame(X, columns=list("abcd")).assign(target=Y, client=pd.Categorical(CLIENTS))
    frame.to_parquet("all.parquet")
    source = read("all.parquet")
    assert source.client_names == tuple("abef")
    assert source.notes == ("warning: all.parquet has no test set: of each client, every fifth row is a test row",)
    assert len(source.y_test) == sum(int((name == CLIENTS).sum()) // 5 for name in "abef")


TARGETS = {
    "names": (np.array(["cat", "dog", "ant"])[Y].tolist(), "classification", (ROWS,), np.int64),
    "numbers": (X[:, 0].tolist(), "regression", (ROWS,), np.float32),
    "several": (X.tolist(), "regression", (ROWS, 4), np.float32),
    "tokens": ((np.arange(160).reshape(-1, 2) % 9).tolist(), "tokens", (ROWS, 2), np.int64),
    "labels": ((np.arange(240).reshape(-1, 3) % 2).tolist(), "multilabel", (ROWS, 3), np.float32),
}


@pytest.mark.parametrize(("target", "kind", "shape", "dtype"), TARGETS.values(), ids=TARGETS.keys())
def test_targets_of_any_type(target, kind, shape, dtype):
    source = read(saved(divided(numbers(target=target))))
    assert (source.task, source.y_train.shape, source.y_train.dtype) == (kind, shape, dtype)


def test_columns_are_named():
    columns = numbers(ranger=CLIENTS.tolist(), species=Y.tolist(), note=["seen"] * (ROWS + TESTS))
    root = saved(divided(columns))
    source = read(root, target_column="species", client_column="ranger", input_columns=["c", "a"])
    assert np.array_equal(source.x_train, X[:ROWS, [2, 0]])
    assert source.client_names == tuple("abef")


def test_columns_of_the_test_set_are_told_by_name():
    sets = divided(numbers())
    order = ["target", "d", "b", "a", "c"]
    source = read(saved(DatasetDict(train=sets["train"], test=sets["test"].select_columns(order))))
    assert np.array_equal(source.x_test, X[ROWS:])
    other = DatasetDict(train=sets["train"], test=sets["test"].rename_column("d", "e"))
    with pytest.raises(
        UserError, match=r"other \(test\) lacks column 'd', which other \(train\) has; both need the same"
    ):
        read(saved(other, "other"))


def test_which_sets_are_taken():
    sets = divided(numbers())
    source = read(as_parquet(sets, test="validation"))
    assert source.notes == ("warning: parquet has no set 'test': its set 'validation' is the test set",)
    assert np.array_equal(source.x_test, X[ROWS:])
    source = read(saved(DatasetDict(**sets, unsupervised=sets["test"]), "three"))
    assert source.notes == ("warning: three: unsupervised of its sets is not read",)
    source = read(saved(made(numbers()), "one"))
    assert np.array_equal(source.x_test, X[4::5])
    with pytest.raises(UserError, match=r"other has no set 'train' \(there are: more, rest\)"):
        read(saved(DatasetDict(rest=sets["test"], more=sets["test"]), "other"))


def test_what_another_process_gets_is_small():
    source = read(saved(pictures()), image_size=SIZE)
    packed = pickle.dumps(source.x_train)
    assert len(packed) < 6000
    there = pickle.loads(packed)
    assert np.array_equal(there.chosen(np.arange(5)), source.x_train.chosen(np.arange(5)))
    Path("mine").rename("moved")
    with pytest.raises(UserError, match=r"mine/train/data-.* is not on .*: every machine needs the same files"):
        pickle.loads(packed).read(0)


def test_digests():
    def digest(sets: Any, folder: str = "mine", **keys: Any) -> str:
        return read(saved(sets, folder), access="lazy", **keys).x_train.digest()

    sets = divided(numbers())
    first = digest(sets)
    assert digest(sets) == digest(divided(numbers()), "same") == first
    cached = Path("cache/fedray/contents.json")
    before = cached.read_text()
    assert read("mine", access="lazy").x_train.digest() == first
    assert cached.read_text() == before
    # a row that is not among those that are always read; the file is as long as before
    changed = numbers()
    changed["b"][ROWS - 2] += 1
    assert digest(divided(changed)) != first
    assert digest(sets, "same", input_columns=["a", "b"]) != digest(sets, "same", input_columns=["b", "a"]) != first
    rows = Rows(sets["train"], list("abcd"), None, "mine")
    assert Rows(sets["train"].select(range(ROWS)), list("abcd"), None, "mine").digest() == rows.digest()


def test_stamps_know_the_files_of_images(tmp_path):
    """A stamp is another one after a file was written again, also among images that are bytes in the table."""
    paths = [str(tmp_path / f"{k}.png") for k in range(3)]
    for k, path in enumerate(paths):
        picture(k).save(path)
    data = io.BytesIO()
    picture(3).save(data, "png")
    values = [
        *({"bytes": None, "path": path} for path in paths),
        {"bytes": data.getvalue(), "path": str(tmp_path / "3.png")},
        None,
    ]
    table = Dataset.from_dict({"image": values}, features=Features({"image": Image()}))
    rows = Rows(table, ["image"], SIZE, "mine")
    stamps = {rows.stamp()}
    os.utime(paths[1], ns=(1, 1))
    stamps.add(rows.stamp())
    Path(paths[2]).unlink()
    stamps.add(rows.stamp())
    assert len(stamps) == 3
    assert Rows(table.select([0, 3, 4]), ["image"], SIZE, "mine").stamp() != rows.stamp()
    only_bytes = Rows(table.select([3]), ["image"], SIZE, "mine")
    before = only_bytes.stamp()
    picture(3).save(tmp_path / "3.png")
    assert only_bytes.stamp() == before, "the bytes are in the table, whatever path they came from"


def test_another_image_makes_another_run():
    sets = pictures()
    simulate(settings(saved(sets), data__image_size=SIZE, run__name="run"))
    other = sets["train"].to_list()
    other[-2] = {**other[-2], "image": picture(99)}
    changed = Dataset.from_list(other, features=sets["train"].features)
    saved(DatasetDict(train=changed, test=sets["test"]), "other")
    with pytest.raises(UserError, match=r"holds another run \(training data differs"):
        simulate(settings("other", data__image_size=SIZE, run__name="run"))


def test_much_is_read_when_it_is_used(monkeypatch):
    root = saved(divided(numbers()))
    assert isinstance(read(root).x_train, np.ndarray)
    monkeypatch.setattr("fedray.data.storage.lazy.memory_of_machine", lambda: 1000)
    assert isinstance(read(root).x_train, LazyItems)


def test_datasets_that_are_handed_over():
    sets = divided({**{name: values for name, values in numbers(label=Y.tolist()).items() if name != "target"}})
    source = user_source(sets["train"], sets["test"])
    assert np.array_equal(source.x_train, X[:ROWS])
    chosen = sets["train"].select(range(0, ROWS, 2)).shuffle(seed=0)
    assert np.array_equal(user_source(chosen, sets["test"]).x_train, chosen.to_pandas()[list("abcd")].to_numpy("f4"))
    for data, test, message in (
        (sets, None, r"data=... is a DatasetDict; hand over data=d\['train'\], test=d\['test'\]"),
        (sets["train"].to_iterable_dataset(), sets["test"], "data=... is a IterableDataset; hand over a Dataset that"),
        (sets["train"], (X, Y), "must both be a Hugging Face Dataset, or neither"),
        (sets["train"].with_transform(lambda rows: rows), sets["test"], "data has a transform .set_transform"),
        (
            sets["train"].rename_column("label", "lable"),
            sets["test"],
            r"'label' \(label_column\) \(did you mean 'lable'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            user_source(data, test if test is not None else sets["test"])


def test_the_library_says_nothing_and_stays_as_it_is(capfd):
    assert not datasets.are_progress_bars_disabled()
    read(as_parquet(divided(numbers()), "parquet"))
    written = capfd.readouterr()
    assert "Generating" not in written.err
    assert not datasets.are_progress_bars_disabled()


def test_parquet_files_that_change_are_read_again():
    sets = divided(numbers())
    root = as_parquet(sets, "run [1]*")
    first = read(root).x_train
    path = root / "train-00000-of-00002.parquet"
    times = path.stat()
    changed = numbers()
    changed["a"][0] = 5.0
    made(changed, None, slice(ROWS // 2)).to_parquet(str(path))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read(root).x_train[0, 0] == 5.0 != first[0, 0]
    assert json.loads(json.dumps(read(root).notes)) == []


def test_other_test_rows_are_other_samples(monkeypatch):
    """Of a set without test samples: which rows are test rows follows from the clients, and so does what is kept."""
    monkeypatch.setattr("fedray.data.sources.hf_items.is_much", lambda size: True)
    monkeypatch.setattr("fedray.data.storage.lazy.HASHED", 2)
    count = 200
    one = np.arange(count) // 5
    other = np.where((np.arange(count) >= 57) & (np.arange(count) < 64), 99, one)
    columns = {"a": np.arange(count, dtype=float).tolist(), "one": one.tolist(), "other": other.tolist()}
    root = saved(made({**columns, "target": [i % 2 for i in range(count)]}))
    keys = {"access": "mapped", "input_columns": ["a"], "partition.kind": "natural"}
    found = {}
    for client in ("one", "other"):
        given = settings(root, **{f"data.{key}": value for key, value in keys.items()}, data__client_column=client)
        found[client] = np.array(resolve_data(load(given)).data.x_test[:, 0])
    assert (found["one"] % 5 == 4).all()
    assert found["other"].max() == found["one"].max()
    assert not np.array_equal(found["one"], found["other"])
