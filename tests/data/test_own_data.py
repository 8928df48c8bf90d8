"""A user's own data: labels that are names, and everything that would be misread is refused in one line."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest
import torch

from fedray import UserError, simulate
from fedray.data import Source
from fedray.data.sources.source import from_fields, load_source, validate
from fedray.data.sources.user_data import user_source
from fedray.data.storage.lazy import LazyItems
from fedray.tuning.driver import load_custom
from fedray.tuning.spec import read_sweeps

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
XT, YT = X[:12], Y[:12]
ANIMALS = np.array(["cat", "dog", "ant"])
FAST = {
    "algorithm.name": "fedavg", "data.clients": 3, "model.name": "logistic", "run.rounds": 1, "train.local_steps": 2,
    "engine.kind": "local",
}  # fmt: skip


class Items(torch.utils.data.Dataset):
    def __init__(self, item, length=60):
        self.item, self.length = item, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return self.item(i)


def dataset(y):
    return Items(lambda i: (torch.from_numpy(X[i]), y[i]), len(y))


def frame(x, y, **more):
    return pd.DataFrame(x, columns=list("abcde")).assign(label=y, **more)


def forms(y, y_test):
    """The same data in each form that a user may give it in."""
    return {
        "arrays": ((X, y), (XT, y_test)),
        "lists": ((X.tolist(), y.tolist()), (XT.tolist(), y_test.tolist())),
        "dataset": (dataset(y), dataset(y_test)),
        "frame": (frame(X, y), frame(XT, y_test)),
    }


def both_ways(y, y_test, kind="auto"):
    """Each form through user_source, then the arrays as a source of the user's and as a file."""
    for data, test in forms(y, y_test).values():
        yield lambda data=data, test=test: user_source(data, test, kind=kind)
    fields = {"x_train": X, "y_train": y, "x_test": XT, "y_test": y_test}
    yield lambda: from_fields("mine", fields, kind=kind)

    def of_file():
        np.savez("mine.npz", **fields)
        return load_source("npz", "mine.npz", kind=kind)

    yield of_file


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusals(y, y_test, message, kind="auto"):
    for read in both_ways(y, y_test, kind):
        with pytest.raises(UserError, match=message) as refused:
            read()
        assert "\n" not in str(refused.value)


def test_fractions_are_refused_and_whole_floats_taken_in_every_form():
    targets = Y.astype(float)
    targets[4] = 1.5
    refusals(targets, YT, "y_train must hold whole numbers, not 1.5 as in row 4", kind="classification")
    for read in both_ways(targets, YT):
        source = read()
        assert (source.task, source.y_train.dtype) == ("regression", np.float32)
        assert source.notes == ("task.kind=regression, because y_train has fractions (1.5 in row 4)",)
    refusals(Y, np.where(np.arange(12) == 7, np.nan, YT), "y_test .*(nan as in|nothing in) row 7")
    for read in both_ways(Y.astype(float), YT.astype(np.float32)):
        source = read()
        assert (source.y_train.dtype, source.y_train.tolist(), source.class_names) == (np.int64, Y.tolist(), None)
        assert source.notes[0].startswith("warning: y_train holds whole numbers of type float")
        assert source.notes[0].endswith("taken for 3 classes; task.kind=regression takes numbers for quantities")


def first_warning(y, y_test):
    """The line about labels, which must be the same in every form."""
    notes = [read().notes for read in both_ways(y, y_test)]
    assert all(len(each) == 1 and each[0].startswith("warning: ") for each in notes), notes
    assert len(set(notes)) == 1
    return notes[0][0].removeprefix("warning: ")


def test_what_may_be_no_labels_is_told_in_every_form():
    assert first_warning(Y // 2 * 7, YT // 2 * 7) == (
        "the largest label is 7, so that there are 8 classes, but no sample has label 1, 2, 3, 4, 5 and 1 others: the "
        "model has outputs for these, too, unless labels are numbered without gaps"
    )
    assert first_warning(np.minimum(Y, 1), YT) == (
        "4 of the 12 samples of y_test have a label that no sample of y_train has (2), so that it can't be learnt"
    )
    many = np.arange(60) % 41
    assert first_warning(many, YT) == (
        "y_train has 41 classes for 60 samples; task.kind=regression takes numbers for quantities"
    )
    names = np.array([f"n{i:02}" for i in range(41)])
    assert first_warning(names[many], names[:12]) == (
        "y_train has 41 classes for 60 samples; are these names the labels?"
    )


