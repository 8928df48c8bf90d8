"""Targets of a Dataset that is read item by item are those of its items; data sets within others, and lists of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from fedray import UserError, evaluate, simulate
from fedray.core.structure import leaves
from fedray.data.sources.user_data import user_source
from fedray.data.sources.wrapped import classes_of

COUNT, WRONG = 600, 231
SETTINGS = {
    "algorithm.name": "fedavg", "run.rounds": 1, "engine.kind": "local", "train.batch_size": 50,
    "train.local_steps": None, "train.local_epochs": 1, "data.clients": 3, "data.partition.kind": "iid",
    "model.name": "logistic",
}  # fmt: skip


class Listed(Dataset):
    """A Dataset that lists its targets; item ``wrong`` has another one than the list says. ``wrong`` is none of those
    that fedray looks at before the first round."""

    def __init__(self, wrong: int | None = None, attribute: str = "targets", count: int = COUNT) -> None:
        self.wrong, self.count = wrong, count
        setattr(self, attribute, (np.arange(count) % 3).tolist())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        x = np.random.default_rng(i).normal(size=4).astype(np.float32)
        return x, (i + (i == self.wrong)) % 3


class Drawn(Listed):
    """A Dataset whose label noise is drawn when an item is read, and that lists no targets."""

    def __init__(self) -> None:
        super().__init__()
        del self.targets

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        x, y = super().__getitem__(i)
        return x, (y + (i == WRONG and random.random() < 0.7)) % 3


def run(folder: Path, data: Any, test: Any, **keys: Any) -> Any:
    settings = {**SETTINGS, "run.output": str(folder), "data.access": "lazy"}
    settings |= {key.replace("__", "."): value for key, value in keys.items()}
    return simulate(settings, data=data, test=test)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


HERE: dict[str, tuple[Callable[[], Any], str]] = {
    "targets": (lambda: Listed(WRONG), rf"item {WRONG} of {{}} has the target 1, but {{}}.targets lists 0 for it"),
    "labels": (lambda: Listed(WRONG, "labels"), rf"item {WRONG} of {{}} has the target 1, but {{}}.labels lists 0"),
    "subset": (lambda: Subset(Listed(WRONG), range(WRONG - 7, COUNT)), r"item 7 of {} has the target 1, but {}.tar"),
    "joined": (
        lambda: ConcatDataset([Listed(count=40), Listed(WRONG)]),
        rf"item {WRONG + 40} of {{}} has the target 1, but {{}}.targets lists 0",
    ),
    "drawn": (Drawn, rf"item {WRONG} of {{}} has the target [01], but had [01] when targets were read"),
}


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("part", ["data", "test"])
def test_an_item_with_another_target_than_the_one_that_is_taken_for_it(kind, part, tmp_path):
    """In training, where a thread reads ahead, and in evaluations."""
    made, message = HERE[kind]
    data, test = (made() if part == name else Listed() for name in ("data", "test"))
    # a draw may be what it was when targets were read
    with pytest.raises(UserError, match=message.format(part, part)) as refused:
        run(tmp_path, data, test, run__rounds=20)
    assert "\n" not in str(refused.value)


def test_on_ray(tmp_path, ray_cluster):
    keys = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.5}
    with pytest.raises(UserError, match=rf"item {WRONG} of data has the target 1, but data.targets lists 0"):
        run(tmp_path, Listed(WRONG), Listed(), **keys)


class Kept(Listed):
    def digest(self) -> str:
        return "always the same"


def test_what_is_mapped_or_evaluated_is_compared_too(tmp_path, monkeypatch):
    monkeypatch.setattr("fedray.data.sources.user_data.is_much", lambda size: True)
    message = rf"item {WRONG} of data has the target 1, but data.targets lists 0"
    with pytest.raises(UserError, match=message):
        run(tmp_path, Kept(WRONG), Kept(), data__access="mapped")
    found = run(tmp_path, Listed(), Listed())
    with pytest.raises(UserError, match=message.replace("data", "test")):
        evaluate(found.folder, data=Listed(), test=Listed(WRONG))
    with pytest.raises(UserError, match=message):
        evaluate(found.folder, data=Listed(WRONG), test=Listed(), split="train")


def test_noise_in_many_items_is_trained_on_when_nothing_lists_other_targets(tmp_path):
    """A list that the first look refutes is not taken, as with a transform of targets."""

    class Noisy(Listed):
        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            x, y = super().__getitem__(i)
            return x, 2 - y

    lazy, memory = (run(tmp_path, Noisy(), Listed(), data__access=kind, run__name=kind) for kind in ("lazy", "memory"))
    assert lazy.summary["model_sha256"] == memory.summary["model_sha256"]
    assert user_source(Noisy(), Listed(), access="lazy").y_train[:3].tolist() == [2, 1, 0]


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "list": list, "tensor": torch.from_numpy, "series": pd.Series, "float": lambda y: y.astype(np.float64),
    "column": lambda y: y[:, None],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_list_may_have_any_form(form, tmp_path):
    data = Listed()
    data.targets = FORMS[form](np.arange(COUNT) % 3)
    found = run(tmp_path, data, Listed(), run__name="it")
    plain = run(tmp_path, Listed(), Listed(), run__name="plain")
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]


def counted(read: list[int]) -> Listed:
    class Counting(Listed):
        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            read.append(i)
            return super().__getitem__(i)

    return Counting()


@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: Subset(it, range(COUNT)), lambda it: ConcatDataset([it])])
def test_data_sets_within_others_list_their_targets(wrap):
    """So that no epoch is needed to know them."""
    read: list[int] = []
    source = user_source(wrap(counted(read)), Listed(), access="lazy")
    assert source.y_train.tolist() == (np.arange(COUNT) % 3).tolist()
    assert len(read) < 100


class Methods(Listed):
    def __init__(self) -> None:
        super().__init__()
        del self.targets

    def labels(self) -> list[str]:
        return ["a", "b", "c"]


@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: Subset(it, range(COUNT)), lambda it: ConcatDataset([it])])
def test_what_is_called_labels_may_be_something_else(wrap):
    source = user_source(wrap(Methods()), Listed(), access="lazy")
    assert source.y_train.tolist() == (np.arange(COUNT) % 3).tolist()


def with_clients(clients: list[str]) -> Listed:
    data = Listed(count=len(clients))
    data.clients = clients
    return data


def test_clients_of_data_sets_within_others():
    """A Subset has no attribute ``clients``: its clients were lost."""
    whole, last = ["ann", "bob", "ann", "eve"] * 5, ["eve", "eve"]
    part = user_source(Subset(with_clients(whole), [1, 3, 5]), Listed())
    assert (part.client_names, part.client_train.tolist()) == (("bob", "eve"), [0, 1, 0])
    both = user_source(ConcatDataset([with_clients(whole), with_clients(last)]), Listed())
    assert (both.client_names, np.bincount(both.client_train).tolist()) == (("ann", "bob", "eve"), [10, 5, 7])
    with pytest.raises(UserError, match="some of the data sets that are joined in data have clients, and others have"):
        user_source(ConcatDataset([with_clients(whole), Listed(count=3)]), Listed())


def parts(sizes: tuple[int, ...] = (20, 10, 30)) -> list[Any]:
    rng = np.random.default_rng(0)
    data = TensorDataset(torch.from_numpy(rng.normal(size=(60, 4)).astype("f4")), torch.arange(60) % 3)
    return random_split(data, sizes, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("access", ["memory", "lazy"])
@pytest.mark.parametrize("sizes", [(60,), (30, 30), (20, 10, 30), (20, 10, 30 - 5, 5)])
def test_a_list_of_data_sets_is_one_for_each_client(access, sizes, tmp_path):
    """Of two or three, too, which were taken for arrays (x, y, client)."""
    keys = {"data__partition__kind": "auto", "data__access": access}
    result = run(tmp_path, parts(sizes), Listed(count=30), run__name="list", **keys)
    assert result.clients["samples"].tolist() == list(sizes)
    if len(sizes) > 1:
        x, y = (torch.stack([torch.as_tensor(item[k]) for part in parts(sizes) for item in part]) for k in (0, 1))
        owners, test = np.repeat(np.arange(len(sizes)), sizes), user_source(Listed(count=30), Listed(count=3))
        arrays = simulate(
            {**SETTINGS, "data.partition.kind": "auto", "run.output": str(tmp_path), "run.name": "arrays"},
            data=(x, y, owners), test=(test.x_train, test.y_train),
        )  # fmt: skip
        assert arrays.summary["model_sha256"] == result.summary["model_sha256"]


def test_each_client_may_have_its_own_tests():
    source = user_source(parts(), tuple(parts((6, 4, 50))))
    assert np.bincount(source.client_train).tolist() == [20, 10, 30]
    assert np.bincount(source.client_test).tolist() == [6, 4, 50]


def test_what_processes_need_of_data_sets_within_others():
    assert classes_of(ConcatDataset([Subset(Listed(), [0]), parts()[0]])) == [
        ConcatDataset, Subset, Listed, TensorDataset
    ]  # fmt: skip


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Listed())


def table() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": [0, 1]})


FRAME = pd.DataFrame({"a": [1.0, 2.0], "label": [0, 1]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: [parts()[0], Subset(Listed(), [])], r"data\[1\] is an empty data set"),
        (lambda: [with_clients(["a", "b"]), Listed()], r"data\[0\] lists clients, but in a list"),
        (lambda: (Listed(), np.arange(COUNT)), r"data=... holds a data set \(Listed\) among arrays; give arrays"),
        (lambda: [FRAME, FRAME], r"data=... is a list of tables; join them by pandas.concat, with a column"),
        (lambda: [table(), table()], r"data=... is a list of tables; join them by datasets.concatenate_datasets, with"),
        (lambda: parts(), r"data=... is a list of 3 data sets, one for each client, and test=... one of 2"),
        (lambda: [], "data is an empty data set"),
        (
            lambda: [DataLoader(part, 5) for part in parts()],
            r"data\[0\] is a DataLoader, but fedray makes the mini-batches \(train.batch_size\): give its .dataset",
        ),
        (lambda: DataLoader(Listed(), 5), r"data=... is a DataLoader, but fedray .*: give its .dataset"),
        (
            lambda: [parts()[0], Stream()],
            r"data\[1\] is Stream: give arrays .* a Dataset with len and indices",
        ),
    ],
)
def test_lists_that_are_refused(data, message):
    with pytest.raises(UserError, match=message) as refused:
        user_source(data(), parts()[:2])
    assert "\n" not in str(refused.value)


def test_a_train_and_a_test_set_in_one_list_are_not_taken_for_two_clients():
    with pytest.raises(UserError, match=re.escape("data=... needs test=... in the same form")):
        user_source([Listed(), Listed()], None)


X, Y = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
XT, YT = X[:12], Y[:12]
ANIMALS = np.array(["cat", "dog", "ant"])


def pairs(*bounds: int, form: Any = lambda x, y: (x, y)) -> list[Any]:
    """The arrays of clients, which have the samples up to each of ``bounds``."""
    return [form(X[a:b], Y[a:b]) for a, b in zip((0, *bounds[:-1]), bounds, strict=True)]


PAIR_FORMS = {
    "arrays": lambda x, y: (x, y), "lists": lambda x, y: [x.tolist(), y.tolist()],
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "frames": lambda x, y: (pd.DataFrame(x, columns=list("abcde")), pd.Series(ANIMALS[y], dtype="category")),
    "several inputs": lambda x, y: ({"a": x, "b": x[:, :1]}, y), "names": lambda x, y: (x, ANIMALS[y]),
    "numbers of numbers": lambda x, y: (x, x[:, :2]),
}  # fmt: skip


@pytest.mark.parametrize("bounds", [(20, 60), (20, 40, 60), (10, 40, 55, 60)])
@pytest.mark.parametrize("form", PAIR_FORMS)
def test_a_list_of_pairs_of_arrays_is_one_for_each_client(form, bounds):
    """They were taken for as many samples of a tokens task."""
    make = PAIR_FORMS[form]
    for test in (make(XT, YT), pairs(*(bound // 5 for bound in bounds), form=make)):
        source, whole = (
            user_source(pairs(*bounds, form=make), test),
            user_source(make(X, Y), make(XT, YT)),
        )
        assert (source.task, source.class_names, len(source.y_test)) == (whole.task, whole.class_names, 12)
        assert source.client_train.tolist() == np.repeat(range(len(bounds)), np.diff((0, *bounds))).tolist()
        assert [a.tolist() for a in leaves((source.x_train, source.y_train))] == [
            a.tolist() for a in leaves((whole.x_train, whole.y_train))
        ]
    assert np.bincount(source.client_test).tolist() == np.diff((0, *(bound // 5 for bound in bounds))).tolist()


def samples(count: int, shape: tuple[int, ...], y: Any) -> list[Any]:
    return [(np.ones(shape, np.float32), np.asarray(y)) for _ in range(count)]


@pytest.mark.parametrize(("shape", "y"), [((3, 4, 4), [0, 1, 0]), ((4, 4), np.eye(4)), ((1, 4, 4), [2])])
def test_samples_with_as_many_targets_as_rows_stay_samples(shape, y):
    data, y = samples(30, shape, y), np.asarray(y)
    stacked = np.ones((6, *shape), np.float32), np.stack([y] * 6).squeeze()
    for test in (samples(6, shape, y), stacked):
        source = user_source(data, test)
        assert (source.x_train.shape, source.x_test.shape) == ((30, *shape), (6, *shape))
        assert source.client_train is None


@pytest.mark.parametrize(
    ("data", "test", "message"),
    [
        (
            pairs(20, 40), pairs(20, 40),
            "data=... is a list of 2 pairs of arrays of equal shapes, which are the samples .x, y. of a data set or "
            "the data of clients with 20 samples each: give arrays .x, y. of all samples, or .x, y, client.",
        ),
        (pairs(20, 60), pairs(4, 8, 12), "is a list of 2 data sets, one for each client, and test=... one of 3"),
        (pairs(20, 20, 60), (XT, YT), r"data\[1\] is an empty data set"),
        ([(X, Y), (X[:9, :3], Y[:9])], (XT, YT), r"samples of x of data\[1\] have shape \[3\], those of data\[0\]"),
        ([(X, Y), (X[:9], ANIMALS[Y[:9]])], (XT, YT), r"y of data\[1\] is <U3, that of data\[0\] int64; make"),
        ([(X, Y), ({"a": X[:9]}, Y[:9])], (XT, YT), r"x of data\[1\] is {a: one array}, that of data\[0\] one array"),
    ],
)  # fmt: skip
def test_pairs_of_arrays_that_are_refused(data, test, message):
    with pytest.raises(UserError, match=message) as refused:
        user_source(data, test)
    assert "\n" not in str(refused.value)
