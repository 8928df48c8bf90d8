"""How inputs are scaled: by what, against plain numpy and torchvision, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image as Pictures
from torchvision.transforms.v2.functional import normalize

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.normalization import ROWS, checked, of_choice
from fedray.data.sources.doubts import doubts
from fedray.data.sources.source import from_fields, load_source, validate
from fedray.data.sources.user_data import user_source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve, resolve_data

rng = np.random.default_rng(3)


def scaled(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Returns what a model gets, as documented."""
    wide = (slice(None), *(None,) * (x.ndim - 2))
    return x.astype(np.float32) * scale[wide] + shift[wide]


@pytest.mark.parametrize("shape", [(3 * ROWS + 5, 3), (300, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_standard_is_mean_and_deviation_of_each_channel(shape, dtype):
    x = (rng.gamma(2, 20, shape) + np.arange(3).reshape(3, *[1] * (len(shape) - 2)) * 10).clip(0, 255).astype(dtype)
    found = of_choice("standard", "mine", x)
    axes = (0, *range(2, len(shape)))
    expected = (x - x.mean(axes, np.float64, keepdims=True)) / x.std(axes, np.float64, keepdims=True)
    np.testing.assert_allclose(scaled(x, **found), expected, atol=2e-5)


@pytest.mark.parametrize("values", [([0.3], [0.25]), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
def test_numbers_of_the_users_are_torchvisions(values):
    x = rng.integers(0, 256, (40, 3, 5, 5), dtype=np.uint8)
    labels = np.arange(40) % 2
    config = {"data.mean": values[0], "data.std": values[1], "data.clients": 2, "model.name": "mlp"}
    _, data = resolve(load(config), CustomObjects(source=user_source((x, labels), (x[:4], labels[:4]))))
    expected = normalize(torch.from_numpy(x) / 255, *values)
    torch.testing.assert_close(torch.from_numpy(scaled(x, data.scale, data.shift)), expected)


def unit(shape):
    return rng.random(shape, dtype=np.float32)


DOUBTFUL = {
    "a column": (np.stack([unit(40), 5000 * unit(40)], 1), {}, "column 1 .counted from 0. has a standard dev.* of 1"),
    "pixels that are floats": (unit((40, 3, 5, 5)) * 255, {}, "channel [012] .*data.normalization=standard scales"),
    "channels last": (
        rng.integers(0, 256, (40, 6, 8, 3), dtype=np.uint8),
        {},
        r"\[6, 8, 3\], which models read as 6 ch",
    ),
    "scaled": (np.stack([unit(40), 5000 * unit(40)], 1), {"data.normalization": "standard"}, None),
    "scaled by hand": (5000 * unit((40, 1)), {"data.mean": [2500], "data.std": [1400]}, None),
    "small": (unit((40, 4)) * 10, {}, None),
    "bytes": (rng.integers(0, 256, (40, 3, 8, 8), dtype=np.uint8), {}, None),
    "sequences": (unit((40, 6, 3)), {}, None),
    "tiny images": (unit((40, 3, 3, 3)), {}, None),
}


@pytest.mark.parametrize(("x", "keys", "line"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_inputs_that_are_probably_not_what_was_meant_have_a_line(x, keys, line):
    labels = np.arange(40) % 2
    keys = {"data.clients": 2, "model.name": "logistic", **keys}
    source = user_source((x, labels), (x[:4], labels[:4]), normalization=keys.get("data.normalization", "default"))
    experiment, _ = resolve(load(keys), CustomObjects(source=source))
    found = [note for note in experiment.notes if "scales" in note or "channels" in note]
    assert len(found) == (0 if line is None else 1)
    for each in found:
        assert re.search(f"^warning: {source.name}: .*{line}", each)


COLUMNS = np.stack([unit(40), 5000 * unit(40)], 1)
TABLE = pd.DataFrame(COLUMNS, columns=["age", "income"])


@pytest.mark.parametrize(
    ("x", "which"),
    [(COLUMNS, "column 1 (counted from 0)"), (TABLE, "column 'income'"), ({"x": COLUMNS}, "column 1 (counted from 0)")],
)
def test_a_column_that_is_not_scaled_is_named_where_it_has_a_name(x, which):
    y = np.arange(40) % 2
    (line,) = doubts(user_source((x, y), (x, y)))
    assert line.startswith(f"warning: own: nothing scales the inputs, and {which} has a standard deviation of 1")


def test_names_of_columns_are_kept_and_checked():
    given = {"x_train": COLUMNS, "y_train": np.arange(40) % 2, "x_test": COLUMNS, "y_test": np.arange(40) % 2}
    named = from_fields("it", {**given, "column_names": ["age", "income"]})
    assert validate(named).column_names == ("age", "income")
    assert user_source(TABLE.assign(label=given["y_train"]), TABLE.assign(label=0)).column_names == ("age", "income")
    with pytest.raises(UserError, match="it: column_names must have a name for each column of inputs"):
        from_fields("it", {**given, "column_names": ["age"]})


@pytest.mark.parametrize(
    ("y", "which"),
    [
        (2e5 + 1e5 * unit(40), "the targets have a mean of 2"),
        (2e5 + unit(40), "the targets have a mean of 2e.05 and a standard deviation of 0.29"),
        (np.stack([unit(40), 2e5 * unit(40)], 1), r"column 1 .counted from 0. of the targets has a mean of"),
        (20 * unit(40), None),
        # classes are no quantities
        (2 * np.arange(40), None),
    ],
)
def test_large_targets_of_a_regression_have_a_line(y, which):
    x = unit((40, 3))
    found = doubts(user_source((x, y), (x, y)))
    assert len(found) == (which is not None)
    assert all(
        re.search(f"^warning: own: {which}.*, and nothing scales targets: .*divide them, or", line) for line in found
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.mean": [0.5]}, "give both of data.mean and data.std"),
        ({"data.mean": [0.5], "data.std": [0]}, "data.std"),
        ({"data.mean": [0.5, 0.5], "data.std": [1]}, "sample: data.mean has 2 numbers for 1 channels"),
        ({"data.mean": [0.5], "data.std": [1], "data.normalization": "unit"}, "instead of data.normalization=unit"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        simulate({**keys, "run.output": str(tmp_path)})


def test_only_training_samples_count_and_constant_columns_become_zero():
    x = rng.normal(50, 10, (100, 2)).astype(np.float32)
    x[:, 1] = 7.0
    source = user_source((x, x[:, 0]), (x + 1000, x[:, 0]), normalization="standard", kind="regression")
    np.testing.assert_allclose(source.scale, [1 / x[:, 0].std(dtype=np.float64), 1], rtol=1e-6)
    assert not scaled(x, source.scale, source.shift)[:, 1].any()


def test_a_table_far_from_zero_is_learned_only_if_scaled(tmp_path, monkeypatch):
    """The example of the documents: without it the loss is no number after a round."""
    monkeypatch.chdir(tmp_path)
    rooms, area = rng.integers(1, 6, 200), rng.normal(80, 20, 200)
    table = {"rooms": rooms, "area": area, "price": (area - 80) / 20, "town": rng.choice(list("ABC"), 200)}
    pd.DataFrame(table).to_csv("visits.csv", index=False)
    settings = {
        "data.source": "csv", "data.root": "visits.csv", "data.target_column": "price", "data.client_column": "town",
        "data.input_columns": ["rooms", "area"], "model.name": "logistic", "algorithm.name": "fedavg",
        "engine.kind": "local", "run.rounds": 10, "train.local_steps": 20,
    }  # fmt: skip
    assert simulate({**settings, "run.name": "raw"}).summary["status"] == "diverged"
    result = simulate({**settings, "run.name": "scaled", "data.normalization": "standard"})
    assert result.summary["final"] < 0.1


def test_imagenet_is_that_of_torchvision(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(3):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Pictures.fromarray(pixels).save(tmp_path / part / name / f"{k}.png")
    source = load_source("image_folder", str(tmp_path), "imagenet", image_size=8)
    image = source.x_train.first[0]
    expected = normalize(torch.from_numpy(image) / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    found = scaled(image[None], source.scale, source.shift)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    plain = load_source("image_folder", str(tmp_path), image_size=8)
    np.testing.assert_allclose(plain.scale, np.full(3, 1 / 255), rtol=1e-6)


def test_parts_of_inputs_are_scaled_one_by_one():
    x = {
        "image": rng.integers(0, 256, (20, 3, 4, 4), dtype=np.uint8),
        "age": rng.normal(40, 9, (20, 1)).astype(np.float32),
        "words": rng.integers(0, 9, (20, 5)),
    }
    standard, imagenet = (of_choice(choice, "mine", x) for choice in ("standard", "imagenet"))
    assert standard["scale"]["words"] is None
    assert standard["shift"]["words"] is None
    np.testing.assert_allclose(scaled(x["age"], standard["scale"]["age"], standard["shift"]["age"]).std(), 1, rtol=1e-5)
    assert imagenet["scale"]["age"] is None
    assert imagenet["scale"]["image"].shape == (3,)
    again = checked("mine", x, **standard)
    for key in ("scale", "shift"):
        for name, value in standard[key].items():
            assert (value is None) if again[key][name] is None else np.array_equal(value, again[key][name])


def test_the_choice_is_part_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": rng.normal(5, 1, 50), "target": np.arange(50) % 2}).to_csv("table.csv", index=False)
    keys = {"data.source": "csv", "data.root": "table.csv", "data.clients": 2}
    default, standard = (resolve_data(load({**keys, "data.normalization": each})) for each in ("default", "standard"))
    assert default.digests["normalisation"] != standard.digests["normalisation"]
    assert default.data.scale is None


@pytest.mark.parametrize(
    ("choice", "x", "message"),
    [
        ("imagenet", np.zeros((20, 4), np.float32), r"data: data.normalization=imagenet needs images \[n, 3, "),
        ("standard", np.zeros((20, 4), np.int64), r"data: data.normalization=standard needs numbers with a fraction"),
        ("ghbm", np.zeros((20, 4), np.float32), r"there are default, standard, imagenet"),
    ],
)
def test_what_does_not_apply_is_refused(choice, x, message):
    y = np.arange(20) % 2
    with pytest.raises(UserError, match=message):
        user_source((x, y), (x, y), normalization=choice)


def test_what_is_read_when_used_has_no_mean(tmp_path):
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.full((3,), float(i)), i % 2

    with pytest.raises(UserError, match=r"data.normalization=standard needs inputs in memory"):
        user_source(Items(), Items(), normalization="standard", access="lazy")
    with pytest.raises(UserError, match=r"data.normalization: the source image_folder has no 'standard'"):
        load_source("image_folder", str(tmp_path), "standard", image_size=8)


def test_scale_of_parts_must_have_the_parts():
    x = {"a": np.zeros((4, 2), np.float32), "b": np.zeros((4, 1), np.float32)}
    with pytest.raises(UserError, match="mine: scale and shift must have the same parts as the inputs"):
        checked("mine", x, {"a": np.ones(2)}, None)
    with pytest.raises(UserError, match="mine: scale must be 2 finite numbers"):
        checked("mine", x, {"a": np.ones(3), "b": None}, None)
    found = checked("mine", x, {"a": np.ones(2), "b": None}, None)
    assert found["shift"]["b"] is None
    assert not found["shift"]["a"].any()