@pytest.mark.parametrize(("y", "message"), [(Y - 2, "has label -2 in row 0"), (Y * 500, "has label 1000 in row 2")])
def test_numbers_that_can_not_be_labels_may_be_quantities(y, message):
    refusals(y, YT, f"y_train {message}.*task.kind=regression takes numbers for quantities")


RAGGED = [[0, 1] if i != 7 else [0] for i in range(60)]


def test_rows_of_unequal_length_are_named():
    """Of targets and clients, as lists, arrays of objects and columns of tables."""
    objects = np.empty(60, dtype=object)
    objects[:] = RAGGED
    message = r"{}row 7 of {} has shape \[1\], the first one \[2\]; all must be equally large"
    for y in (RAGGED, objects, pd.Series(RAGGED)):
        with pytest.raises(UserError, match=message.format("data: ", "y_train")):
            user_source((X, y), (XT, YT))
        with pytest.raises(UserError, match=message.format("data: ", "client_train")):
            user_source((X, Y, y), (XT, YT))
    with pytest.raises(UserError, match=message.format("data: ", "y_train")):
        user_source(frame(X, RAGGED), frame(XT, YT))
    with pytest.raises(UserError, match=message.format("mine: ", "y_train")):
        from_fields("mine", {"x_train": X, "y_train": RAGGED, "x_test": XT, "y_test": YT})
    data = Items(lambda i: (X[i], np.array(RAGGED[i])))
    data.targets = RAGGED
    with pytest.raises(UserError, match=message.format("data: ", "targets")):
        user_source(data, (XT, YT), access="lazy")


def test_targets_that_are_no_array_are_named():
    with pytest.raises(UserError, match=r"data: y_train can't be read as an array: RuntimeError: .*requires grad"):
        user_source((X, torch.zeros(60, requires_grad=True)), (XT, YT))


def test_rows_that_are_lists_are_targets_of_several_numbers():
    y = [[i / 2, 1.0] for i in range(60)]
    for given in (frame(X, y), (X, pd.Series(y))):
        source = user_source(given, (XT, y[:12]) if isinstance(given, tuple) else frame(XT, y[:12]))
        assert (source.task, source.y_train.tolist()) == ("regression", y)


def test_names_are_numbered_in_their_order_and_kept_in_every_form():
    for read in both_ways(ANIMALS[Y], ANIMALS[YT]):
        source = read()
        assert (source.classes, source.class_names) == (3, ("ant", "cat", "dog"))
        assert [source.class_names[label] for label in source.y_train] == ANIMALS[Y].tolist()
        assert [source.class_names[label] for label in source.y_test] == ANIMALS[YT].tolist()


def test_unknown_names_in_the_test_set_are_refused_in_every_form():
    beyond = ANIMALS[YT].copy()
    beyond[5] = "dgo"
    refusals(ANIMALS[Y], beyond, r"y_test has 'dgo' in row 5, which y_train does not have \(did you mean 'dog'")
    refusals(ANIMALS[Y], YT, "y_train holds names and y_test numbers; they must be alike")


def test_booleans_are_two_classes_even_if_one_is_absent():
    for read in both_ways(np.ones(60, bool), YT > 0):
        assert read().class_names == ("False", "True")


def test_labels_from_one_on_are_refused_in_every_form_unless_classes_say_otherwise():
    refusals(Y + 1, YT + 1, r"y_train and y_test start at 1: subtract 1, so that they are 0..2")
    refusals(np.where(Y == 2, 10**6, Y), YT, "y_train has label 1000000 in row 2, but there are 72 samples")
    arrays = {"x_train": X, "y_train": Y + 1, "x_test": XT, "y_test": YT + 1}
    assert validate(Source("mine", **arrays, classes=4)).y_train.max() == 3
    with pytest.raises(UserError, match=r"has label 3 in row 2; labels must be 0..2 \(they start at 1: subtract 1\)"):
        validate(Source("mine", **arrays, classes=3))


def test_categories_have_the_order_that_pandas_has():
    sizes = pd.CategoricalDtype(["small", "middle", "large", "huge"], ordered=True)
    y, y_test = (pd.Series(np.array(["small", "large", "middle"])[labels], dtype=sizes) for labels in (Y, YT))
    for data, test in (((X, y), (XT, y_test)), (frame(X, y), frame(XT, y_test))):
        source = user_source(data, test)
        assert (source.classes, source.class_names) == (4, ("small", "middle", "large", "huge"))
        assert source.y_train[:3].tolist() == [0, 2, 1]
    with pytest.raises(UserError, match="y_train has nothing in row 3"):
        user_source((X, y.where(np.arange(60) != 3)), (XT, y_test))


def test_names_given_with_numbers_are_kept():
    given = {"x_train": X, "y_train": Y, "x_test": XT, "y_test": YT}
    assert from_fields("mine", {**given, "class_names": ANIMALS}).class_names == ("cat", "dog", "ant")
    assert from_fields("mine", {**given, "y_train": ANIMALS[Y], "y_test": ANIMALS[YT], "class_names": ANIMALS}).y_train[
        :3
    ].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="the classes have 3 names, but classes is 4"):
        from_fields("mine", {**given, "class_names": ANIMALS, "classes": 4})
    with pytest.raises(UserError, match="class_names must be a list of different names"):
        from_fields("mine", {**given, "class_names": ["a", "a", "b"]})


def test_names_are_in_the_summary_and_bits_are_those_of_numbers():
    order = np.argsort(np.argsort(ANIMALS))
    named = simulate({**FAST, "run.name": "a"}, data=(X, ANIMALS[Y]), test=(XT, ANIMALS[YT]))
    numbers = simulate({**FAST, "run.name": "b"}, data=(X, order[Y]), test=(XT, order[YT]))
    assert named.summary["class_names"] == ["ant", "cat", "dog"]
    assert "class_names" not in numbers.summary
    assert named.summary["model_sha256"] == numbers.summary["model_sha256"]


def test_mixed_labels_are_named():
    with pytest.raises(UserError, match="y_train holds numbers and other things, as 'x' in row 1"):
        user_source((X[:3], np.array([0, "x", 1], dtype=object)), (XT, YT))


def faulty(i):
    return (X[i], 0) if i != 7 else 1 / 0


BAD_ITEMS = {
    "raises": (faulty, r"item 7 of data can't be read: ZeroDivisionError: division by zero \(test_own_data.py, line"),
    "no pair": (lambda i: X[i], "item 0 of data is no pair .x, y., but ndarray"),
    "unequal": (lambda i: (X[i] if i != 7 else X[i][:3], 0), r"item 7 of data has shape \[3\], the first one \[5\]"),
    "other dtype": (lambda i: (X[i].astype("u1" if i == 7 else "f4"), 0), "item 7 of data is uint8, the first one fl"),
    "other label": (
        lambda i: (X[i], X[i][: 3 if i == 7 else 5]),
        r"item 7 of the targets of data has shape \[3\], the first one \[5\]",
    ),
    "no label": (lambda i: (X[i], None if i == 7 else 0), "y_train has nothing in row 7"),
}


@pytest.mark.parametrize(("item", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
def test_an_item_that_is_wrong_is_named(item, message):
    with pytest.raises(UserError, match=message):
        user_source(Items(item), (XT, YT))


def test_samples_of_unequal_size_are_named():
    with pytest.raises(UserError, match=r"data: row 7 of x_train has shape \[3\], the first one \[5\]"):
        user_source(([x[:3] if i == 7 else x for i, x in enumerate(X)], Y), (XT, YT))


def images(i):
    return torch.arange(75, dtype=torch.float32).view(3, 5, 5) + i


def flipped(i):
    return (images(i).flip(-1) if torch.rand(()) < 0.5 else images(i)), 0


RANDOM = {
    "torch": flipped,
    "numpy": lambda i: (X[i] + np.random.rand(), 0),  # noqa: NPY002
    "python": lambda i: (X[i] * random.choice([1, 2]), 0),
    "rare": lambda i: ((images(i) * 0 if torch.rand(()) < 0.2 else images(i)), 0),
}
RANDOM_LABEL = Items(lambda i: (X[i], int(torch.randint(0, 3, ()))))


@pytest.mark.parametrize("item", RANDOM.values(), ids=RANDOM.keys())
def test_random_transforms_are_refused_and_the_users_generators_left_alone(item):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    def seed():
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)

    seed()
    expected = drawn()
    seed()
    with pytest.raises(UserError, match=r"differs when it is read again, as with random transforms.*data.augment or"):
        user_source(Items(item), (XT, YT), access="memory")
    with pytest.raises(UserError, match=r"the target of item 0 of data differs when it is read again"):
        user_source(RANDOM_LABEL, (XT, YT))
    # only one item draws, which is none of those that are tried
    rare = Items(lambda i: (X[i] + (random.random() if i == 1 else 0), Y[i]))
    with pytest.raises(UserError, match=r"item 1 of data differs when it is read again, as with random"):
        user_source(rare, (XT, YT), access="memory")
    rarest = Items(lambda i: (X[i] + (i == 1 and random.random() > 2), Y[i]))
    with pytest.raises(UserError, match=r"data draws random numbers when its items are read, as with random"):
        user_source(rarest, (XT, YT), access="memory")
    assert isinstance(user_source(rare, (XT, YT)).x_train, LazyItems)
    assert drawn() == expected


def test_nested_lists_of_two_samples_are_arrays():
    """Each part has two elements, as a pair of x and y has."""
    found = user_source(([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 1, 1]), ([[1.0, 2.0], [2.0, 3.0]], [0, 1]))
    assert found.x_test.tolist() == [[1, 2], [2, 3]]
    assert found.y_test.tolist() == [0, 1]


def test_a_method_called_clients_is_no_list_of_clients():
    class Own(Items):
        def clients(self):
            return 3

    assert user_source(Own(lambda i: (X[i], Y[i])), (XT, YT)).client_train is None


def test_a_dataset_that_seeds_the_generators_itself_is_not_random():
    def item(i):
        torch.manual_seed(i)
        return torch.rand(5), i % 3

    found = user_source(Items(item), (XT, YT), access="memory").x_train
    torch.manual_seed(1)
    assert np.array_equal(found[1], torch.rand(5).numpy())


def test_a_dataset_is_read_once_and_a_bounded_number_of_items_again():
    read = []
    user_source(Items(lambda i: (read.append(i), (X[i % 60], i % 3))[1], 500), (XT, YT))
    assert read[-500:] == list(range(500))
    assert len(read) == 500 + 4 * 16 + 1


def test_columns_are_told_by_name():
    there, wanted = frame(XT, YT)[["label", *"edcba"]], frame(XT, YT)
    assert np.array_equal(user_source(frame(X, Y), there).x_test, user_source(frame(X, Y), wanted).x_test)
    with pytest.raises(UserError, match="test has column 'f', which data does not have"):
        user_source(frame(X, Y), wanted.assign(f=0))
    with pytest.raises(UserError, match=r"data has no column 'lable' .label_column. .did you mean 'label'"):
        user_source(frame(X, Y), wanted, label_column="lable")
    with pytest.raises(UserError, match="client_column and label_column name columns of a DataFrame"):
        user_source((X, Y), (XT, YT), client_column="station")


def test_columns_of_frames_of_features_are_told_by_name_too():
    x, x_test = (frame(each, 0).drop(columns="label") for each in (X, XT))
    source = user_source((x, Y), (x_test[list("edcba")], YT))
    assert np.array_equal(source.x_test, XT)
    with pytest.raises(UserError, match="test lacks column 'c', which data has"):
        user_source((x, Y), (x_test.drop(columns="c"), YT))


def test_a_frame_of_pandas_2_is_an_array_of_features():
    """Its frames have a method ``first``, which is the name of an attribute of what reads its inputs later."""

    class Frame(pd.DataFrame):
        def first(self, offset):
            raise NotImplementedError

    source = user_source((Frame(X), Y), (Frame(XT), YT))
    assert np.array_equal(source.x_train, X)
    assert np.array_equal(source.x_test, XT)


def test_categories_that_read_alike_are_refused():
    labels = pd.Categorical([1, "1", 2] * 20, categories=[1, "1", 2])
    with pytest.raises(UserError, match="y_train has 2 categories that are '1' when written as text"):
        user_source((X, labels), (XT, labels[:12]))


def test_arrays_may_be_tuples():
    source = user_source(tuple(zip(*zip(X, Y, strict=True), strict=True)), (XT, YT))
    assert np.array_equal(source.x_train, X)
    assert np.array_equal(source.y_train, Y)


def test_sweeps_read_data_alike():
    described = {"base": FAST, "spaces": {"wide": {"train.lr": {"uniform": [0.1, 0.2]}}}, "tune": {"name": "s"}}
    (spec,) = read_sweeps(described, ())
    assert load_custom(spec, (X, ANIMALS[Y]), (XT, ANIMALS[YT])).source.class_names == ("ant", "cat", "dog")
    with pytest.raises(UserError, match=r"data.normalization=ghbm is for sources"):
        load_custom(*read_sweeps(described, ["data.normalization=ghbm"]), (X, Y), (XT, YT))
    with pytest.raises(UserError, match=r"column 'clint' .client_column"):
        load_custom(spec, frame(X, Y), frame(XT, YT), client_column="clint")
